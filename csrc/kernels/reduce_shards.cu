// The fused sum on CUDA. Without a norm a thread takes 16 bytes of each part. With a norm a block
// takes a row and keeps its activated sums in shared memory, or computes them again if they do not
// fit there.

#include <algorithm>

#include "activation.h"
#include "block.cuh"
#include "check.h"
#include "launch.cuh"
#include "vector.cuh"

namespace consistent {
namespace {

constexpr int kThreads = 256;

// Blocks of a multiprocessor at once, for packs of `kCount`. With more there are too few registers
// to load eight parts before the first is added: ptxas loads one at a time, or spills.
template <int kCount>
constexpr int kBlocksAtOnce = kCount == 8 ? 3 : 4;
constexpr int64_t kMostBlocks = most_blocks(1 << 16);  // beyond it, each takes several turns
constexpr int64_t kMostSharedBytes = 160 << 10;        // for a row, where the GPU has as much
constexpr int64_t kOtherSharedBytes = 1 << 10;         // at least what else the block needs
constexpr int64_t kUnaskedBytes = 48 << 10;            // a block has these in all without asking

template <class R>
__device__ __forceinline__ R activated(Activation kind, R x) {
  switch (kind) {  // the same for all threads, so no warp diverges
    case Activation::relu:
      return activate<Activation::relu>(x);
    case Activation::gelu:
      return activate<Activation::gelu>(x);
    case Activation::gelu_tanh:
      return activate<Activation::gelu_tanh>(x);
    case Activation::silu:
      return activate<Activation::silu>(x);
    default:
      return x;
  }
}

template <class Out, int kCount, class R>
__device__ __forceinline__ void store(Out* to, const R from[kCount]) {
  Pack<Out, kCount> pack;
#pragma unroll
  for (int j = 0; j < kCount; ++j) pack.value[j] = Storage<Out>::store(from[j]);
  store_pack(to, pack);
}

// Elements of a vector along the columns: 16 bytes at a time, if it is aligned so.
template <int kCount, class R>
__device__ __forceinline__ Pack<R, kCount> read_vector(const R* from) {
  if (aligned_to<sizeof(R) * kCount>(from)) return load_pack<Pack<R, kCount>>(from);
  Pack<R, kCount> made;
#pragma unroll
  for (int j = 0; j < kCount; ++j) made.value[j] = from[j];
  return made;
}

// Adds `kParts` parts from `first` on to `sums`, in order. All are loaded before the first is
// added.
template <class T, int kCount, int kParts>
__device__ __forceinline__ void add_parts(Real<T> (&sums)[kCount], const Parts& parts, int first,
                                          int64_t from) {
  Pack<T, kCount> packs[kParts];
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    packs[p] = load_pack<Pack<T, kCount>>(static_cast<const T*>(parts.data[first + p]) + from);
  }
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const Real<T> next = Storage<T>::load(packs[p].value[j]);
      sums[j] = p == 0 && first == 0 ? next : sums[j] + next;
    }
  }
}

// The totals of `kCount` elements of a row, from `column` on: element `from` of the parts, `at` of
// the output. They go to `sums`, and to `total` unless it is null.
template <class T, class Out, int kCount>
__device__ __forceinline__ void totals(Real<T> (&sums)[kCount], Out* total, const Parts& parts,
                                       const Epilogue& epilogue, int64_t from, int64_t at,
                                       int64_t column) {
  using R = Real<T>;
  const R* bias = static_cast<const R*>(epilogue.bias);
  const T* residual = static_cast<const T*>(epilogue.residual);
  Pack<R, kCount> shift = {};
  Pack<T, kCount> more = {};
  if (bias != nullptr) shift = read_vector<kCount>(bias + column);
  if (residual != nullptr) more = load_pack<Pack<T, kCount>>(residual + at);
  int p = 0;
  for (; parts.count - p >= 8; p += 8) add_parts<T, kCount, 8>(sums, parts, p, from);
  if (parts.count - p >= 4) add_parts<T, kCount, 4>(sums, parts, p, from), p += 4;
  if (parts.count - p >= 2) add_parts<T, kCount, 2>(sums, parts, p, from), p += 2;
  if (parts.count - p >= 1) add_parts<T, kCount, 1>(sums, parts, p, from);
  const R by = R(epilogue.scale);
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    R value = sums[j] * by;
    if (bias != nullptr) value += shift.value[j];
    if (residual != nullptr) value += Storage<T>::load(more.value[j]);
    sums[j] = value;
  }
  if (total != nullptr) store<Out, kCount>(total + at, sums);
}

