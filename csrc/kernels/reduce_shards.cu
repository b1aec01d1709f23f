// The fused sum of reduce_shards.h on CUDA.
//
//   for row in rows:
//     for column in columns:  // parts[p] at slice.start(row) + column; all in R, rounded each time
//       y = R(parts[0][..]);  for p in 1 .. count - 1: y = y + R(parts[p][..])
//       y = y * R(scale);  y = y + bias[column];  y = y + R(residual[row][column])
//       total[row][column] = Out(y);  a[column] = activation(y)  // of the y that is not rounded
//     if there is no norm: out[row] = Out(a);  continue
//     mean = layer ? sum(a) / columns : 0;  by = 1 / sqrt(sum((a - mean)^2) / columns + eps)
//     for column in columns:
//       out[row][column] = Out((a[column] - mean) * by * weight[column] + norm_bias[column])
//
// A step whose pointer is null is left out. Outside of activation() no multiplication is fused with
// an addition. Here the norm's sums over columns are in R, in the order of the threads, and are
// multiplied by R(1 / columns); the CPU adds lanes in R and rounds the mean and `by` from double.
//
// Without a norm, a thread takes 16 bytes of each part. With a norm, a block takes a row and keeps
// the row's activated sums between its passes over the row: in registers, or in shared memory for a
// longer row. A row that does not fit in shared memory either is computed again in each pass.

#include <algorithm>

#include "activation.h"
#include "block.cuh"
#include "check.h"
#include "launch.cuh"
#include "vector.cuh"

