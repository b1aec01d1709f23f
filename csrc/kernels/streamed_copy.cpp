#include "streamed_copy.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)  // in every x86 of 64 bits
#include <emmintrin.h>
#endif

namespace consistent {

void streamed_copy(void* to, const void* from, int64_t size) {
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
#if defined(__SSE2__)
  constexpr int64_t kLine = 64;  // bytes; lines that are written whole need not be read first
  const int64_t ahead =
      std::min(size, (kLine - int64_t(reinterpret_cast<uintptr_t>(out) % kLine)) % kLine);
  std::memcpy(out, in, size_t(ahead));
  int64_t at = ahead;
  for (; at + kLine <= size; at += kLine) {
    for (int64_t k = 0; k < kLine; k += 16) {
      const __m128i word = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in + at + k));
      _mm_stream_si128(reinterpret_cast<__m128i*>(out + at + k), word);
    }
  }
  _mm_sfence();  // streamed words are not ordered with what other threads do next
  std::memcpy(out + at, in + at, size_t(size - at));
#else
  std::memcpy(out, in, size_t(size));
#endif
}

}  // namespace consistent
