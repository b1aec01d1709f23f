// Named shared memory that several processes of one host map. Segments of processes that died are
// removed by remove_abandoned().

#pragma once

#include <cstddef>
#include <string>

namespace consistent::peer {

// A text that is equal for two processes if they can share memory: it names the boot, the user, the
// device of /dev/shm, and the PID and network namespaces. A process in another network namespace
// counts as one on another host.
std::string host_identity();

// When process `pid` started, in clock ticks since boot; 0 if it has ended or is a zombie. The pair
// (pid, start) identifies a process, since the kernel reuses pids.
unsigned long long started(long pid);

// Unlinks the segments that were created by processes of this user and PID namespace which have
// ended without unlinking them.
void remove_abandoned();

// A mapped segment. The destructor unmaps it, and in the process that created it also unlinks it,
// unless unlink() was called. A forked child does not count as the creator: it only unmaps its own
// mapping and never unlinks its parent's segment.
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

  // Removes the name. The memory is freed when the last process has unmapped it.
  void unlink();

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  const std::string& name() const { return name_; }

 private:
  Segment() = default;

  std::string name_;
  char* data_ = nullptr;
  size_t bytes_ = 0;
  long named_by_ = 0;  // pid of the process that has to unlink it; 0 if none has to
};

}  // namespace consistent::peer