namespace consistent {
namespace {

constexpr int kThreads = 256;
constexpr int kAtOnce = 4;  // parts that are loaded before the first is added

// Resident blocks per multiprocessor, for __launch_bounds__. These counts leave each thread enough
// registers to hold a pack of kAtOnce parts; with more blocks ptxas loads one part after the other,
// or spills. ptxas needs more registers for sm_100 and sm_120, and an sm_75 multiprocessor holds at
// most 1,024 threads.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kFlatBlocks = 3, kRowBlocks = 3;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kFlatBlocks = 4, kRowBlocks = 4;
#else
constexpr int kFlatBlocks = 5, kRowBlocks = 4;
#endif
constexpr int64_t kMostBlocks = most_blocks(1 << 16);  // of a grid; for more, blocks loop
constexpr int kMostKept = 16;                    // elements of a row in one thread's registers
constexpr int kMostFetched = 2;                  // packs per thread with prefetched norm vectors
constexpr int64_t kMostSharedBytes = 160 << 10;  // for a row, if the GPU has that much
constexpr int64_t kOtherSharedBytes = 1 << 10;   // at least what a block needs besides
constexpr int64_t kUnaskedBytes = 48 << 10;      // usable without cudaFuncSetAttribute

template <class R>
__device__ __forceinline__ R activated(Activation kind, R x) {
  switch (kind) {  // `kind` is the same for all threads, so no warp diverges
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

template <class R, int kCount>
__device__ __forceinline__ void activate_all(Activation kind, R (&values)[kCount]) {
  if (kind == Activation::none) return;  // one branch for all of them, not one for each
#pragma unroll
  for (int j = 0; j < kCount; ++j) values[j] = activated(kind, values[j]);
}

// kCount elements of a vector along the columns, from `column` on: loaded 16 bytes at a time if the
// address is aligned, else one by one.
template <int kCount, class V>
__device__ __forceinline__ Pack<V, kCount> read_vector(const void* vector, int64_t column) {
  const V* from = static_cast<const V*>(vector) + column;
  if (aligned_to<sizeof(V) * kCount>(from)) return load_pack<Pack<V, kCount>>(from);
  Pack<V, kCount> made;
#pragma unroll
  for (int j = 0; j < kCount; ++j) made.value[j] = from[j];
  return made;
}

// The same as Real<T>, from a vector of T if the epilogue is `narrow`.
template <class T, int kCount>
__device__ __forceinline__ Pack<Real<T>, kCount> vector_at(const void* vector, int64_t column,
                                                           const Epilogue& epilogue) {
  if (sizeof(T) == sizeof(Real<T>) || !epilogue.narrow) {
    return read_vector<kCount, Real<T>>(vector, column);
  }
  return widened(read_vector<kCount, T>(vector, column));
}

template <class R, int kCount>
__device__ __forceinline__ void add_to(R (&sums)[kCount], const Pack<R, kCount>& more) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) sums[j] += more.value[j];
}

// Adds parts [first, first + kParts) to `sums`, in order, and returns the number of the part after
// them. All loads are issued before the first addition, so that their latencies overlap.
template <class T, int kCount, int kParts>
__device__ __forceinline__ int add_parts(Real<T> (&sums)[kCount], const Parts& parts, int first,
                                         int64_t from) {
  Pack<T, kCount> packs[kParts];
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    packs[p] = load_pack<Pack<T, kCount>>(static_cast<const T*>(parts.data[first + p]) + from);
  }
#pragma unroll
  for (int p = 0; p < kParts; ++p) add_to(sums, widened(packs[p]));
  return first + kParts;
}

// Computes the totals of kCount elements of a row, from `column` on. The first one is element
// `from` of each part and element `at` of the output. The totals go to `sums`, and rounded to
// `total` unless that is null; `sums` stays unrounded.
template <class T, class Out, int kCount>
__device__ __forceinline__ void totals(Real<T> (&sums)[kCount], Out* total, const Parts& parts,
                                       const Epilogue& epilogue, int64_t from, int64_t at,
                                       int64_t column) {
  using R = Real<T>;
  const T* residual = static_cast<const T*>(epilogue.residual);
  Loaded<Pack<T, kCount>> more = {};
  if (residual != nullptr) more = load<Pack<T, kCount>>(residual + at);
#pragma unroll
  for (int j = 0; j < kCount; ++j) sums[j] = R(-0.0);  // -0 + x is x, also where x is -0
  // The first parts before the loop: their pointers are then at fixed places among the parameters,
  // and no register holds them.
  int p = 0;
  if (parts.count >= kAtOnce) p = add_parts<T, kCount, kAtOnce>(sums, parts, 0, from);
  while (parts.count - p >= kAtOnce) p = add_parts<T, kCount, kAtOnce>(sums, parts, p, from);
  if (parts.count - p >= 2) p = add_parts<T, kCount, 2>(sums, parts, p, from);
  if (parts.count - p >= 1) add_parts<T, kCount, 1>(sums, parts, p, from);
  const R by = R(epilogue.scale);
#pragma unroll
  for (int j = 0; j < kCount; ++j) sums[j] *= by;
  // Loaded only now, a bias takes no registers while the parts are loaded.
  if (epilogue.bias != nullptr) add_to(sums, vector_at<T, kCount>(epilogue.bias, column, epilogue));
  if (residual != nullptr) add_to(sums, widened(more.pack()));
  if (total != nullptr) store_pack(total + at, rounded<Out>(sums));
}

template <class T, class Out, int kCount>
__global__ void __launch_bounds__(kThreads, kFlatBlocks)
    reduce_flat(Out* out, Out* total, Parts parts, Epilogue epilogue, RowsOfSlice slice) {
  const int64_t packs = slice.rows * slice.columns / kCount;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  // If so, the address of a pack needs no division, which is slow in 64 bits.
  const bool flat = slice.rows <= slice.group && epilogue.bias == nullptr;
  for (int64_t p = int64_t(blockIdx.x) * kThreads + threadIdx.x; p < packs; p += step) {
    const int64_t at = p * kCount;
    int64_t from = slice.first + at, column = 0;
    if (!flat) {
      const int64_t row = at / slice.columns;
      column = at - row * slice.columns;
      from = slice.start(row) + column;
    }
    Real<T> sums[kCount];
    totals<T, Out, kCount>(sums, total, parts, epilogue, from, at, column);
    activate_all(epilogue.activation, sums);
    store_pack(out + at, rounded<Out>(sums));
  }
}

// Three classes keep the activated sums of a row between the passes over it: InRegisters, InShared
// and MadeAgain. In the first pass, each calls make(column, values) and then visit(column, values)
// for every pack of this thread; in later passes, visit(column, values) for the same packs. In the
// last pass it calls visit(column, values, weight, bias) with the norm's weight and bias.

// A last pass that loads the norm's weight and bias pack by pack.
template <class T, int kCount, class Row, class Make, class Visit>
__device__ __forceinline__ void last_of(Row& row, int64_t columns, const Make& make,
                                        const Epilogue& epilogue, const Visit& visit) {
  row.again(columns, make, [&](int64_t c, const Real<T>(&values)[kCount]) {
    Pack<Real<T>, kCount> weight = {}, bias = {};
    if (epilogue.weight != nullptr) weight = vector_at<T, kCount>(epilogue.weight, c, epilogue);
    if (epilogue.norm_bias != nullptr) {
      bias = vector_at<T, kCount>(epilogue.norm_bias, c, epilogue);
    }
    visit(c, values, weight, bias);
  });
}

// Keeps at most kPacks packs per thread in registers. The norm's weights and biases, of type V and
// aligned to packs, are fetched all at once before the last block_sum of the row: fetched pack by
// pack after it, each pack would cost the thread another wait for memory. With more than
// kMostFetched packs no registers are left for them.
template <class T, int kCount, int kPacks, class V>
struct InRegisters {
  using R = Real<T>;
  R kept[kPacks][kCount];
  static constexpr bool kFetches = kPacks <= kMostFetched;
  Loaded<Pack<V, kCount>> weights[kPacks], biases[kPacks];

