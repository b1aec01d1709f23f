#include "streamed_copy.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)  // every 64-bit x86 has it
#include <emmintrin.h>
#endif

namespace consistent {

void streamed_copy(void* to, const void* from, int64_t size) {
  auto* out = static_cast<char*>(to);
  const auto* in = static_cast<const char*>(from);
#if defined(__SSE2__)
  // Bytes of a cache line. Only a line that is written whole is not read first, so the copy begins
  // at a line's start in `out`; the bytes before it are copied by memcpy.
  constexpr int64_t kLine = 64;
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
  // Non-temporal stores are weakly ordered: without this fence, a later release store could become
  // visible to another thread before them.
  _mm_sfence();
  std::memcpy(out + at, in + at, size_t(size - at));
#else
  std::memcpy(out, in, size_t(size));
#endif
}

}  // namespace consistent
