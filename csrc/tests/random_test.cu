// nvcc -std=c++17 -O3 -arch=sm_90 -fmad=false -Xcompiler -ffp-contract=off
// csrc/tests/random_test.cu
//   csrc/kernels/random.cu csrc/kernels/random_cpu.cpp -o random_test && ./random_test
//
// Compares the bytes that CUDA and the CPU write for every distribution, dtype and cut. Then it
// times 2^28 float32 values beside setting as many bytes. With any argument it times nothing, for
// runs under compute-sanitizer.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "../kernels/random.h"
#include "cases.h"
#include "device.cuh"

using namespace consistent;

namespace {

constexpr int64_t kLarge = int64_t(1) << 28;

// Runs one op on both and counts the bytes that differ. cpu(out) and cuda(out) fill `size` bytes.
template <class Cpu, class Cuda>
int64_t differences(size_t size, const Cpu& cpu, const Cuda& cuda) {
  std::vector<char> here(size), there(size);
  DeviceBytes device(size);
  cpu(here.data());
  cuda(device.data);
  CONSISTENT_CHECK_CUDA(cudaMemcpy(there.data(), device.data, size, cudaMemcpyDeviceToHost));
  int64_t count = 0;
  for (size_t i = 0; i < size; ++i) count += here[i] != there[i];
  return count;
}

int64_t compare_fills(Draw draw, const Box& box) {
  int64_t wrong = 0;
  const int64_t count = box.run * box.runs;
  for (const Distribution& d : distributions()) {
    for (int t = 0; t <= int(Dtype::boolean); ++t) {
      const Dtype dtype = Dtype(t);
      if (!applies(d, dtype)) continue;
      const int64_t bytes = differences(
          size_t(count) * size_of(dtype),
          [&](void* out) { fill_cpu(out, dtype, d, draw, box, 0, count); },
          [&](void* out) { fill_cuda(out, dtype, d, draw, box, nullptr); });
      if (bytes) printf("kind %d dtype %d: %lld bytes differ\n", int(d.kind), t, (long long)bytes);
      wrong += bytes;
    }
  }
  return wrong;
}

int64_t compare_dropout(Draw draw, const Box& box) {
  const int64_t count = box.run * box.runs;
  std::vector<float> x(count, 1.7f);
  DeviceBytes on_device(size_t(count) * 4);
  CONSISTENT_CHECK_CUDA(
      cudaMemcpy(on_device.data, x.data(), size_t(count) * 4, cudaMemcpyHostToDevice));
  int64_t wrong = 0;
  for (Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
    const Dropout rule{0xC0000000u, 1 / 0.75};
    wrong += differences(
        size_t(count) * size_of(dtype),
        [&](void* out) { dropout_cpu(out, dtype, x.data(), rule, draw, box, 0, count); },
        [&](void* out) { dropout_cuda(out, dtype, on_device.data, rule, draw, box, nullptr); });
  }
  if (wrong) printf("dropout: %lld bytes differ\n", (long long)wrong);
  return wrong;
}

int64_t compare_bernoulli(Draw draw, const Box& box) {
  const int64_t count = box.run * box.runs;
  std::vector<double> p(count);
  for (int64_t i = 0; i < count; ++i) p[i] = double(i % 101) / 100;
  DeviceBytes on_device(size_t(count) * 8);
  CONSISTENT_CHECK_CUDA(
      cudaMemcpy(on_device.data, p.data(), size_t(count) * 8, cudaMemcpyHostToDevice));
  const double* there = static_cast<const double*>(on_device.data);
  const int64_t wrong = differences(
      size_t(count),
      [&](void* out) { bernoulli_cpu(out, Dtype::boolean, p.data(), draw, box, 0, count); },
      [&](void* out) { bernoulli_cuda(out, Dtype::boolean, there, draw, box, nullptr); });
  if (wrong) printf("bernoulli: %lld bytes differ\n", (long long)wrong);
  return wrong;
}

void timing(Draw draw) {
  const Box box = run_of(0, kLarge);
  const int64_t bytes = kLarge * 4;
  DeviceBytes x{size_t(bytes)}, y{size_t(bytes)};
  CONSISTENT_CHECK_CUDA(cudaMemset(x.data, 0, size_t(bytes)));
  const Distribution uniform{Kind::uniform, 0, 1, 0, 0.99999994}, normal{Kind::normal, 0, 1};
  const Dropout rule{0x7FFFFFFFu, 2};
  time_of("memset", bytes, [&] { cudaMemsetAsync(y.data, 0, size_t(bytes)); });
  time_of("uniform", bytes, [&] { fill_cuda(y.data, Dtype::f32, uniform, draw, box, nullptr); });
  time_of("normal", bytes, [&] { fill_cuda(y.data, Dtype::f32, normal, draw, box, nullptr); });
  time_of("dropout", 2 * bytes,
          [&] { dropout_cuda(y.data, Dtype::f32, x.data, rule, draw, box, nullptr); });
}

}  // namespace

int main(int words, char**) {
  const Draw draw{0x123456789ABCDEFu, 42};
  int64_t wrong = 0;
  for (const Box& box : boxes()) {
    wrong += compare_fills(draw, box) + compare_dropout(draw, box) + compare_bernoulli(draw, box);
  }
  printf(wrong ? "CUDA and CPU differ\n" : "CUDA and CPU give the same bytes\n");
  if (words < 2) timing(draw);
  return wrong != 0;
}
