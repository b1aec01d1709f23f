// Compares masked embedding on CUDA with the CPU. Then it times the kernels: 128k rows of 4096 over
// 8 ranks, bf16. With any argument it does not time, for runs under compute-sanitizer.
//
//   nvcc -std=c++17 -O3 -arch=native -fmad=false -Xcompiler -ffp-contract=off
//       csrc/tests/masked_embedding_test.cu csrc/kernels/masked_embedding.cu
//       csrc/kernels/masked_embedding_cpu.cpp -o masked_embedding_test

#include <cmath>

#include "device.cuh"
#include "kernel_cases.h"

namespace consistent {
namespace {

// The table, the gradients and the results lie `skew` elements after an aligned address. `special`
// puts infinities and NaN in them.
int64_t compare(Dtype dtype, const Look& look, double scale, int skew, bool special) {
  const RowWindow& window = look.window;
  const std::vector<int64_t> index = indices(look);
  Bytes table = numbers(window.held * window.width, dtype, 6);
  Bytes grad = numbers(look.count * window.width, dtype, 7);
  if (special) {
    visit_float_type(dtype, StoreSpecials{table});
    visit_float_type(dtype, StoreSpecials{grad});
  }
  std::vector<int64_t> row, order;
  sort_rows(look, index, row, order);
  Bytes out(grad.size()), back(table.size(), 1);
  masked_embedding_cpu(out.data(), dtype, table.data(), index.data(), scale, window, 0, look.count);
  masked_embedding_backward_cpu(back.data(), dtype, grad.data(),
                                SortedRows{row.data(), order.data(), look.count}, scale, scale != 1,
                                window, 0, look.count);

  const size_t beyond = size_t(skew * size_of(dtype));
  const DeviceBytes dtable(table.data(), table.size(), beyond);
  const DeviceBytes dgrad(grad.data(), grad.size(), beyond);
  const DeviceBytes at(index.data(), index.size() * 8), dout(out.size(), beyond);
  const DeviceBytes dback(back.size(), beyond);
  CONSISTENT_CHECK_CUDA(cudaMemset(dback.data, 1, back.size()));  // every row must be written
  const DeviceBytes memory(size_t(memory_words(look.count, window.held)) * 4);
  masked_embedding_cuda(dout.data, dtype, dtable.data, static_cast<const int64_t*>(at.data), scale,
                        window, look.count, nullptr);
  const LookUps look_ups{static_cast<const int64_t*>(at.data), look.count, look.padding_row,
                         static_cast<int32_t*>(memory.data)};
  masked_embedding_backward_cuda(dback.data, dtype, dgrad.data, look_ups, scale, scale != 1, window,
                                 nullptr);
  return apart(dout.back(out.size()), out, dtype, 0) +
         apart(dback.back(back.size()), back, dtype, 0);
}

// Rows of bytes: without a scale, rows of every dtype are copied as bytes.
int64_t compare_bytes(const Look& look) {
  const RowWindow& window = look.window;
  const std::vector<int64_t> index = indices(look);
  const Bytes table = numbers(window.held * window.width, Dtype::f32, 6);
  Bytes out(size_t(look.count * window.width));
  masked_embedding_cpu(out.data(), Dtype::u8, table.data(), index.data(), 1, window, 0, look.count);
  const DeviceBytes dtable(table.data(), table.size()), dout(out.size());
  const DeviceBytes at(index.data(), index.size() * 8);
  masked_embedding_cuda(dout.data, Dtype::u8, dtable.data, static_cast<const int64_t*>(at.data), 1,
                        window, look.count, nullptr);
  return dout.back(out.size()) != out;
}

void timing() {
  const RowWindow window{4096, 0, 128 * 1024 / 8};
  const int64_t count = 16384;
  std::vector<int64_t> index(size_t(count), 0);
  for (size_t i = 0; i < index.size(); ++i) index[i] = int64_t(i * 7919) % window.held;
  const size_t bytes = size_t(count * window.width) * 2;
  const DeviceBytes table(size_t(window.held * window.width) * 2), out(bytes);
  const DeviceBytes at(index.data(), index.size() * 8);
  time_beside_copy("look-up", int64_t(2 * bytes), [&] {
    masked_embedding_cuda(out.data, Dtype::bf16, table.data, static_cast<const int64_t*>(at.data),
                          1, window, count, nullptr);
  });
}

// An eighth of 65,536 look-ups are of rows that are held; `same` makes all of them of one row.
void time_backward(const char* name, bool same) {
  const RowWindow window{4096, 0, 128 * 1024 / 8};
  const int64_t count = 65536, row_bytes = window.width * 2;
  std::vector<int64_t> index(size_t(count), 0);
  int64_t held = 0;
  for (size_t i = 0; i < index.size(); ++i) {
    uint64_t x = i * 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 32) * 0xD6E8FEB86659FD93u;
    if (!same) index[i] = int64_t(x >> 47);  // 17 bits
    held += index[i] < window.held;
  }
  const DeviceBytes grad(size_t(count * row_bytes)), back(size_t(window.held * row_bytes));
  const DeviceBytes at(index.data(), index.size() * 8);
  const DeviceBytes memory(size_t(memory_words(count, window.held)) * 4);
  CONSISTENT_CHECK_CUDA(cudaMemset(grad.data, 0, size_t(count * row_bytes)));
  const LookUps look_ups{static_cast<const int64_t*>(at.data), count, -1,
                         static_cast<int32_t*>(memory.data)};
  time_beside_copy(name, (held + window.held) * row_bytes + count * 8, [&] {
    masked_embedding_backward_cuda(back.data, Dtype::bf16, grad.data, look_ups, 1, false, window,
                                   nullptr);
  });
}

}  // namespace
}  // namespace consistent

int main(int words, char** given) {
  using namespace consistent;
  int64_t wrong = 0;
  for (const Look& look : looks()) wrong += compare_bytes(look);
  for (Dtype dtype : floats(words, given)) {
    for (const Look& look : looks()) {
      if (once(words, given)) {
        wrong += compare(dtype, look, 0.5, 0, false);
        continue;
      }
      wrong += compare(dtype, look, -INFINITY, 0, false);  // rows that others hold are +0
      for (const double scale : {1.0, 0.5}) {
        wrong += compare(dtype, look, scale, 0, false) + compare(dtype, look, scale, 0, true);
        wrong += compare(dtype, look, scale, 1, true) + compare(dtype, look, scale, 4, false);
      }
    }
  }
  printf(wrong ? "CUDA and CPU differ\n" : "CUDA and CPU agree\n");
  if (words > 1) return wrong != 0;
  timing();
  time_backward("backward", false);
  time_backward("backward, one row", true);
  return wrong != 0;
}