  template <class Visit>
  __device__ __forceinline__ void each(int64_t columns, const Visit& visit) {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      const unsigned c = (i * blockDim.x + threadIdx.x) * kCount;
      if (c < unsigned(columns)) visit(i, c);
    }
  }
  template <class Make, class Visit>
  __device__ __forceinline__ void first(int64_t columns, const Make& make, const Visit& visit) {
    each(columns, [&](int i, unsigned c) { make(c, kept[i]); });
    again(columns, make, visit);
  }
  template <class Make, class Visit>
  __device__ __forceinline__ void again(int64_t columns, const Make&, const Visit& visit) {
    each(columns, [&](int i, unsigned c) { visit(c, kept[i]); });
  }
  __device__ __forceinline__ void fetch(int64_t columns, const Epilogue& epilogue) {
    if (!kFetches) return;
    const V* const weight = static_cast<const V*>(epilogue.weight);
    const V* const bias = static_cast<const V*>(epilogue.norm_bias);
    // Without this initialization, packs that no branch below writes would be live from row to row
    // and occupy registers across the loop.
#pragma unroll
    for (int i = 0; i < kPacks; ++i) weights[i] = biases[i] = {};
    each(columns, [&](int i, unsigned c) {
      if (weight != nullptr) weights[i] = load<Pack<V, kCount>>(weight + c);
      if (bias != nullptr) biases[i] = load<Pack<V, kCount>>(bias + c);
    });
  }
  template <class Make, class Visit>
  __device__ __forceinline__ void last(int64_t columns, const Make& make, const Epilogue& epilogue,
                                       const Visit& visit) {
    if constexpr (!kFetches) return last_of<T, kCount>(*this, columns, make, epilogue, visit);
    each(columns,
         [&](int i, unsigned c) { visit(c, kept[i], weights[i].pack(), biases[i].pack()); });
  }
};

template <int kCount, class Visit>
__device__ __forceinline__ void each_pack(int64_t columns, const Visit& visit) {
  for (int64_t c = threadIdx.x * kCount; c < columns; c += kThreads * kCount) visit(c);
}

// Keeps a row in shared memory. A pack is stored as pieces of 16 bytes: piece 0 of all packs first,
// then piece 1 of all packs, and so on. So the lanes of a warp, which take adjacent packs, access
// different banks. No __syncthreads is needed: a thread reads back only what it has written itself.
template <class T, int kCount>
struct InShared {
  using R = Real<T>;
  static constexpr int kEach = kCount < kPackOf<R> ? kCount : kPackOf<R>, kPieces = kCount / kEach;
  using Piece = Pack<R, kEach>;

