// Numbers of a message in one byte each. Those of a block share a float32 by which they are
// multiplied; a message of n numbers has the blocks' float32 first, and then n bytes:
//
//   number = scale * integer              in -127 to 127, or
//   number = scale * float8_e4m3fn        of at most 448
//
// A block that holds a NaN, an infinity or a number beyond float32 has the scale NaN, and is read
// as NaN whole. Messages may begin at any byte.

#pragma once

#include <cstdint>

#include "../kernels/storage.h"
#include "block_code.h"

namespace consistent::peer {

// Writes blocks [begin, end) of the n numbers `x` of a floating type. If `unsent` is not null, of
// `x + unsent`; what the message leaves out of it is then in `unsent`, 0 where that is not finite.
void write_blocks(uint8_t* message, const void* x, void* unsent, Dtype dtype, int64_t n, Code code,
                  int64_t begin, int64_t end);

// out = the numbers of the first message + those of the second + ..., for blocks [begin, end) of
// n numbers each. Sums are kept in float32 or float64, and rounded once.
void read_blocks(void* out, const uint8_t* const* messages, int count, Dtype dtype, int64_t n,
                 Code code, int64_t begin, int64_t end);

// The same on a GPU, all blocks at once. Bits are those of the CPU, but for those of a NaN.
void write_blocks_cuda(uint8_t* message, const void* x, void* unsent, Dtype dtype, int64_t n,
                       Code code, void* stream);

constexpr int kMostMessages = 32;  // of a call; a sum of more goes on from `before`

// out = before + the numbers of the messages, with `before`, of float32 or float64, null or what
// earlier messages gave.
void read_blocks_cuda(void* out, const void* before, const uint8_t* const* messages, int count,
                      Dtype dtype, int64_t n, Code code, void* stream);

}  // namespace consistent::peer
