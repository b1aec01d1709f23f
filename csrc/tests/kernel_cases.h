// The test cases for the fused kernels: sizes at and near the boundaries of chunks, strips and
// packs.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <vector>

#include "../kernels/activation.h"
#include "../kernels/masked_embedding.h"
#include "../kernels/reduce_shards.h"
#include "../kernels/split_cross_entropy.h"

namespace consistent {

// Whether a program is to run only the few cases that reach every kernel: ThreadSanitizer is slow.
inline bool once(int words, char** given) { return words > 1 && strcmp(given[1], "once") == 0; }

using Bytes = std::vector<char>;

// Numbers in (-3, 3), the same in every run, stored as `dtype`.
struct StoreNumbers {
  Bytes& out;
  uint64_t state;
  template <class T>
  void operator()(T) {
    for (size_t at = 0; at < out.size(); at += sizeof(T)) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      const T value = Storage<T>::store(Real<T>(double(state >> 40) * 0x1p-24 * 6 - 3));
      memcpy(out.data() + at, &value, sizeof(T));
    }
  }
};

inline Bytes numbers(int64_t count, Dtype dtype, uint64_t seed) {
  Bytes made(size_t(count) * size_t(size_of(dtype)));
  StoreNumbers store{made, seed};
  switch (dtype) {
    case Dtype::f64:
      store(double());
      break;
    case Dtype::f16:
      store(Half());
      break;
    case Dtype::bf16:
      store(BFloat16());
      break;
    default:
      store(float());
  }
  return made;
}

// Puts infinities, NaN, -0 and the smallest number in some places.
struct StoreSpecials {
  Bytes& out;
  template <class T>
  void operator()(T) const {
    constexpr double kSpecials[] = {INFINITY, NAN, -0.0, 1e-7, -INFINITY};
    const size_t count = out.size() / sizeof(T);
    for (size_t i = 0; i < std::min<size_t>(count / 3, 20); ++i) {
      const T value = Storage<T>::store(Real<T>(kSpecials[i % 5]));
      memcpy(out.data() + (i * 7919 + 2) % count * sizeof(T), &value, sizeof(T));
    }
  }
};

struct LoadNumber {
  const char* data;
  int64_t at;
  double& value;
  template <class T>
  void operator()(T) const {
    T raw;
    memcpy(&raw, data + at * int64_t(sizeof(T)), sizeof(T));
    value = double(Storage<T>::load(raw));
  }
};

inline double number(const Bytes& data, Dtype dtype, int64_t at) {
  double value = 0;
  visit_float_type(dtype, LoadNumber{data.data(), at, value});
  return value;
}

inline Dtype real_of(Dtype dtype) { return dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32; }

inline double tolerance_of(Dtype dtype) {
  return dtype == Dtype::f64   ? 1e-12
         : dtype == Dtype::f32 ? 2e-5
         : dtype == Dtype::f16 ? 4e-3
                               : 3e-2;
}

// How many numbers differ by more than the dtype's rounding allows. A NaN equals only a NaN.
inline int64_t apart(const Bytes& a, const Bytes& b, Dtype dtype, double tolerance) {
  int64_t wrong = 0;
  for (int64_t i = 0; i < int64_t(a.size()) / size_of(dtype); ++i) {
    const double x = number(a, dtype, i), y = number(b, dtype, i);
    const bool close = x == y || std::fabs(x - y) <= tolerance * (1 + std::fabs(y));
    if (!close && !(std::isnan(x) && std::isnan(y))) ++wrong;
  }
  return wrong;
}

constexpr Dtype kFloats[] = {Dtype::f32, Dtype::f64, Dtype::f16, Dtype::bf16};

// The types of a run; of "once" one of each width of packs, float64's aside.
inline std::vector<Dtype> floats(int words, char** given) {
  if (once(words, given)) return {Dtype::f32, Dtype::bf16};
  return {std::begin(kFloats), std::end(kFloats)};
}

inline std::vector<ClassSplit> class_splits() {
  return {{3, 5, 1, 2, false},    {2, 64, 1, 0, true},  {2, 4613, 1, 100, true},
          {1, 300, 17, 0, false}, {2, 257, 5, 3, true}, {2, 7, 33, 0, true},
          {1, 4613, 1, 0, false}, {4, 0, 1, 0, true},   {0, 5, 1, 0, false},
          {7, 33, 1, 30, true},   {3, 19, 65, 4, true}, {5, 4, 40, 0, false},
          {2, 0, 3, 0, true}};
}

inline std::vector<int64_t> targets(const ClassSplit& split) {
  std::vector<int64_t> made(size_t(split.outer * split.inner));
  for (size_t i = 0; i < made.size(); ++i) {
    made[i] = i % 3 == 2 ? -100 : split.start + int64_t(i * 7) % (split.held + 1);
  }
  return made;
}

struct Look {
  RowWindow window;
  int64_t count;
  int64_t padding_row = -1;  // of the window; its look-ups are left out of the gradient
  bool same = false;         // whether all look-ups are of the window's first row
};

