// The test cases for random values: boxes of several shapes, and a distribution of each kind.

#pragma once

#include <cstdint>
#include <vector>

#include "../kernels/random.h"

namespace consistent {

inline Box run_of(int64_t offset, int64_t count) {
  Box box;
  box.offset = offset;
  box.run = count;
  return box;
}

// `rows` runs of `run` elements, `stride` apart.
inline Box rows_of(int64_t offset, int64_t rows, int64_t run, int64_t stride) {
  Box box = run_of(offset, run);
  box.runs = rows;
  box.dims = 1;
  box.size[0] = rows;
  box.stride[0] = stride;
  return box;
}

inline std::vector<Box> boxes() {
  return {
      run_of(0, 1 << 20),        run_of(3, 1000003),     run_of((int64_t(1) << 34) - 77, 100001),
      rows_of(5, 1001, 37, 111), rows_of(1, 5000, 1, 6), rows_of(0, 300, 512, 1024)};
}

// Boxes of few elements, for slow devices such as the emulator.
inline std::vector<Box> small_boxes() {
  Box blocks = run_of(7, 6);  // of three dims
  blocks.runs = 30, blocks.dims = 2;
  blocks.size[0] = 5, blocks.size[1] = 6;
  blocks.stride[0] = 600, blocks.stride[1] = 10;
  return {run_of(0, 1),
          run_of(3, 9),
          run_of(0, 0),
          run_of(17, 5003),
          run_of(32, 70),
          run_of((int64_t(1) << 34) - 77, 99),
          rows_of(2, 7, 3, 5),
          rows_of(1, 40, 1, 6),
          rows_of(0, 3, 32, 64),
          rows_of(5, 9, 37, 111),
          blocks};
}

inline std::vector<Distribution> distributions() {
  Distribution uniform{Kind::uniform, -1, 3, -1, 2.5};
  Distribution bernoulli{Kind::bernoulli, 1};
  bernoulli.last = 0x40000000u;
  Distribution narrow{Kind::randint}, wide{Kind::randint};
  narrow.range = 100;
  wide.range = uint64_t(1) << 40;
  return {uniform,
          {Kind::normal, 0.5, 2},
          {Kind::log_normal, 0.1, 0.5},
          {Kind::exponential, 1.5},
          {Kind::cauchy, 0.5, 2},
          bernoulli,
          narrow,
          wide,
          {Kind::geometric, -0.25, 127}};
}

inline bool applies(const Distribution& d, Dtype dtype) {
  if (d.kind < Kind::bernoulli) return dtype <= Dtype::bf16;
  return true;
}

}  // namespace consistent
