// nvcc -std=c++17 -O3 -arch=sm_90 -fmad=false -Xcompiler -ffp-contract=off
// csrc/tests/random_test.cu
//   csrc/kernels/random.cu csrc/kernels/random_cpu.cpp -o random_test && ./random_test
//
// Compares the bytes that CUDA and the CPU write for every distribution, dtype and box. Then it
// times 2^28 float32 values, and a memset of the same number of bytes. With any argument it does
// not time, for runs under compute-sanitizer; with "few" it leaves out large tensors too.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "../kernels/random.h"
#include "cases.h"
#include "device.cuh"
#include "kernel_cases.h"

using namespace consistent;

namespace {

constexpr int64_t kLarge = int64_t(1) << 28;

// The results of one op on both devices. cpu(out) and cuda(out) fill `size` bytes; on CUDA, `out`
// is `skew` bytes after an aligned address.
struct Results {
  Bytes here, there;

  template <class Cpu, class Cuda>
  Results(size_t size, size_t skew, const Cpu& cpu, const Cuda& cuda) : here(size) {
    const DeviceBytes device(size, skew);
    if (size != 0) cpu(here.data());  // the CPU versions are not called for empty tensors
    cuda(device.data);
    there = device.back(size);
  }

  int64_t differences() const {
    int64_t count = 0;
    for (size_t i = 0; i < here.size(); ++i) count += here[i] != there[i];
    return count;
  }
};

int64_t complain(const char* what, Dtype dtype, int64_t wrong) {
  if (wrong) printf("%s dtype %d: %lld differ\n", what, int(dtype), (long long)wrong);
  return wrong;
}

// `skew`, here and below: elements between an aligned address and the data.
int64_t compare_fills(Draw draw, const Box& box, size_t skew) {
  int64_t wrong = 0;
  const int64_t count = box.run * box.runs;
  for (const Distribution& d : distributions()) {
    for (int t = 0; t <= int(Dtype::boolean); ++t) {
      const Dtype dtype = Dtype(t);
      if (!applies(d, dtype)) continue;
      const size_t size = size_t(size_of(dtype));
      const Results made(
          size_t(count) * size, skew * size,
          [&](void* out) { fill_cpu(out, dtype, d, draw, box, 0, count); },
          [&](void* out) { fill_cuda(out, dtype, d, draw, box, nullptr); });
      wrong += complain("fill", dtype, made.differences());
    }
  }
  return wrong;
}

int64_t compare_dropout(Draw draw, const Box& box, size_t skew, bool special) {
  const int64_t count = box.run * box.runs;
  int64_t wrong = 0;
  for (const Dtype dtype : kFloats) {
    Bytes x = numbers(count, dtype, 8);
    if (special) visit_float_type(dtype, StoreSpecials{x});
    const DeviceBytes on_device(x.data(), x.size(), skew * size_t(size_of(dtype)));
    const Dropout rule{0xC0000000u, 1 / 0.75};
    const Results made(
        x.size(), skew * size_t(size_of(dtype)),
        [&](void* out) { dropout_cpu(out, dtype, x.data(), rule, draw, box, 0, count); },
        [&](void* out) { dropout_cuda(out, dtype, on_device.data, rule, draw, box, nullptr); });
    // A NaN has different bits on CUDA.
    wrong += complain("dropout", dtype,
                      special ? apart(made.there, made.here, dtype, 0) : made.differences());
  }
  return wrong;
}

int64_t compare_bernoulli(Draw draw, const Box& box, size_t skew) {
  const int64_t count = box.run * box.runs;
  std::vector<double> p(static_cast<size_t>(count));
  for (size_t i = 0; i < p.size(); ++i) p[i] = double(i % 101) / 100;
  const DeviceBytes on_device(p.data(), p.size() * 8, skew * 8);
  const double* there = static_cast<const double*>(on_device.data);
  int64_t wrong = 0;
  for (int t = 0; t <= int(Dtype::boolean); ++t) {
    const Dtype dtype = Dtype(t);
    const size_t size = size_t(size_of(dtype));
    const Results made(
        p.size() * size, skew * size,
        [&](void* out) { bernoulli_cpu(out, dtype, p.data(), draw, box, 0, count); },
        [&](void* out) { bernoulli_cuda(out, dtype, there, draw, box, nullptr); });
    wrong += complain("bernoulli", dtype, made.differences());
  }
  return wrong;
}

int64_t compare(Draw draw, const Box& box) {
  int64_t wrong = 0;
  for (const size_t skew : {0, 1, 4}) {
    wrong += compare_fills(draw, box, skew) + compare_bernoulli(draw, box, skew);
    wrong += compare_dropout(draw, box, skew, false) + compare_dropout(draw, box, skew, true);
  }
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

int main(int words, char** given) {
  const Draw draw{0x123456789ABCDEFu, 42};
  const bool all = words < 2 || strcmp(given[1], "few") != 0;
  int64_t wrong = 0;
  for (const Box& box : small_boxes()) wrong += compare(draw, box);
  if (all) {
    for (const Box& box : boxes()) wrong += compare(draw, box);
  }
  printf(wrong ? "CUDA and CPU differ\n" : "CUDA and CPU give the same bytes\n");
  if (words < 2) timing(draw);
  return wrong != 0;
}
