// Random values on the CPU, a chunk of Philox blocks at a time, by plain loops over short arrays.
// The compiler vectorizes them once for each generation of x86; all versions give the same bits.

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "clones.h"
#include "distributions.h"

namespace consistent {
namespace {

constexpr int kChunk = 64;   // blocks generated at once: 1 KiB of words
constexpr int kVector = 16;  // short chunks are padded to a multiple of it, so no scalar loop runs
constexpr int kWords = 4;    // 32-bit words in a block
constexpr int kWidest = 8;   // bytes of the widest element
constexpr int64_t kBytes = int64_t(kChunk) * kWords * kWidest;

// The numbers of the Philox blocks to generate at once, low and high words. They are consecutive in
// a long run; for short runs, a chunk holds the blocks of several runs.
struct Chunk {
  int blocks = 0;
  uint32_t low[kChunk] = {}, high[kChunk] = {};

  int padded() const { return (blocks + kVector - 1) / kVector * kVector; }
  void append(uint64_t block, int count) {
    const uint32_t first = uint32_t(block), above = uint32_t(block >> 32);
    for (int64_t i = 0; i < count; ++i) {
      low[blocks + i] = first + uint32_t(i);
      high[blocks + i] = above + (first + uint32_t(i) < first ? 1u : 0u);
    }
    blocks += count;
  }
};

CONSISTENT_INLINE void generate(Draw draw, const Chunk& chunk, int blocks, uint32_t* words) {
  for (int64_t i = 0; i < blocks; ++i) {
    philox(Seed{draw.seed}, draw.counter, chunk.low[i], chunk.high[i], words + kWords * i);
  }
}

struct Transform {
  const uint32_t* words;
  int blocks;
  void* out;

  template <class F, class T>
  CONSISTENT_INLINE void operator()(F f, T) const {
    using Word = typename F::Word;
    T* __restrict__ values = static_cast<T*>(out);
    const int64_t pairs = blocks * int64_t(kWords * sizeof(uint32_t) / (2 * sizeof(Word)));
    for (int64_t i = 0; i < pairs; ++i) {
      Word x, y;
      memcpy(&x, words + 2 * i * (sizeof(Word) / 4), sizeof(Word));
      memcpy(&y, words + (2 * i + 1) * (sizeof(Word) / 4), sizeof(Word));
      typename F::Value a, b;
      f(x, y, a, b);
      values[2 * i] = Storage<T>::store(a);
      values[2 * i + 1] = Storage<T>::store(b);
    }
  }
};

CONSISTENT_CLONES void fill_blocks(void* out, Dtype dtype, const Distribution& d, Draw draw,
                                   const Chunk& chunk) {
  alignas(64) uint32_t words[kChunk * kWords];
  const int blocks = chunk.padded();
  generate(draw, chunk, blocks, words);
  visit(dtype, d, Transform{words, blocks, out});
}

struct Compare {
  const uint32_t* words;
  int count;
  const double* p;
  void* out;

  template <class T>
  CONSISTENT_INLINE void operator()(T) const {
    T* __restrict__ values = static_cast<T*>(out);
    for (int64_t i = 0; i < count; ++i) {
      values[i] = Storage<T>::store(double(words[i]) < p[i] * 0x1p32 ? 1 : 0);
    }
  }
};

CONSISTENT_CLONES void bernoulli_blocks(void* out, Dtype dtype, const double* p, Draw draw,
                                        const Chunk& chunk) {
  alignas(64) uint32_t words[kChunk * kWords];
  const int blocks = chunk.padded();
  generate(draw, chunk, blocks, words);
  visit_type(dtype, Compare{words, blocks * kWords, p, out});
}

struct Keep {
  const uint32_t* words;
  int count;
  Dropout dropout;
  const void* x;
  void* out;

  template <class T>
  CONSISTENT_INLINE void operator()(T) const {
    const T* __restrict__ from = static_cast<const T*>(x);
    T* __restrict__ to = static_cast<T*>(out);
    const Real<T> scale = Real<T>(dropout.scale);
    for (int64_t i = 0; i < count; ++i) {
      const Real<T> factor = words[i] <= dropout.last ? scale : Real<T>(0);
      to[i] = Storage<T>::store(Storage<T>::load(from[i]) * factor);
    }
  }
};

CONSISTENT_CLONES void dropout_blocks(void* out, Dtype dtype, const void* x, Dropout dropout,
                                      Draw draw, const Chunk& chunk) {
  alignas(64) uint32_t words[kChunk * kWords];
  const int blocks = chunk.padded();
  generate(draw, chunk, blocks, words);
  visit_float_type(dtype, Keep{words, blocks * kWords, dropout, x, out});
}

// The elements of a chunk that belong to one run of the box: `take` elements from element `from` of
// the chunk on, which go to local index `at`.
struct Part {
  int64_t at;
  int from, take;
};

struct Parts {
  Part part[kChunk];
  int count = 0;