  static __device__ __forceinline__ Piece* pieces() {
    CONSISTENT_DYNAMIC_SHARED(double, memory);
    return reinterpret_cast<Piece*>(memory);
  }
  template <class Make, class Visit>
  __device__ __forceinline__ void first(int64_t columns, const Make& make, const Visit& visit) {
    each_pack<kCount>(columns, [&](int64_t c) {
      R values[kCount];
      make(c, values);
      visit(c, values);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        Piece piece;
#pragma unroll
        for (int j = 0; j < kEach; ++j) piece.value[j] = values[i * kEach + j];
        pieces()[(i * columns + c) / kCount] = piece;
      }
    });
  }
  template <class Make, class Visit>
  __device__ __forceinline__ void again(int64_t columns, const Make&, const Visit& visit) {
    each_pack<kCount>(columns, [&](int64_t c) {
      R values[kCount];
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const Piece piece = pieces()[(i * columns + c) / kCount];
#pragma unroll
        for (int j = 0; j < kEach; ++j) values[i * kEach + j] = piece.value[j];
      }
      visit(c, values);
    });
  }
  __device__ __forceinline__ void fetch(int64_t, const Epilogue&) {}
  template <class Make, class Visit>
  __device__ __forceinline__ void last(int64_t columns, const Make& make, const Epilogue& epilogue,
                                       const Visit& visit) {
    last_of<T, kCount>(*this, columns, make, epilogue, visit);
  }
};

// Keeps nothing: each pass computes the sums again. Only the first pass writes `total`.
template <class T, int kCount>
struct MadeAgain {
  using R = Real<T>;
  template <class Make, class Visit>
  __device__ __forceinline__ void first(int64_t columns, const Make& make, const Visit& visit,
                                        bool writes = true) {
    each_pack<kCount>(columns, [&](int64_t c) {
      R values[kCount];
      make(c, values, writes);
      visit(c, values);
    });
  }
  template <class Make, class Visit>
  __device__ __forceinline__ void again(int64_t columns, const Make& make, const Visit& visit) {
    first(columns, make, visit, false);
  }
  __device__ __forceinline__ void fetch(int64_t, const Epilogue&) {}
  template <class Make, class Visit>
  __device__ __forceinline__ void last(int64_t columns, const Make& make, const Epilogue& epilogue,
                                       const Visit& visit) {
    last_of<T, kCount>(*this, columns, make, epilogue, visit);
  }
};

template <class T, class Out, int kCount, class Kept>
__global__ void __launch_bounds__(kThreads, kRowBlocks)
    reduce_rows(Out* out, Out* total, Parts parts, Epilogue epilogue, RowsOfSlice slice) {
  using R = Real<T>;
  __shared__ Sum<R> shared[2][kThreads / kWarp];
  const int64_t columns = slice.columns;
  const R share = R(1) / R(columns);
  const bool centred = epilogue.norm == Norm::layer;
  int turn = 0;  // alternates the slots: block_reduce must not reuse those of the last reduction
  for (int64_t r = blockIdx.x; r < slice.rows; r += gridDim.x) {
    const int64_t start = slice.start(r), first = r * columns;
    Kept row;
    const auto make = [&](int64_t c, R(&values)[kCount], bool writes = true) {
      Out* const to = writes ? total : nullptr;
      totals<T, Out, kCount>(values, to, parts, epilogue, start + c, first + c, c);
      activate_all(epilogue.activation, values);
    };
    R sum = 0, squares = 0, mean = 0;
    row.first(columns, make, [&](int64_t, const R(&values)[kCount]) {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        centred ? sum += values[j] : squares += values[j] * values[j];
      }
    });
    if (centred) {
      mean = block_sum(sum, shared[turn ^= 1]) * share;
      row.again(columns, make, [&](int64_t, const R(&values)[kCount]) {
#pragma unroll
        for (int j = 0; j < kCount; ++j) squares += (values[j] - mean) * (values[j] - mean);
      });
    }
    row.fetch(columns, epilogue);
    squares = block_sum(squares, shared[turn ^= 1]);
    const R by = approximate_inverse_root(R(squares * share + R(epilogue.eps)));
    const bool weighted = epilogue.weight != nullptr, biased = epilogue.norm_bias != nullptr;
    row.last(columns, make, epilogue,
             [&](int64_t c, const R(&values)[kCount], const auto& weight, const auto& bias) {
               const auto factor = widened(weight), shift = widened(bias);
               R made[kCount];
#pragma unroll
               for (int j = 0; j < kCount; ++j) {
                 made[j] = (values[j] - mean) * by;
                 if (weighted) made[j] *= factor.value[j];
                 if (biased) made[j] += shift.value[j];
               }
               store_pack(out + first + c, rounded<Out>(made));
             });
  }
}

