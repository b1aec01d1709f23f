// Compares cross-entropy of split classes on CUDA with the CPU. Then it times the kernels: a
// vocabulary of 128k over 8 ranks, bf16. With any argument it does not time, for runs under
// compute-sanitizer.
//
//   nvcc -std=c++17 -O3 -arch=native -fmad=false -Xcompiler -ffp-contract=off
//       csrc/tests/split_cross_entropy_test.cu csrc/kernels/split_cross_entropy.cu
//       csrc/kernels/split_cross_entropy_cpu.cpp -o split_cross_entropy_test

#include "device.cuh"
#include "kernel_cases.h"

namespace consistent {
namespace {

// The logits lie `skew` elements, and their gradient `skew_back` elements, after an aligned
// address. `special` puts infinities and NaN among the logits.
int64_t compare(Dtype dtype, const ClassSplit& split, int skew, int skew_back, bool special) {
  const int64_t rows = split.outer * split.inner;
  const Dtype real = real_of(dtype);
  Bytes x = numbers(rows * split.held, dtype, 3);
  if (special) visit_float_type(dtype, StoreSpecials{x});
  const Bytes w = numbers(split.held, real, 4);
  const Bytes by = numbers(4 * rows, real, 5);
  const std::vector<int64_t> target = targets(split);
  const size_t planes = size_t((split.smooth ? kSmoothPlanes : kPlanes) * rows * size_of(real));
  Bytes said(planes), made(x.size());
  const void* weight = split.smooth ? w.data() : nullptr;
  split_cross_entropy_cpu(said.data(), dtype, x.data(), target.data(), weight, split, 0, rows);
  split_cross_entropy_backward_cpu(made.data(), dtype, x.data(), target.data(), by.data(), weight,
                                   split, 0, rows);

  const size_t size = size_t(size_of(dtype));
  const DeviceBytes dx(x.data(), x.size(), size_t(skew) * size), dw(w.data(), w.size());
  const DeviceBytes dby(by.data(), by.size()), back(x.size(), size_t(skew_back) * size);
  const DeviceBytes places(target.data(), target.size() * 8), out(planes);
  const void* dweight = split.smooth ? dw.data : nullptr;
  const int64_t* at = static_cast<const int64_t*>(places.data);
  split_cross_entropy_cuda(out.data, dtype, dx.data, at, dweight, split, nullptr);
  split_cross_entropy_backward_cuda(back.data, dtype, dx.data, at, dby.data, dweight, split,
                                    nullptr);
  return apart(out.back(planes), said, real, 1e-4) +
         apart(back.back(x.size()), made, dtype, tolerance_of(dtype));
}

void timing() {
  const ClassSplit split{4096, 128 * 1024 / 8, 1, 0, false};
  const size_t bytes = size_t(split.outer * split.held) * 2;
  const std::vector<int64_t> target = targets(split);
  const DeviceBytes x(bytes), back(bytes), out(size_t(split.outer) * 12);
  const DeviceBytes by(size_t(split.outer) * 16), places(target.data(), target.size() * 8);
  CONSISTENT_CHECK_CUDA(cudaMemset(x.data, 0, bytes));
  CONSISTENT_CHECK_CUDA(cudaMemset(by.data, 1, size_t(split.outer) * 16));
  const int64_t* at = static_cast<const int64_t*>(places.data);
  time_beside_copy("forward", int64_t(bytes), [&] {
    split_cross_entropy_cuda(out.data, Dtype::bf16, x.data, at, nullptr, split, nullptr);
  });
  time_beside_copy("backward", int64_t(2 * bytes), [&] {
    split_cross_entropy_backward_cuda(back.data, Dtype::bf16, x.data, at, by.data, nullptr, split,
                                      nullptr);
  });
}

}  // namespace
}  // namespace consistent

int main(int words, char** given) {
  using namespace consistent;
  int64_t wrong = 0;
  for (Dtype dtype : floats(words, given)) {
    for (const ClassSplit& split : class_splits()) {
      wrong += compare(dtype, split, 0, 0, false);
      if (once(words, given)) continue;
      wrong += compare(dtype, split, 1, 1, false);
      wrong += compare(dtype, split, 0, 1, true) + compare(dtype, split, 3, 2, true);
    }
  }
  printf(wrong ? "CUDA and CPU differ\n" : "CUDA and CPU agree\n");
  if (words < 2) timing();
  return wrong != 0;
}