template <class T, class Out, int kCount>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<kCount>)
    reduce_flat(Out* out, Out* total, Parts parts, Epilogue epilogue, RowsOfSlice slice) {
  const int64_t packs = slice.rows * slice.columns / kCount;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t p = int64_t(blockIdx.x) * kThreads + threadIdx.x; p < packs; p += step) {
    const int64_t at = p * kCount;
    const int64_t row = at / slice.columns, column = at - row * slice.columns;
    Real<T> sums[kCount] = {};
    totals<T, Out, kCount>(sums, total, parts, epilogue, slice.start(row) + column, at, column);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sums[j] = activated(epilogue.activation, sums[j]);
    store<Out, kCount>(out + at, sums);
  }
}

// A row in shared memory, by the packs of its columns. A pack lies in pieces of 16 bytes with those
// of other packs between them: so the lanes of a warp, which take packs side by side, reach
// different banks.
template <class R, int kCount>
struct KeptRow {
  static constexpr int kEach = kCount < kPackOf<R> ? kCount : kPackOf<R>, kPieces = kCount / kEach;
  using Piece = Pack<R, kEach>;
  Piece* pieces;
  int64_t packs;

  __device__ __forceinline__ void write(int64_t pack, const R (&from)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      Piece piece;
#pragma unroll
      for (int j = 0; j < kEach; ++j) piece.value[j] = from[i * kEach + j];
      pieces[i * packs + pack] = piece;
    }
  }

  __device__ __forceinline__ void read(int64_t pack, R (&to)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const Piece piece = pieces[i * packs + pack];
#pragma unroll
      for (int j = 0; j < kEach; ++j) to[i * kEach + j] = piece.value[j];
    }
  }
};

template <class T, class Out, int kCount, bool kKept>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<kCount>)
    reduce_rows(Out* out, Out* total, Parts parts, Epilogue epilogue, RowsOfSlice slice) {
  using R = Real<T>;
  CONSISTENT_DYNAMIC_SHARED(double, memory);
  __shared__ Sum<R> shared[kThreads / kWarp];
  using Kept = KeptRow<R, kCount>;
  const Kept row{reinterpret_cast<typename Kept::Piece*>(memory), slice.columns / kCount};
  const R count = R(slice.columns);
  for (int64_t r = blockIdx.x; r < slice.rows; r += gridDim.x) {
    const int64_t start = slice.start(r), first = r * slice.columns;
    // Calls visit(column, values) for each pack of this thread.
    const auto each = [&](Out* seen, const auto& visit) {
      for (int64_t c = threadIdx.x * kCount; c < slice.columns; c += kThreads * kCount) {
        R values[kCount] = {};
        totals<T, Out, kCount>(values, seen, parts, epilogue, start + c, first + c, c);
#pragma unroll
        for (int j = 0; j < kCount; ++j) values[j] = activated(epilogue.activation, values[j]);
        visit(c, values);
      }
    };
    // The same for the next passes. `row` needs no __syncthreads: a thread reads back only what it
    // has written itself.
    const auto again = [&](const auto& visit) {
      if constexpr (kKept) {
        for (int64_t c = threadIdx.x * kCount; c < slice.columns; c += kThreads * kCount) {
          R values[kCount];
          row.read(c / kCount, values);
          visit(c, values);
        }
      } else {
        each(nullptr, visit);
      }
    };
    const bool centred = epilogue.norm == Norm::layer;
    R sum = 0, squares = 0, mean = 0;
    each(total, [&](int64_t c, const R(&values)[kCount]) {
#pragma unroll
      for (int j = 0; j < kCount; ++j)
        centred ? sum += values[j] : squares += values[j] * values[j];
      if constexpr (kKept) row.write(c / kCount, values);
    });
    if (centred) {
      mean = block_sum(sum, shared) / count;
      again([&](int64_t, const R(&values)[kCount]) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) squares += (values[j] - mean) * (values[j] - mean);
      });
    }
    const R by = R(1) / root(R(block_sum(squares, shared) / count + R(epilogue.eps)));
    const R* weight = static_cast<const R*>(epilogue.weight);
    const R* bias = static_cast<const R*>(epilogue.norm_bias);
    again([&](int64_t c, const R(&values)[kCount]) {
      R made[kCount];
      Pack<R, kCount> scale = {}, shift = {};
      if (weight != nullptr) scale = read_vector<kCount>(weight + c);
      if (bias != nullptr) shift = read_vector<kCount>(bias + c);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        made[j] = (values[j] - mean) * by;
        if (weight != nullptr) made[j] *= scale.value[j];
        if (bias != nullptr) made[j] += shift.value[j];
      }
      store<Out, kCount>(out + first + c, made);
    });
  }
}

