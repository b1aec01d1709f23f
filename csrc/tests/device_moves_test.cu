// Compares the moves between devices with their CPU versions. The memory of one device stands for
// that of all peers. Then it times them: 8 peers, 64 MB from each. With any argument it does not
// time, for runs under compute-sanitizer.
//
//   nvcc -std=c++17 -O3 -arch=native -fmad=false -Xcompiler -ffp-contract=off
//       csrc/tests/device_moves_test.cu csrc/peer/device_moves.cu csrc/peer/device_moves_cpu.cpp
//       csrc/peer/reduce.cpp -o device_moves_test

#include "device.cuh"
#include "move_cases.h"

namespace consistent::peer {
namespace {

char* start_of(const DeviceBytes& memory) { return static_cast<char*>(memory.data); }

// The memory of all peers, on the host and on the device.
struct Peers {
  std::vector<Bytes> here;
  std::vector<DeviceBytes> there;
  std::vector<char*> on_host, on_device;

  // If `type` is given, a floating type, the memory has infinities and NaN of that type.
  explicit Peers(const MoveCase& it, const Type* type = nullptr) {
    for (int k = 0; k < it.peers; ++k) {
      here.push_back(memory_of(it, k, bytes_of(it)));
      if (type != nullptr && k != 1) plant_specials(here.back(), it.skew, *type);
      there.emplace_back(here.back().data(), here.back().size());
      on_host.push_back(here.back().data());
      on_device.push_back(start_of(there.back()));
    }
  }
};

int64_t compare_copies(const MoveCase& it) {
  const Peers peers(it);
  Bytes wanted(size_t(part_bytes(it) * it.peers + it.skew));
  const DeviceBytes made(wanted.data(), wanted.size());
  Boxes taking, placing, taking_there, placing_there;
  boxes_of(it, peers.on_host, wanted.data(), taking, placing);
  boxes_of(it, peers.on_device, start_of(made), taking_there, placing_there);
  copy_boxes_cpu(placing, taking);
  copy_boxes_cuda(placing_there, taking_there, nullptr);
  return made.back(wanted.size()) != wanted;
}

// Compares sums, maxima and minima, with the result `skew` bytes after an aligned address.
int64_t compare_reductions(const MoveCase& it, const Peers& peers, Type type, int64_t skew) {
  int64_t wrong = 0;
  for (const Op op : {Op::sum, Op::max, Op::min}) {
    Boxes boxes, boxes_there;
    for (char* memory : peers.on_host) boxes.add(taken(it, memory));
    for (char* memory : peers.on_device) boxes_there.add(taken(it, memory));
    Bytes wanted(size_t(part_bytes(it)));
    const DeviceBytes made(wanted.size(), size_t(skew));
    reduce_boxes_cpu(wanted.data(), boxes, type, op);
    reduce_boxes_cuda(made.data, boxes_there, type, op, nullptr);
    wrong += !alike(made.back(wanted.size()), wanted, type);
  }
  return wrong;
}

int64_t compare(const MoveCase& it) {
  int64_t wrong = compare_copies(it);
  const Peers plain(it);
  for (const Type type : kTypes) {
    if (it.inner % size_of(type) != 0 || it.skew % size_of(type) != 0) continue;
    wrong += compare_reductions(it, plain, type, 0);
    if (infinity_of(type) == 0) continue;
    wrong += compare_reductions(it, Peers(it, &type), type, size_of(type));
  }
  return wrong;
}

void timing() {
  constexpr int kPeers = 8;
  constexpr int64_t kRows = 8192, kRowBytes = 8192, kBytes = kRows * kRowBytes;
  std::vector<DeviceBytes> memory;
  for (int k = 0; k < kPeers; ++k) {
    memory.emplace_back(size_t(kBytes));
    CONSISTENT_CHECK_CUDA(cudaMemset(memory.back().data, 0, size_t(kBytes)));
  }
  const DeviceBytes out{size_t(kBytes)};
  Boxes whole, columns, parts, rows;
  for (int k = 0; k < kPeers; ++k) {
    char* place = start_of(memory[size_t(k)]);
    whole.add(joined(place, kBytes));
    columns.add(cut(place, kRows, kPeers, kRowBytes / kPeers, 3, 1));
    parts.add(joined(place, kBytes / kPeers));
    rows.add(cut(out.data, 1, kPeers, kBytes / kPeers, k, 1));
  }
  time_beside_copy("all-reduce, one shot, bf16", kBytes * (kPeers + 1),
                   [&] { reduce_boxes_cuda(out.data, whole, Type::bfloat16, Op::sum, nullptr); });
  time_beside_copy("reduce-scatter, columns", kBytes / kPeers * (kPeers + 1),
                   [&] { reduce_boxes_cuda(out.data, columns, Type::bfloat16, Op::sum, nullptr); });
  time_beside_copy("all-gather", 2 * kBytes, [&] { copy_boxes_cuda(rows, parts, nullptr); });
  time_beside_copy("all-to-all, columns to rows", 2 * kBytes,
                   [&] { copy_boxes_cuda(rows, columns, nullptr); });
}

}  // namespace
}  // namespace consistent::peer

int main(int words, char**) {
  using namespace consistent::peer;
  int64_t wrong = 0;
  for (const MoveCase& it : move_cases()) wrong += compare(it);
  printf(wrong ? "CUDA and CPU differ\n" : "CUDA and CPU agree\n");
  if (words < 2) timing();
  return wrong != 0;
}
