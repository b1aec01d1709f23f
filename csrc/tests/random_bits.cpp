// g++ -std=c++17 -O3 -ffp-contract=off -DCONSISTENT_CLONES= -march=x86-64-v3
//   csrc/tests/random_bits.cpp csrc/kernels/random_cpu.cpp -o random_bits && ./random_bits
//
// Prints a hash of the bytes of every distribution, dtype and box. The hash must be the same for
// every -march.

#include <cstdio>
#include <vector>

#include "cases.h"

using namespace consistent;

int main() {
  const Draw draw{0x123456789ABCDEFu, 42};
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const Box& box : boxes()) {
    const int64_t count = box.run * box.runs;
    for (const Distribution& d : distributions()) {
      for (int t = 0; t <= int(Dtype::boolean); ++t) {
        if (!applies(d, Dtype(t))) continue;
        std::vector<unsigned char> out(size_t(count) * size_of(Dtype(t)));
        fill_cpu(out.data(), Dtype(t), d, draw, box, 0, count);
        for (unsigned char byte : out) hash = (hash ^ byte) * 1099511628211u;
      }
    }
  }
  printf("%016llx\n", static_cast<unsigned long long>(hash));
}
