// Messages between this process and the processes of other ranks, over TCP.
//
// Two processes are connected by one socket for each direction. A receiver finds a message by its
// tag. On the wire a message is
//
//   | tag | 0 | bytes | failures | data ...         24 bytes, then those of the message
//
// `failures` is the number of errors that the sender has met and others may not have met (group.h).
// Messages arrive in the order in which they are sent. So if a message arrives with a higher count
// than that of the message which is waited for, the latter will never arrive.
//
// A thread in wait() sends and receives by itself: no other thread has to be woken for a message.
// While no thread is in wait(), a background thread continues the open messages every millisecond,
// and in between the kernel's buffers take and give bytes.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "meeting.h"

namespace consistent::peer {

// A message that is sent or received.
struct Message {
  int rank = 0;
  uint32_t tag = 0;
  int64_t failures = 0;  // of this process, when the message was created
  char* data = nullptr;
  size_t bytes = 0;
  std::shared_ptr<void> owner;    // keeps `data` alive; reset after `done`, outside of the lock
  std::atomic<bool> done{false};  // sent completely, or received completely
};

using Messages = std::vector<std::shared_ptr<Message>>;

class Sockets {
 public:
  // `ranks`: the number of ranks.
  Sockets(int ranks, double timeout_s, Callbacks callbacks);
  ~Sockets();

  // leave_by: messages to `rank` are sent on the socket `file`. arrive_by: messages from `rank` are
  // received on it. This object owns the files from then on.
  void leave_by(int rank, int file);
  void arrive_by(int rank, int file);
  // Whether leave_by() was called for `rank`.
  bool reaches(int rank) const;

  // Start a message, and send or receive what is possible without waiting.
  void send(const std::shared_ptr<Message>& message);
  void receive(const std::shared_ptr<Message>& message);
  // Returns when all `messages` are done. Throws Broken if a rank has given up, and
  // std::runtime_error if a rank has ended or is at another step of the program, or on a timeout.
  void wait(const Messages& messages);
  // Sends what is left, for a few seconds at most, and closes all sockets.
  void close();

 private:
  struct Peer;
  using Owners = std::vector<std::shared_ptr<void>>;

  bool look(Peer& peer, bool keeps);
  bool pump_out(Peer& peer);
  bool pump_in(Peer& peer, bool keeps);
  bool begin(Peer& peer, bool keeps);
  bool got(Peer& peer, long count);
  void give(Peer& peer, Message& asked, const Message& kept);
  void finish(Message& message);
  void let_go(std::unique_lock<std::mutex>& lock);
  void sleep(const Messages& messages, double waited_s);
  void note_end(Peer& peer);
  void go_on();

  const double timeout_s_;
  const Callbacks callbacks_;
  const int bell_;            // an eventfd, written when a socket is added that no sleeper polls
  mutable std::mutex mutex_;  // guards the peers and `finished_`
  std::vector<std::unique_ptr<Peer>> peers_;
  Owners finished_;              // owners of messages that are done; released by let_go()
  std::atomic<int> open_{0};     // messages that are not done
  std::atomic<int> waiting_{0};  // threads in wait()

  std::thread thread_;
  std::condition_variable woken_;
  bool sleeps_ = false, closed_ = false;
};

}  // namespace consistent::peer
