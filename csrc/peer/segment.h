// Named shared memory that several processes of one host map, and that no death leaves behind.

#pragma once

#include <cstddef>
#include <string>

namespace consistent::peer {

// What must be equal for two processes to share memory: the boot, the user, /dev/shm itself, and
// the namespaces of process numbers and of the network (one of its own is a host of its own).
std::string host_identity();

// When process `pid` started, in clock ticks since boot; 0 if it has ended, also as a zombie.
unsigned long long started(long pid);

// Unlinks the segments that dead processes of this user and host created and did not unlink.
void remove_abandoned();

// A mapped segment; unmapped at the end, and unlinked by its creator if that was not done before.
class Segment {
 public:
  // A new one of `bytes` zeros. Throws std::system_error, also where the memory does not suffice.
  static Segment create(size_t bytes);
  // Maps that of another process. Throws if it is another user's, or smaller than `bytes`.
  static Segment attach(const std::string& name, size_t bytes);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;
  ~Segment();

  // Forgets the name: the memory lives on until the last process has unmapped it.
  void unlink();

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  const std::string& name() const { return name_; }

 private:
  Segment() = default;

  std::string name_;
  char* data_ = nullptr;
  size_t bytes_ = 0;
  bool named_ = false;  // by us, and still
};

}  // namespace consistent::peer
