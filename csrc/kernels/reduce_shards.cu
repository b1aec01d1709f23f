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
constexpr int64_t kMostBlocks = most_blocks(1 << 16);  // beyond it, each takes several turns
constexpr int64_t kMostSharedBytes = 160 << 10;        // for a row, where the GPU has as much
constexpr int64_t kOtherSharedBytes = 1 << 10;         // at least what else the block needs
constexpr int64_t kUnaskedBytes = 48 << 10;            // a kernel may have these without asking

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

template <class T, int kCount>
__device__ __forceinline__ void read(const T* from, Real<T> to[kCount]) {
  const Pack<T, kCount> pack = *reinterpret_cast<const Pack<T, kCount>*>(from);
#pragma unroll
  for (int j = 0; j < kCount; ++j) to[j] = Storage<T>::load(pack.value[j]);
}

template <class Out, int kCount, class R>
__device__ __forceinline__ void store(Out* to, const R from[kCount]) {
  Pack<Out, kCount> pack;
#pragma unroll
  for (int j = 0; j < kCount; ++j) pack.value[j] = Storage<Out>::store(from[j]);
  *reinterpret_cast<Pack<Out, kCount>*>(to) = pack;
}

// The totals of `kCount` elements of a row, from `column` on: element `from` of the parts, `at` of
// the output. They go to `sums`, and to `total` unless it is null.
template <class T, class Out, int kCount>
__device__ __forceinline__ void totals(Real<T> sums[kCount], Out* total, const Parts& parts,
                                       const Epilogue& epilogue, int64_t from, int64_t at,
                                       int64_t column) {
  using R = Real<T>;
  read<T, kCount>(static_cast<const T*>(parts.data[0]) + from, sums);
#pragma unroll 4
  for (int p = 1; p < parts.count; ++p) {
    R next[kCount];
    read<T, kCount>(static_cast<const T*>(parts.data[p]) + from, next);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sums[j] += next[j];
  }
  const R by = R(epilogue.scale);
  const R* bias = static_cast<const R*>(epilogue.bias);
  R more[kCount] = {};
  if (epilogue.residual != nullptr) {
    read<T, kCount>(static_cast<const T*>(epilogue.residual) + at, more);
  }
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    R value = sums[j] * by;
    if (bias != nullptr) value += bias[column + j];
    if (epilogue.residual != nullptr) value += more[j];
    sums[j] = value;
  }
  if (total != nullptr) store<Out, kCount>(total + at, sums);
}

// The row and column of an element. In 32 bits where they are enough, since their division is
// cheap.
struct Place {
  int64_t row, column;
  __device__ __forceinline__ Place(int64_t at, const RowsOfSlice& slice) {
    if (slice.rows * slice.columns < int64_t(1) << 32) {
      const uint32_t columns = uint32_t(slice.columns), r = uint32_t(at) / columns;
      row = r, column = uint32_t(at) - r * columns;
    } else {
      row = at / slice.columns, column = at - row * slice.columns;
    }
  }
};

template <class T, class Out, int kCount>
__global__ void __launch_bounds__(kThreads)
    reduce_flat(Out* out, Out* total, Parts parts, Epilogue epilogue, RowsOfSlice slice) {
  const int64_t packs = slice.rows * slice.columns / kCount;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t p = int64_t(blockIdx.x) * kThreads + threadIdx.x; p < packs; p += step) {
    const int64_t at = p * kCount;
    const Place place(at, slice);
    Real<T> sums[kCount];
    totals<T, Out, kCount>(sums, total, parts, epilogue, slice.start(place.row) + place.column, at,
                           place.column);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sums[j] = activated(epilogue.activation, sums[j]);
    store<Out, kCount>(out + at, sums);
  }
}

template <class T, class Out, int kCount, bool kKept>
__global__ void __launch_bounds__(kThreads)
    reduce_rows(Out* out, Out* total, Parts parts, Epilogue epilogue, RowsOfSlice slice) {
  using R = Real<T>;
  CONSISTENT_DYNAMIC_SHARED(double, memory);
  __shared__ Sum<R> shared[kThreads / kWarp];
  R* row = reinterpret_cast<R*>(memory);
  const R count = R(slice.columns);
  for (int64_t r = blockIdx.x; r < slice.rows; r += gridDim.x) {
    const int64_t start = slice.start(r), first = r * slice.columns;
    // Calls visit(column, values) for each pack of this thread.
    const auto each = [&](Out* seen, const auto& visit) {
      for (int64_t c = threadIdx.x * kCount; c < slice.columns; c += kThreads * kCount) {
        R values[kCount];
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
          visit(c, row + c);
        }
      } else {
        each(nullptr, visit);
      }
    };
    R sum = 0, squares = 0;
    each(total, [&](int64_t c, const R* values) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        sum += values[j];
        if constexpr (kKept) row[c + j] = values[j];
      }
    });
    const R mean = epilogue.norm == Norm::layer ? block_sum(sum, shared) / count : R(0);
    again([&](int64_t, const R* values) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) squares += (values[j] - mean) * (values[j] - mean);
    });
    const R by = R(1) / root(R(block_sum(squares, shared) / count + R(epilogue.eps)));
    const R* weight = static_cast<const R*>(epilogue.weight);
    const R* bias = static_cast<const R*>(epilogue.norm_bias);
    again([&](int64_t c, const R* values) {
      R made[kCount];
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        made[j] = (values[j] - mean) * by;
        if (weight != nullptr) made[j] *= weight[c + j];
        if (bias != nullptr) made[j] += bias[c + j];
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
    if (bytes > kUnaskedBytes) {
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