// The shared memory that a block of the current GPU may use for a row: 64 KB to 228 KB, by model.
int64_t shared_bytes() {
  int device = 0, most = 0;
  CONSISTENT_CHECK_CUDA(cudaGetDevice(&device));
  CONSISTENT_CHECK_CUDA(
      cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return std::min(kMostSharedBytes, int64_t(most) - kOtherSharedBytes);
}

bool multiple(const void* x, int64_t bytes) {
  return x == nullptr || reinterpret_cast<uintptr_t>(x) % uintptr_t(bytes) == 0;
}

template <class T, class Out>
struct Launch {
  Out *out, *total;
  const Parts& parts;
  const Epilogue& epilogue;
  const RowsOfSlice& slice;
  cudaStream_t stream;

  // Whether every pack is aligned: of the parts, the residual and the outputs.
  bool packed(int64_t count) const {
    const int64_t in = count * int64_t(sizeof(T)), to = count * int64_t(sizeof(Out));
    bool fits = slice.columns % count == 0 && slice.stride % count == 0 && slice.first % count == 0;
    for (int p = 0; p < parts.count; ++p) fits = fits && multiple(parts.data[p], in);
    return fits && multiple(epilogue.residual, in) && multiple(out, to) && multiple(total, to);
  }

  template <int kCount>
  void flat() const {
    const int64_t packs = slice.rows * slice.columns / kCount;
    const int64_t blocks = std::min((packs + kThreads - 1) / kThreads, kMostBlocks);
    launch({unsigned(blocks), kThreads, 0, stream}, reduce_flat<T, Out, kCount>, out, total, parts,
           epilogue, slice);
  }

  template <int kCount>
  void rows() const {
    const int64_t bytes = slice.columns * int64_t(sizeof(Real<T>));
    const unsigned blocks = unsigned(std::min(slice.rows, kMostBlocks));
    if (bytes > shared_bytes()) {
      launch({blocks, kThreads, 0, stream}, reduce_rows<T, Out, kCount, false>, out, total, parts,
             epilogue, slice);
      return;
    }
    const auto kernel = reduce_rows<T, Out, kCount, true>;
    if (bytes > kUnaskedBytes - kOtherSharedBytes) {
      CONSISTENT_CHECK_CUDA(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)));
    }
    launch({blocks, kThreads, size_t(bytes), stream}, kernel, out, total, parts, epilogue, slice);
  }

  void operator()() const {
    constexpr int kCount = 16 / int(std::max(sizeof(T), sizeof(Out)));
    const bool whole = packed(kCount), normed = epilogue.norm != Norm::none;
    if (normed) return whole ? rows<kCount>() : rows<1>();
    whole ? flat<kCount>() : flat<1>();
  }
};

struct ByOut {
  void *out, *total;
  Dtype dtype;
  const Parts& parts;
  const Epilogue& epilogue;
  const RowsOfSlice& slice;
  cudaStream_t stream;

  template <class T>
  void operator()(T) const {
    if (dtype == parts.dtype) return to<T, T>();
    to<T, Real<T>>();
  }

  template <class T, class Out>
  void to() const {
    Launch<T, Out>{
        static_cast<Out*>(out), static_cast<Out*>(total), parts, epilogue, slice, stream}();
  }
};

}  // namespace

void reduce_shards_cuda(void* out, void* total, Dtype dtype, const Parts& parts,
                        const Epilogue& epilogue, const RowsOfSlice& slice, void* stream) {
  if (slice.rows * slice.columns == 0) return;
  visit_float_type(parts.dtype, ByOut{out, total, dtype, parts, epilogue, slice,
                                      static_cast<cudaStream_t>(stream)});
  CONSISTENT_CHECK_CUDA(cudaGetLastError());
}

}  // namespace consistent
