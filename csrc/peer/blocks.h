// Messages that hold each number in one byte. The numbers of a block share one float32 scale. A
// message of n numbers begins with the scales of its blocks, and n bytes follow:
//
//   number = scale * integer              in -127 to 127, or
//   number = scale * float8_e4m3fn        of at most 448
//
// A block with a NaN, an infinity or a number beyond float32 has the scale NaN, and all of it is
// read as NaN. A message may begin at any byte address.

#pragma once

#include <cstdint>

#include "../kernels/storage.h"
#include "block_code.h"

namespace consistent::peer {

// Writes blocks [begin, end) of the n numbers `x` of a floating type to `message`. If `unsent` is
// not null, it writes `x + unsent` instead and sets `unsent` to the rounding error of the message
// (error feedback), or to 0 where the error is not finite. `unsent` is in float32, or float64 for
// float64 numbers: a shorter float would round the error itself away.
void write_blocks(uint8_t* message, const void* x, void* unsent, Dtype dtype, int64_t n, Code code,
                  int64_t begin, int64_t end);

// out = the numbers of messages[0] + those of messages[1] + ..., for blocks [begin, end). Each
// message has n numbers. The sum is in float32, or float64 for a float64 result, and is rounded
// once.
void read_blocks(void* out, const uint8_t* const* messages, int count, Dtype dtype, int64_t n,
                 Code code, int64_t begin, int64_t end);

// The same on a GPU, for all blocks. The bits are those of the CPU, except those of a NaN.
void write_blocks_cuda(uint8_t* message, const void* x, void* unsent, Dtype dtype, int64_t n,
                       Code code, void* stream);

constexpr int kMostMessages = 32;  // of one call; for more, pass the sum so far as `before`

// out = before + the numbers of the messages. `before` is null, or the unrounded sum of earlier
// messages, in float32 or float64.
void read_blocks_cuda(void* out, const void* before, const uint8_t* const* messages, int count,
                      Dtype dtype, int64_t n, Code code, void* stream);

}  // namespace consistent::peer
