// Random values that do not depend on how a tensor is split: each one is a function of the seed,
// the op counter and the element's row-major index in the logical tensor. CPU and CUDA give the
// same bits.
//
// A Philox block has four 32-bit words. Element e takes word e % 4 of block e / 4 if 32 bits are
// enough, else words 2 (e % 2) and 2 (e % 2) + 1 of block e / 2. Normals are made in pairs:
// elements 2 k and 2 k + 1 share their two draws (Box-Muller).

#pragma once

#include <cstdint>

#include "philox.h"
#include "storage.h"

namespace consistent {

// The part of the logical tensor that one rank holds: `runs` runs of `run` consecutive elements.
// Run r begins at offset + sum of digit[d] * stride[d], where digit[d] are the digits of r in the
// mixed radix `size`, the last digit being the lowest.
struct Box {
  static constexpr int kMaxDims = 32;
  int64_t offset = 0;
  int64_t run = 1;
  int64_t runs = 1;
  int dims = 0;
  int64_t size[kMaxDims];
  int64_t stride[kMaxDims];

  CONSISTENT_INLINE int64_t run_start(int64_t r) const {
    int64_t start = offset;
    for (int d = dims - 1; d >= 0; --d) {
      start += (r % size[d]) * stride[d];
      r /= size[d];
    }
    return start;
  }
};

enum class Kind {
  uniform,      // in [a, b); clamped to [bottom, top], since rounding may reach b
  normal,       // mean a, deviation b
  log_normal,   // exp of a normal
  exponential,  // rate a
  cauchy,       // median a, scale b
  bernoulli,    // a where the word is at most `last`, else 0; a is 1, or 0 for probability 0
  randint,      // low + [0, range)
  geometric     // trials up to the first success: ceil(ln u / a), clamped to [1, b]
};

struct Distribution {
  Kind kind;
  double a = 0, b = 0;
  double bottom = 0, top = 0;
  int64_t low = 0;
  uint64_t range = 0;  // 0 means 2^64
  uint32_t last = 0;
};

// An element is kept if its word is at most `last`. Kept elements are multiplied by `scale`.
struct Dropout {
  uint32_t last;
  double scale;
};

// The CPU versions fill local elements [begin, end) of the box, so that the caller may share the
// box among threads; the CUDA versions fill the whole box. `stream` is a cudaStream_t.
void fill_cpu(void* out, Dtype dtype, Distribution distribution, Draw draw, const Box& box,
              int64_t begin, int64_t end);
void fill_cuda(void* out, Dtype dtype, Distribution distribution, Draw draw, const Box& box,
               void* stream);

// p[i] is the probability that element i is 1.
void bernoulli_cpu(void* out, Dtype dtype, const double* p, Draw draw, const Box& box,
                   int64_t begin, int64_t end);
void bernoulli_cuda(void* out, Dtype dtype, const double* p, Draw draw, const Box& box,
                    void* stream);

// out = x * (kept ? scale : 0), for x of a floating type: an infinity or NaN that is dropped is
// NaN.
void dropout_cpu(void* out, Dtype dtype, const void* x, Dropout dropout, Draw draw, const Box& box,
                 int64_t begin, int64_t end);
void dropout_cuda(void* out, Dtype dtype, const void* x, Dropout dropout, Draw draw, const Box& box,
                  void* stream);

}  // namespace consistent