inline std::vector<Look> looks() {
  return {{{1, 0, 3}, 7},
          {{513, 2, 5}, 40},
          {{8, 4, 0}, 5},
          {{16, 0, 9}, 0},
          {{1030, 1, 2}, 3},
          {{64, 1, 5}, 9},
          {{0, 0, 4}, 6},
          {{24, 3, 2}, 300},
          {{300, 0, 3}, 700},
          {{100, 1, 2}, 200},
          {{6, 0, 2}, 9},
          {{40, 2, 3}, 90, 2},
          {{9, 1000, 2}, 30},
          {{520, 3, 4}, 65, -1, true},
          {{8, 0, 2}, 64, -1, true},
          {{4, 0, 50}, 2000},
          {{1, 1, 2}, 17000}};
}

inline std::vector<int64_t> indices(const Look& look) {
  std::vector<int64_t> made(size_t(look.count));
  for (size_t i = 0; i < made.size(); ++i) {
    const int64_t other = int64_t(i * i) % (look.window.start + look.window.held + 2);
    made[i] = look.same ? look.window.start : other;
  }
  return made;
}

// The look-ups sorted by row, with those that add to no row last.
inline void sort_rows(const Look& look, const std::vector<int64_t>& index,
                      std::vector<int64_t>& row, std::vector<int64_t>& order) {
  for (int64_t r = 0; r <= look.window.held; ++r) {
    for (int64_t i = 0; i < look.count; ++i) {
      const int64_t local = index[size_t(i)] - look.window.start;
      const bool none = local < 0 || local >= look.window.held || local == look.padding_row;
      const int64_t own = none ? look.window.held : local;
      if (own == r) row.push_back(r), order.push_back(i);
    }
  }
}

struct Fused {
  RowsOfSlice slice;
  int64_t elements;  // elements of a part
  int parts;
  Activation activation;
  Norm norm;
  bool beside;  // whether there are a scale, bias, residual, weight and norm bias
};

inline std::vector<Fused> fused_cases() {
  const auto whole = [](int64_t rows, int64_t columns) {
    return RowsOfSlice{rows, columns, rows, 0, 0};
  };
  return {{whole(3, 7), 21, 1, Activation::none, Norm::none, false},
          {whole(2, 1025), 2050, 2, Activation::gelu, Norm::none, true},
          {whole(2, 4096), 8192, 3, Activation::silu, Norm::none, true},
          {{6, 8, 3, 40, 16}, 2 * 40, 4, Activation::gelu_tanh, Norm::none, true},
          {whole(5, 64), 320, 2, Activation::none, Norm::layer, true},
          {whole(2, 3000), 6000, 8, Activation::relu, Norm::rms, false},
          {whole(3, 1600), 4800, 5, Activation::silu, Norm::layer, true},
          {whole(3, 520), 1560, 4, Activation::none, Norm::layer, true},
          {whole(2, 6000), 12000, 3, Activation::gelu, Norm::rms, true},
          {{4, 16, 2, 80, 32}, 2 * 80, 3, Activation::silu, Norm::layer, true},
          {whole(2, 12288), 2 * 12288, 1, Activation::none, Norm::rms, true},
          {whole(1, 60000), 60000, 2, Activation::relu, Norm::layer, true},
          {whole(3, 41601), 3 * 41601, 1, Activation::none, Norm::rms, true},
          {whole(9, 24), 9 * 24, 7, Activation::gelu, Norm::layer, false},
          {whole(4, 9), 4 * 9, 6, Activation::gelu_tanh, Norm::rms, true},
          {whole(1, 16), 16, 5, Activation::relu, Norm::none, true},
          {whole(0, 8), 0, 2, Activation::none, Norm::none, false},
          {whole(3, 0), 0, 2, Activation::none, Norm::layer, false}};
}

// The inputs of a fused case, in host memory.
struct FusedInputs {
  std::vector<Bytes> parts;
  Bytes bias, residual, weight, norm_bias;

  FusedInputs(const Fused& it, Dtype dtype) {
    for (int p = 0; p < it.parts; ++p) parts.push_back(numbers(it.elements, dtype, 1 + p));
    if (!it.beside) return;
    bias = numbers(it.slice.columns, real_of(dtype), 50);
    residual = numbers(it.slice.rows * it.slice.columns, dtype, 51);
    if (it.norm == Norm::none) return;
    weight = numbers(it.slice.columns, real_of(dtype), 52);
    norm_bias = numbers(it.slice.columns, real_of(dtype), 53);
  }
};

// `place` returns the address of the bytes: on the host, or of a copy on the device.
template <class Place>
Epilogue epilogue_of(const Fused& it, const FusedInputs& given, const Place& place) {
  Epilogue made;
  made.activation = it.activation, made.norm = it.norm, made.eps = 1e-5;
  const auto at = [&](const Bytes& x) { return x.empty() ? nullptr : place(x); };
  if (it.beside) made.scale = 0.5;
  made.bias = at(given.bias), made.residual = at(given.residual);
  made.weight = at(given.weight), made.norm_bias = at(given.norm_bias);
  return made;
}

}  // namespace consistent