// The shared memory that a block of the current GPU may use for a row. GPUs have 64 KB to 228 KB.
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

  // Whether every pack of the parts, the residual and the outputs is aligned. All rows begin at a
  // multiple of `count` then, since columns, stride and first are multiples of it.
  bool packed(int64_t count) const {
    const int64_t in = count * int64_t(sizeof(T)), to = count * int64_t(sizeof(Out));
    bool fits = slice.columns % count == 0 && slice.stride % count == 0 && slice.first % count == 0;
    for (int p = 0; p < parts.count; ++p) fits = fits && multiple(parts.data[p], in);
    return fits && multiple(epilogue.residual, in) && multiple(out, to) && multiple(total, to);
  }

  // Whether every pack of the norm's weights and biases is aligned; load_pack needs 16 bytes at
  // most.
  bool vectors_packed(int64_t count) const {
    const int64_t bytes = count * int64_t(epilogue.narrow ? sizeof(T) : sizeof(Real<T>));
    const int64_t least = std::min<int64_t>(bytes, 16);
    return multiple(epilogue.weight, least) && multiple(epilogue.norm_bias, least);
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
    if constexpr (kCount > 1) {
      if (vectors_packed(kCount)) {
        const int64_t packs = slice.columns / kCount;
        // For a short row, two packs per thread only if that leaves no thread idle; otherwise twice
        // as many threads with one pack each.
        const bool is_even = packs > 4 * kWarp || packs % (2 * kWarp) == 0;
        if (!is_even) return rows_in_registers<kCount, 1>(packs);
        if (packs <= 2 * kThreads) return rows_in_registers<kCount, 2>(packs);
        if constexpr (4 * kCount <= kMostKept) {
          if (packs <= 4 * kThreads) return rows_in_registers<kCount, 4>(packs);
        }
      }
    }
    const int64_t bytes = slice.columns * int64_t(sizeof(Real<T>));
    if (bytes > shared_bytes()) {
      return start(reduce_rows<T, Out, kCount, MadeAgain<T, kCount>>, kThreads, 0);
    }
    const auto kernel = reduce_rows<T, Out, kCount, InShared<T, kCount>>;
    if (bytes > kUnaskedBytes - kOtherSharedBytes) {
      CONSISTENT_CHECK_CUDA(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes)));
    }
    start(kernel, kThreads, bytes);
  }

  template <int kCount, int kPacks>
  void rows_in_registers(int64_t packs) const {
    if constexpr (sizeof(T) < sizeof(Real<T>) && kPacks <= kMostFetched) {
      if (epilogue.narrow) return rows_in_registers<kCount, kPacks, T>(packs);
    }
    rows_in_registers<kCount, kPacks, Real<T>>(packs);
  }

  template <int kCount, int kPacks, class V>
  void rows_in_registers(int64_t packs) const {
    constexpr int kOfWarp = kPacks * kWarp;
    const int64_t warps = (packs + kOfWarp - 1) / kOfWarp;
    start(reduce_rows<T, Out, kCount, InRegisters<T, kCount, kPacks, V>>, warps * kWarp, 0);
  }

  template <class Kernel>
  void start(Kernel* kernel, int64_t threads, int64_t shared) const {
    const unsigned blocks = unsigned(std::min(slice.rows, kMostBlocks));
    launch({blocks, unsigned(threads), size_t(shared), stream}, kernel, out, total, parts, epilogue,
           slice);
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
