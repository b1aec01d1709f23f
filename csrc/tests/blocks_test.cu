// Compares one-byte messages on CUDA with those of the CPU: the bytes, the rounding errors
// (`unsent`) and the sums of messages. Then it times them on 64 MB of numbers. With any argument it
// does not time, for runs under compute-sanitizer.
//
//   nvcc -std=c++17 -O3 -arch=native -fmad=false -Xcompiler -ffp-contract=off
//       csrc/tests/blocks_test.cu csrc/peer/blocks.cu csrc/peer/blocks_cpu.cpp -o blocks_test

#include "../peer/blocks.h"
#include "device.cuh"
#include "kernel_cases.h"

namespace consistent::peer {
namespace {

constexpr Code kCodes[] = {Code::int8, Code::fp8};

struct Case {
  int64_t n;
  bool specials;  // infinities and NaN in some blocks
  int64_t skew;   // elements between an aligned address and the data
};

std::vector<Case> message_cases() {
  return {{1, false, 0},    {255, false, 0}, {256, false, 0},     {257, true, 0},
          {5003, false, 1}, {5003, true, 3}, {40 * 256, true, 0}, {20011, false, 0}};
}

// Numbers of very different magnitudes, with a block of zeros among them.
Bytes drawn(const Case& it, Dtype dtype, uint64_t seed) {
  Bytes made = numbers(it.n, dtype, seed);
  const size_t size = size_t(size_of(dtype));
  if (it.n > 600) memset(made.data() + 300 * size, 0, 300 * size);
  if (it.specials) visit_float_type(dtype, StoreSpecials{made});
  return made;
}

// The dtype of rounding errors, and of sums that are not rounded yet.
Dtype wide(Dtype dtype) { return dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32; }

struct Message {
  Bytes bytes, unsent;
};

Message written_here(const Case& it, Dtype dtype, Code code, uint64_t seed) {
  const Bytes x = drawn(it, dtype, seed);
  Message made{Bytes(size_t(bytes_of(it.n))), drawn(it, wide(dtype), seed + 100)};
  write_blocks(reinterpret_cast<uint8_t*>(made.bytes.data()), x.data(), made.unsent.data(), dtype,
               it.n, code, 0, blocks_of(it.n));
  return made;
}

int64_t compare_written(const Case& it, Dtype dtype, Code code, uint64_t seed) {
  const Message wanted = written_here(it, dtype, code, seed);
  const Bytes x = drawn(it, dtype, seed), before = drawn(it, wide(dtype), seed + 100);
  const size_t skew = size_t(it.skew);
  const DeviceBytes from(x.data(), x.size(), skew * size_t(size_of(dtype)));
  const DeviceBytes unsent(before.data(), before.size(), skew * size_t(size_of(wide(dtype))));
  const DeviceBytes message(wanted.bytes.size());
  auto* to = static_cast<uint8_t*>(message.data);
  write_blocks_cuda(to, from.data, unsent.data, dtype, it.n, code, nullptr);
  int64_t wrong = message.back(wanted.bytes.size()) != wanted.bytes;
  wrong += unsent.back(before.size()) != wanted.unsent;
  Bytes alone(wanted.bytes.size());
  write_blocks(reinterpret_cast<uint8_t*>(alone.data()), x.data(), nullptr, dtype, it.n, code, 0,
               blocks_of(it.n));
  write_blocks_cuda(to, from.data, nullptr, dtype, it.n, code, nullptr);
  return wrong + (message.back(alone.size()) != alone);
}

// Compares the sum of `count` messages, computed on the device in two calls: the second one adds
// the later messages to the sum of the first ones.
int64_t compare_read(const Case& it, Dtype dtype, Code code, int count) {
  std::vector<Message> messages;
  std::vector<DeviceBytes> there;
  std::vector<const uint8_t*> at, at_there;
  for (int k = 0; k < count; ++k) {
    messages.push_back(written_here(it, dtype, code, uint64_t(k + 1)));
    const Bytes& bytes = messages.back().bytes;
    there.emplace_back(bytes.data(), bytes.size(), size_t(it.skew));
    at_there.push_back(static_cast<const uint8_t*>(there.back().data));
  }
  for (const Message& message : messages) {
    at.push_back(reinterpret_cast<const uint8_t*>(message.bytes.data()));
  }
  const size_t size = size_t(it.n) * size_t(size_of(dtype));
  const size_t skew = size_t(it.skew) * size_t(size_of(dtype));
  Bytes wanted(size);
  read_blocks(wanted.data(), at.data(), count, dtype, it.n, code, 0, blocks_of(it.n));
  const DeviceBytes out(size, skew), sum(size_t(it.n) * 8);
  const int first = count / 2;
  if (first > 0) {
    read_blocks_cuda(sum.data, nullptr, at_there.data(), first, wide(dtype), it.n, code, nullptr);
  }
  read_blocks_cuda(out.data, first > 0 ? sum.data : nullptr, at_there.data() + first, count - first,
                   dtype, it.n, code, nullptr);
  return apart(out.back(size), wanted, dtype, 0);
}

void timing() {
  constexpr int64_t kCount = 32 << 20;
  const DeviceBytes x(size_t(kCount) * 2), unsent(size_t(kCount) * 4);
  const DeviceBytes message(size_t(bytes_of(kCount)));
  CONSISTENT_CHECK_CUDA(cudaMemset(x.data, 0x3C, size_t(kCount) * 2));
  CONSISTENT_CHECK_CUDA(cudaMemset(unsent.data, 0, size_t(kCount) * 4));
  auto* to = static_cast<uint8_t*>(message.data);
  const uint8_t* from[] = {to, to, to, to};
  for (const Code code : kCodes) {
    const char* name = code == Code::int8 ? "int8" : "fp8";
    printf("%s\n", name);
    time_beside_copy("write, bf16", kCount * 2 + bytes_of(kCount), [&] {
      write_blocks_cuda(to, x.data, nullptr, Dtype::bf16, kCount, code, nullptr);
    });
    time_beside_copy("write, with unsent, bf16", kCount * 10 + bytes_of(kCount), [&] {
      write_blocks_cuda(to, x.data, unsent.data, Dtype::bf16, kCount, code, nullptr);
    });
    time_beside_copy("read one, bf16", kCount * 2 + bytes_of(kCount), [&] {
      read_blocks_cuda(x.data, nullptr, from, 1, Dtype::bf16, kCount, code, nullptr);
    });
    time_beside_copy("read four, bf16", kCount * 2 + 4 * bytes_of(kCount), [&] {
      read_blocks_cuda(x.data, nullptr, from, 4, Dtype::bf16, kCount, code, nullptr);
    });
  }
}

}  // namespace
}  // namespace consistent::peer

int main(int words, char** given) {
  using namespace consistent::peer;
  int64_t wrong = 0;
  for (const Case& it : message_cases()) {
    for (const auto dtype : consistent::floats(words, given)) {
      for (const Code code : kCodes) {
        wrong += compare_written(it, dtype, code, 1);
        for (const int count : {1, 2, 5}) wrong += compare_read(it, dtype, code, count);
      }
    }
  }
  printf(wrong ? "CUDA and CPU differ\n" : "CUDA and CPU agree\n");
  if (words < 2) timing();
  return wrong != 0;
}