  // Whether every element of a full chunk is wanted: then it is written in place. Otherwise it goes
  // through a buffer, since the transforms write whole blocks.
  bool whole(int per_block) const { return count == 1 && part[0].take == kChunk * per_block; }
  void gather(void* buffer, const void* tensor, int size) const {
    for (int i = 0; i < count; ++i) {
      memcpy(static_cast<char*>(buffer) + part[i].from * size,
             static_cast<const char*>(tensor) + part[i].at * size, size_t(part[i].take) * size);
    }
  }
  void scatter(void* tensor, const void* buffer, int size) const {
    for (int i = 0; i < count; ++i) {
      memcpy(static_cast<char*>(tensor) + part[i].at * size,
             static_cast<const char*>(buffer) + part[i].from * size, size_t(part[i].take) * size);
    }
  }
};

// Covers local elements [begin, end) of the box with chunks and calls run(chunk, parts) for each.
template <class Run>
void for_each_chunk(const Box& box, int64_t begin, int64_t end, int per_block, const Run& run) {
  Chunk chunk;
  Parts parts;
  const auto flush = [&] {
    run(chunk, parts);
    chunk.blocks = parts.count = 0;
  };
  int64_t r = begin / box.run, inside = begin - r * box.run;
  for (; begin < end; ++r, inside = 0) {
    const int64_t stop = std::min(end, begin + box.run - inside);
    int64_t element = box.run_start(r) + inside;
    while (begin < stop) {
      const int skip = int(element % per_block), used = chunk.blocks * per_block;
      const int take = int(std::min<int64_t>(stop - begin, kChunk * per_block - used - skip));
      parts.part[parts.count++] = Part{begin, used + skip, take};
      chunk.append(uint64_t(element / per_block), (skip + take + per_block - 1) / per_block);
      begin += take;
      element += take;
      if (chunk.blocks == kChunk) flush();
    }
  }
  if (chunk.blocks > 0) flush();
}

struct PerBlock {
  int* result;
  template <class F, class T>
  void operator()(F, T) const {
    *result = int(16 / sizeof(typename F::Word));
  }
};

int elements_per_block(Dtype dtype, const Distribution& d) {
  int result = 0;
  visit(dtype, d, PerBlock{&result});
  return result;
}

}  // namespace

void fill_cpu(void* out, Dtype dtype, Distribution distribution, Draw draw, const Box& box,
              int64_t begin, int64_t end) {
  const int per_block = elements_per_block(dtype, distribution), size = size_of(dtype);
  for_each_chunk(box, begin, end, per_block, [&](const Chunk& chunk, const Parts& parts) {
    if (parts.whole(per_block)) {
      char* to = static_cast<char*>(out) + parts.part[0].at * size;
      return fill_blocks(to, dtype, distribution, draw, chunk);
    }
    alignas(64) char buffer[kBytes];
    fill_blocks(buffer, dtype, distribution, draw, chunk);
    parts.scatter(out, buffer, size);
  });
}

void bernoulli_cpu(void* out, Dtype dtype, const double* p, Draw draw, const Box& box,
                   int64_t begin, int64_t end) {
  const int size = size_of(dtype);
  for_each_chunk(box, begin, end, kWords, [&](const Chunk& chunk, const Parts& parts) {
    alignas(64) double chances[kChunk * kWords] = {};
    alignas(64) char buffer[kBytes];
    parts.gather(chances, p, sizeof(double));
    bernoulli_blocks(buffer, dtype, chances, draw, chunk);
    parts.scatter(out, buffer, size);
  });
}

void dropout_cpu(void* out, Dtype dtype, const void* x, Dropout dropout, Draw draw, const Box& box,
                 int64_t begin, int64_t end) {
  const int size = size_of(dtype);
  for_each_chunk(box, begin, end, kWords, [&](const Chunk& chunk, const Parts& parts) {
    if (parts.whole(kWords)) {
      const int64_t at = parts.part[0].at * size;
      const char* from = static_cast<const char*>(x) + at;
      return dropout_blocks(static_cast<char*>(out) + at, dtype, from, dropout, draw, chunk);
    }
    alignas(64) char given[kBytes] = {}, buffer[kBytes];
    parts.gather(given, x, size);
    dropout_blocks(buffer, dtype, given, dropout, draw, chunk);
    parts.scatter(out, buffer, size);
  });
}

}  // namespace consistent
