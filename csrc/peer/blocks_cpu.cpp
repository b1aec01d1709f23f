#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "../kernels/clones.h"
#include "blocks.h"

namespace consistent::peer {
namespace {

// The messages of blocks.h on the CPU, block by block.

// ---- loops over the numbers of a block, which the compiler vectorizes ---------------------------

CONSISTENT_CLONES uint32_t largest(const float* x, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = magnitude_of(x[i]);
    most = bits > most ? bits : most;
  }
  return most;
}

CONSISTENT_CLONES void all_to_int8(uint8_t* to, const float* from, float by, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = to_int8(clamped(from[i] / by, 127.0f));
}

CONSISTENT_CLONES void all_from_int8(float* to, const uint8_t* from, float scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = from_int8(from[i], scale);
}

CONSISTENT_CLONES void all_to_fp8(uint8_t* to, const float* from, float by, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = to_fp8(clamped(from[i] / by, 448.0f));
}

CONSISTENT_CLONES void all_from_fp8(float* to, const uint8_t* from, float scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = from_fp8(from[i], scale);
}

#define LOOPS(NAME, T)                                                                        \
  CONSISTENT_CLONES void wide_##NAME(Real<T>* to, const void* from, int64_t n) {              \
    for (int64_t i = 0; i < n; ++i) to[i] = Storage<T>::load(static_cast<const T*>(from)[i]); \
  }                                                                                           \
  CONSISTENT_CLONES void narrow_##NAME(void* to, const Real<T>* from, int64_t n) {            \
    for (int64_t i = 0; i < n; ++i) static_cast<T*>(to)[i] = Storage<T>::store(from[i]);      \
  }                                                                                           \
  void wide(T, Real<T>* to, const void* from, int64_t n) { wide_##NAME(to, from, n); }        \
  void narrow(T, void* to, const Real<T>* from, int64_t n) { narrow_##NAME(to, from, n); }

LOOPS(f32, float)
LOOPS(f64, double)
LOOPS(f16, Half)
LOOPS(bf16, BFloat16)

#define SUMS(NAME, R)                                                                   \
  CONSISTENT_CLONES void add_##NAME(R* to, const R* more, int64_t n) {                  \
    for (int64_t i = 0; i < n; ++i) to[i] += more[i];                                   \
  }                                                                                     \
  CONSISTENT_CLONES void left_##NAME(R* to, const R* total, const R* said, int64_t n) { \
    for (int64_t i = 0; i < n; ++i) to[i] = left_of(total[i], said[i]);                 \
  }                                                                                     \
  inline void add(R* to, const R* more, int64_t n) { add_##NAME(to, more, n); }         \
  inline void left(R* to, const R* total, const R* said, int64_t n) {                   \
    left_##NAME(to, total, said, n);                                                    \
  }

SUMS(float, float)
SUMS(double, double)

CONSISTENT_CLONES void as_float(float* to, const double* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = float(from[i]);
}
CONSISTENT_CLONES void as_double(double* to, const float* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = double(from[i]);
}

// ---- one block ----------------------------------------------------------------------------------

template <class R>
using Numbers = std::array<R, kNumbers>;

// `x` as float32: itself, or converted into `kept`.
const float* in_float(Numbers<float>&, const Numbers<float>& x, int64_t) { return x.data(); }
const float* in_float(Numbers<float>& kept, const Numbers<double>& x, int64_t n) {
  as_float(kept.data(), x.data(), n);
  return kept.data();
}

float write_block(uint8_t* to, const float* x, int64_t n, Code code) {
  const float scale = scale_of(largest(x, n), code);
  if (std::isnan(scale)) {
    memset(to, 0, size_t(n));  // any byte reads as NaN with this scale; 0 makes messages comparable
    return scale;
  }
  (code == Code::int8 ? all_to_int8 : all_to_fp8)(to, x, divisor_of(scale), n);
  return scale;
}

void read_block(Numbers<float>& to, const uint8_t* from, float scale, int64_t n, Code code) {
  (code == Code::int8 ? all_from_int8 : all_from_fp8)(to.data(), from, scale, n);
}

void read_block(Numbers<double>& to, const uint8_t* from, float scale, int64_t n, Code code) {
  Numbers<float> made;
  read_block(made, from, scale, n, code);
  as_double(to.data(), made.data(), n);
}

// By memcpy, since a message may begin at any address.
float scale_at(const uint8_t* message, int64_t block) {
  float scale;
  memcpy(&scale, message + block * int64_t(sizeof(scale)), sizeof(scale));
  return scale;
}

// Calls visit(block, first, count) for each block.
template <class Visit>
void each_block(int64_t n, int64_t begin, int64_t end, const Visit& visit) {
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * kNumbers;
    visit(block, first, std::min(kNumbers, n - first));
  }
}

template <class T>
void write_all(uint8_t* message, const T* x, Real<T>* unsent, int64_t n, Code code, int64_t begin,
               int64_t end) {
  using R = Real<T>;
  uint8_t* numbers = message + int64_t(sizeof(float)) * blocks_of(n);
  Numbers<R> total, said;
  Numbers<float> kept;
  each_block(n, begin, end, [&](int64_t block, int64_t first, int64_t count) {
    wide(T(), total.data(), x + first, count);
    if (unsent != nullptr) add(total.data(), unsent + first, count);
    const float* floats = in_float(kept, total, count);
    const float scale = write_block(numbers + first, floats, count, code);
    memcpy(message + block * int64_t(sizeof(scale)), &scale, sizeof(scale));
    if (unsent == nullptr) return;
    read_block(said, numbers + first, scale, count, code);
    left(unsent + first, total.data(), said.data(), count);
  });
}

template <class T>
void read_all(T* out, const uint8_t* const* messages, int count, int64_t n, Code code,
              int64_t begin, int64_t end) {
  using R = Real<T>;
  Numbers<R> total, next;
  each_block(n, begin, end, [&](int64_t block, int64_t first, int64_t size) {
    for (int k = 0; k < count; ++k) {
      const uint8_t* numbers = messages[k] + int64_t(sizeof(float)) * blocks_of(n) + first;
      read_block(k == 0 ? total : next, numbers, scale_at(messages[k], block), size, code);
      if (k > 0) add(total.data(), next.data(), size);
    }
    narrow(T(), out + first, total.data(), size);
  });
}

}  // namespace

void write_blocks(uint8_t* message, const void* x, void* unsent, Dtype dtype, int64_t n, Code code,
                  int64_t begin, int64_t end) {
  visit_float_type(dtype, [&](auto of) {
    using T = decltype(of);
    write_all(message, static_cast<const T*>(x), static_cast<Real<T>*>(unsent), n, code, begin,
              end);
  });
}

void read_blocks(void* out, const uint8_t* const* messages, int count, Dtype dtype, int64_t n,
                 Code code, int64_t begin, int64_t end) {
  visit_float_type(dtype, [&](auto of) {
    using T = decltype(of);
    read_all(static_cast<T*>(out), messages, count, n, code, begin, end);
  });
}

}  // namespace consistent::peer
