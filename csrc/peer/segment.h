// Named shared memory that several processes of one host map, and that no death leaves behind.

#pragma once

#include <cstddef>
#include <string>

namespace consistent::peer {

// What must be equal for two processes to share memory: the boot, the user, /dev/shm itself, and
// the namespaces of process numbers and of the network. A process in another network namespace
// counts as one on another host.
std::string host_identity();

// When process `pid` started, in clock ticks since boot; 0 if it has ended or is a zombie.
unsigned long long started(long pid);

// Unlinks the segments that dead processes of this user and host created and did not unlink.
void remove_abandoned();

// A mapped segment. The destructor unmaps it, and in the process that created it also unlinks it if
// that was not done before. A forked child does not count as the creator: what it unmaps is only
// its own mapping, and it never unlinks its parent's segment.
class Segment {
 public:
  // A new segment of `bytes` zeros. Throws std::system_error, also if there is not enough memory.
  static Segment create(size_t bytes);
  // Maps the segment `name` of another process. Throws std::runtime_error if it is another user's
  // or smaller than `bytes`, and std::system_error if it cannot be opened or mapped.
  static Segment attach(const std::string& name, size_t bytes);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  // Removes the name: the memory lives on until the last process has unmapped it.
  void unlink();

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  const std::string& name() const { return name_; }

 private:
  Segment() = default;

  std::string name_;
  char* data_ = nullptr;
  size_t bytes_ = 0;
  long named_by_ = 0;  // the process that created it; 0 in others, and once it is unlinked
};

}  // namespace consistent::peer
