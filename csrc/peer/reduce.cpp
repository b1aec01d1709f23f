#include "reduce.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

// The same macro as in kernels/clones.h.
#if defined(CONSISTENT_CLONES)  // defined as empty under sanitizers, where ifuncs do not work
#elif defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define CONSISTENT_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), noinline))
#else
#define CONSISTENT_CLONES __attribute__((noinline))
#endif

namespace consistent::peer {
namespace {

constexpr int64_t kBlock = 8192;  // bytes of the accumulator, which stays in the L1 cache

struct Half {
  uint16_t bits;
};
struct Brain {
  uint16_t bits;
};

inline float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

template <typename T>
inline T load(T x) {
  return x;
}

inline float load(Brain x) { return as_float(uint32_t(x.bits) << 16); }

inline float load(Half x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = uint32_t(x.bits & 0x7FFF) << 13;
  const uint32_t normal = rest + 0x38000000u;  // from an exponent bias of 15 to one of 127
  const uint32_t special = rest | 0x7F800000u;
  const uint32_t tiny = as_bits(as_float(rest + 0x38800000u) - as_float(0x38800000u));
  const uint32_t value = rest >= 0x0F800000u ? special : rest < 0x00800000u ? tiny : normal;
  return as_float(sign | value);
}

template <typename T, typename Wide>
inline T store(Wide x) {
  return T(x);
}

// Both round to nearest, ties to even.
template <>
inline Brain store<Brain, float>(float x) {
  const uint32_t bits = as_bits(x), rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return {uint16_t((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded)};
}

template <>
inline Half store<Half, float>(float x) {
  const uint32_t bits = as_bits(x), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7FFFFFFFu;
  const uint32_t normal = (rest - 0x38000000u + 0x0FFFu + ((rest >> 13) & 1u)) >> 13;
  const uint32_t tiny = as_bits(as_float(rest) + 0.5f) - 0x3F000000u;
  const uint32_t large = rest > 0x7F800000u ? 0x7E00u : 0x7C00u;
  const uint32_t value = rest >= 0x47800000u ? large : rest < 0x38800000u ? tiny : normal;
  return {uint16_t(sign | value)};
}

template <typename T>
inline T sum(T a, T b) {
  if constexpr (std::is_integral_v<T>) {  // wraps around, as in torch
    using U = std::make_unsigned_t<T>;
    return T(U(U(a) + U(b)));
  } else {
    return a + b;
  }
}

template <typename T>
inline T max(T a, T b) {
  return (b > a) | (b != b) ? (a != a ? a : b) : a;
}

template <typename T>
inline T min(T a, T b) {
  return (b < a) | (b != b) ? (a != a ? a : b) : a;
}

using Function = void (*)(void*, const void*, int64_t);

struct Functions {
  int size, wide;  // bytes of an element, and of an element of the accumulator
  Function load, fold[3], store;
};

// The loops for one type. `load` and `store` convert to and from the accumulator's type.
#define LOOP(NAME, TO, FROM, VALUE)                                          \
  CONSISTENT_CLONES void NAME(void* to_, const void* from_, int64_t count) { \
    TO* __restrict to = static_cast<TO*>(to_);                               \
    const FROM* __restrict from = static_cast<const FROM*>(from_);           \
    for (int64_t i = 0; i < count; ++i) to[i] = VALUE;                       \
  }
#define LOOPS(NAME, T, WIDE)                                 \
  LOOP(load_##NAME, WIDE, T, load(from[i]))                  \
  LOOP(sum_##NAME, WIDE, T, sum<WIDE>(to[i], load(from[i]))) \
  LOOP(max_##NAME, WIDE, T, max<WIDE>(to[i], load(from[i]))) \
  LOOP(min_##NAME, WIDE, T, min<WIDE>(to[i], load(from[i]))) \
  LOOP(store_##NAME, T, WIDE, (store<T, WIDE>(from[i])))     \
  constexpr Functions functions_##NAME = {                   \
      sizeof(T), sizeof(WIDE), load_##NAME, {sum_##NAME, max_##NAME, min_##NAME}, store_##NAME};

LOOPS(int8, int8_t, int8_t)
LOOPS(uint8, uint8_t, uint8_t)
LOOPS(int16, int16_t, int16_t)
LOOPS(uint16, uint16_t, uint16_t)
LOOPS(int32, int32_t, int32_t)
LOOPS(uint32, uint32_t, uint32_t)
LOOPS(int64, int64_t, int64_t)
LOOPS(uint64, uint64_t, uint64_t)
LOOPS(float32, float, float)
LOOPS(float64, double, double)
LOOPS(float16, Half, float)
LOOPS(bfloat16, Brain, float)

const Functions& functions(Type type) {
  static const Functions boolean = {
      1, 1, load_uint8, {max_uint8, max_uint8, min_uint8}, store_uint8};
  static const Functions* const table[] = {
      &functions_int8,    &functions_uint8,   &functions_int16,   &functions_uint16,
      &functions_int32,   &functions_uint32,  &functions_int64,   &functions_uint64,
      &functions_float32, &functions_float64, &functions_float16, &functions_bfloat16,
      &boolean,
  };
  return *table[int(type)];
}

}  // namespace

int size_of(Type type) { return functions(type).size; }

void reduce(void* out, const void* const* pieces, int count, int64_t elements, Type type, Op op) {
  const Functions& f = functions(type);
  alignas(64) char total[kBlock];
  const int64_t block = kBlock / f.wide;
  for (int64_t begin = 0; begin < elements; begin += block) {
    const int64_t size = std::min(block, elements - begin), offset = begin * f.size;
    f.load(total, static_cast<const char*>(pieces[0]) + offset, size);
    for (int k = 1; k < count; ++k) {
      f.fold[int(op)](total, static_cast<const char*>(pieces[k]) + offset, size);
    }
    f.store(static_cast<char*>(out) + offset, total, size);
  }
}

}  // namespace consistent::peer
