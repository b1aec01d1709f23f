// The number of bytes that can be moved at a time.

#pragma once

#include <cstdint>
#include <type_traits>

namespace consistent {

// The largest of 16, 8, 4, 2 and 1 that divides all sizes and addresses; `joined` is their bitwise
// or.
inline int unit_dividing(uint64_t joined) {
  const uint64_t bits = joined | 16;
  return int(bits & (~bits + 1));  // the lowest bit that is set
}

// Calls run(constant), whose value is `bytes`.
template <class Run>
void visit_unit(int bytes, const Run& run) {
  switch (bytes) {
    case 16:
      return run(std::integral_constant<int, 16>());
    case 8:
      return run(std::integral_constant<int, 8>());
    case 4:
      return run(std::integral_constant<int, 4>());
    case 2:
      return run(std::integral_constant<int, 2>());
    default:
      return run(std::integral_constant<int, 1>());
  }
}

}  // namespace consistent
