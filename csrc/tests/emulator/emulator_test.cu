// The emulator itself: kernels that are right, and with an argument one that is wrong, which the
// emulator or the sanitizer named in tests/csrc/test_emulator.py must report.

#include <cstdio>
#include <vector>

#include "../../kernels/launch.cuh"
#include "../device.cuh"

namespace consistent {
namespace {

constexpr unsigned kThreads = 96, kWarp = 32, kAll = 0xFFFFFFFFu;

// Each block adds the numbers of its threads: in its warps by shuffles, then in shared memory.
__global__ void sums(int* out, const int* in) {
  CONSISTENT_DYNAMIC_SHARED(int, warps);
  const unsigned block = blockIdx.y * gridDim.x + blockIdx.x, warp = threadIdx.x / kWarp;
  int sum = in[block * blockDim.x + threadIdx.x];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(kAll, sum, unsigned(step));
  if (threadIdx.x % kWarp == 0) warps[warp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) out[block] = warps[0] + warps[1] + warps[2];
}

// Every thread counts what its half of a warp sees, by votes and shuffles of 16 lanes.
__global__ void halves(int* out) {
  const unsigned lane = threadIdx.x % kWarp, half = lane / 16;
  const unsigned mask = half == 0 ? 0xFFFFu : 0xFFFF0000u;
  int seen = 0;
  if (half == 0) {  // the halves go different ways
    seen = __ballot_sync(mask, lane % 3 == 0) == 0x9249u && __any_sync(mask, lane == 5);
  } else {
    seen = !__all_sync(mask, lane != 20) && __all_sync(mask, 1);
  }
  seen += __shfl_sync(mask, int(lane), 3, 16) == int(half * 16 + 3);
  seen += __shfl_up_sync(mask, int(lane), 1, 16) == int(lane % 16 ? lane - 1 : lane);
  seen += __shfl_xor_sync(mask, double(lane), 1) == double(lane ^ 1);
  __syncwarp();
  out[threadIdx.x] = seen;
}

// A lane reads what its neighbour wrote before the barrier of the warp.
__global__ void neighbours(int* out) {
  __shared__ int at[kThreads];
  at[threadIdx.x] = int(threadIdx.x);
  __syncwarp();
  out[threadIdx.x] = at[threadIdx.x ^ 1u];
}

__global__ void totals(int* sum, int* most, float* least, unsigned* last, unsigned* bits) {
  atomicAdd(sum, 1);
  atomicMax(most, int(threadIdx.x));
  atomicMin(least, -float(threadIdx.x));
  if (atomicCAS(last, 7u, 8u) == 7u) atomicExch(last, 9u);
  atomicOr(bits, 1u << threadIdx.x % kWarp);
}

enum class Fault {
  other_barriers,
  ended_thread,
  not_in_mask,
  outside_mask,
  other_masks,
  beyond_shared,
  beyond_dynamic,
  misaligned,
  no_barrier,
  no_warp_barrier,
};

__global__ void wrong(int* out, Fault fault) {
  __shared__ int shared[kThreads];
  CONSISTENT_DYNAMIC_SHARED(int, memory);
  const unsigned own = threadIdx.x, lane = own % kWarp;
  int seen = 0;
  switch (fault) {
    case Fault::other_barriers:
      if (own < kWarp) {
        __syncthreads();
      } else {
        __syncthreads();
      }
      break;
    case Fault::ended_thread:
      if (own == 40) return;
      __syncthreads();
      break;
    case Fault::not_in_mask:
      seen = __shfl_sync(0xFFFFu, int(own), 0);
      break;
    case Fault::outside_mask:
      if (lane < 16) seen = __shfl_xor_sync(0xFFFFu, int(own), 16);
      break;
    case Fault::other_masks:
      seen = __any_sync(lane < 16 ? kAll : kAll - 1, 1) ? 1 : 0;
      break;
    case Fault::beyond_shared:
      shared[own + (own == 95)] = 1;
      break;
    case Fault::beyond_dynamic:
      memory[own + (own == 95)] = 1;
      break;
    case Fault::misaligned:
      seen = int(*reinterpret_cast<const int64_t*>(out + 1 + 2 * (own % 2)));
      break;
    case Fault::no_barrier:
      shared[own] = 1;
      seen = shared[(own + kWarp) % kThreads];
      break;
    case Fault::no_warp_barrier:  // a shuffle orders nothing
      shared[own] = 1;
      seen = __shfl_xor_sync(kAll, 1, 1) + shared[own ^ 1u];
      break;
  }
  out[own] = seen;
}

int check(bool right, const char* what) {
  if (!right) printf("%s: wrong\n", what);
  return !right;
}

template <class T>
std::vector<T> read_back(const DeviceBytes& from, size_t count) {
  const std::vector<char> bytes = from.back(count * sizeof(T));
  std::vector<T> made(count);
  memcpy(made.data(), bytes.data(), bytes.size());
  return made;
}

int check_sums() {
  constexpr unsigned kBlocks = 6;
  std::vector<int> in(kBlocks * kThreads), wanted(kBlocks);
  for (unsigned i = 0; i < in.size(); ++i) in[i] = int(i * i % 17), wanted[i / kThreads] += in[i];
  const DeviceBytes from(in.data(), in.size() * 4), to(kBlocks * 4);
  launch({dim3(2, 3), kThreads, 3 * 4, nullptr}, sums, static_cast<int*>(to.data),
         static_cast<const int*>(from.data));
  return check(read_back<int>(to, kBlocks) == wanted, "sums of blocks");
}

int check_warps() {
  const DeviceBytes to(kThreads * 4), next(kThreads * 4);
  launch({1, kThreads, 0, nullptr}, halves, static_cast<int*>(to.data));
  launch({1, kThreads, 0, nullptr}, neighbours, static_cast<int*>(next.data));
  const std::vector<int> seen = read_back<int>(next, kThreads);
  bool right = true;
  for (unsigned t = 0; t < kThreads; ++t) right = right && seen[t] == int(t ^ 1u);
  return check(read_back<int>(to, kThreads) == std::vector<int>(kThreads, 4), "halves of warps") +
         check(right, "neighbours");
}

int check_atomics() {
  const int none[5] = {0, 0, 0, 7, 0};
  const DeviceBytes to(none, sizeof none);
  int* const at = static_cast<int*>(to.data);
  launch({2, kThreads, 0, nullptr}, totals, at, at + 1, reinterpret_cast<float*>(at + 2),
         reinterpret_cast<unsigned*>(at + 3), reinterpret_cast<unsigned*>(at + 4));
  const std::vector<int> made = read_back<int>(to, 5);
  return check(made[0] == 192 && made[1] == 95 && made[3] == 9 && made[4] == -1, "atomics") +
         check(read_back<float>(to, 3)[2] == -95, "atomics of floats");
}

int check_limits() {
  const auto error = [](const Grid& grid) {
    const DeviceBytes to(kThreads * 4);
    launch(grid, neighbours, static_cast<int*>(to.data));
    return cudaGetLastError();
  };
  int wrong = check(error({1, kThreads, 48 << 10, nullptr}) == cudaSuccess, "48 KB");
  wrong += check(error({1, kThreads, (48 << 10) + 1, nullptr}) != cudaSuccess, "unasked memory");
  wrong += check(error({0, kThreads, 0, nullptr}) != cudaSuccess, "no blocks");
  wrong += check(error({1, 1056, 0, nullptr}) != cudaSuccess, "too many threads");
  wrong += check(error({dim3(1, 65536), kThreads, 0, nullptr}) != cudaSuccess, "too many blocks");
  const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  wrong += check(cudaFuncSetAttribute(neighbours, attribute, 228 << 10) != cudaSuccess, "228 KB");
  wrong += check(cudaFuncSetAttribute(neighbours, attribute, 64 << 10) == cudaSuccess, "64 KB");
  cudaGetLastError();
  return wrong + check(error({1, kThreads, 64 << 10, nullptr}) == cudaSuccess, "asked memory");
}

}  // namespace
}  // namespace consistent

int main(int words, char** given) {
  using namespace consistent;
  if (words > 1) {
    const DeviceBytes to((kThreads + 8) * 4);
    launch({1, kThreads, kThreads * 4, nullptr}, wrong, static_cast<int*>(to.data),
           Fault(atoi(given[1])));
    printf("no fault was found\n");
    return 0;
  }
  const int wrong = check_sums() + check_warps() + check_atomics() + check_limits();
  printf(wrong ? "the emulator is wrong\n" : "the emulator is right\n");
  return wrong != 0;
}
