// Messages between this process and those of other ranks, by TCP.
//
// Two processes are joined by a socket for each direction, and a message is found by its tag:
//
//   | tag | 0 | bytes | failures | data ...         24 bytes, then those of the message
//
// `failures` is how many errors the sender has met that others may not have met (group.h). Messages
// come in the order in which they are sent: once one has a higher count than the message that is
// waited for, that one will never come.
//
// Whoever waits sends and receives by itself: no thread is woken for a message, and none is told
// that the other side is ready. While nobody waits, what is under way goes on in a thread that
// looks every millisecond, and meanwhile in the kernel's buffers.

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

// A message that goes or comes.
struct Message {
  int rank = 0;
  uint32_t tag = 0;
  int64_t failures = 0;  // of this process, as it was made
  char* data = nullptr;
  size_t bytes = 0;
  std::shared_ptr<void> owner;  // of `data`, until the message has gone or come, and a bit longer
  std::atomic<bool> done{false};
};

using Messages = std::vector<std::shared_ptr<Message>>;

class Sockets {
 public:
  // `ranks`: how many there are.
  Sockets(int ranks, double timeout_s, Callbacks callbacks);
  ~Sockets();

  // What is sent to `rank` leaves by the socket `file`; what it sends arrives by it. The files
  // belong to this object from then on.
  void leave_by(int rank, int file);
  void arrive_by(int rank, int file);
  // Whether there is a socket by which messages to `rank` leave.
  bool reaches(int rank) const;

  // These start, and do what is possible at once.
  void send(const std::shared_ptr<Message>& message);
  void receive(const std::shared_ptr<Message>& message);
  // Returns when all have gone or come. Throws Broken if a rank has given up, and
  // std::runtime_error if one has ended, is at another step of the program, or the time is up.
  void wait(const Messages& messages);
  // Sends what is left, for a moment, and closes all.
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
  const int bell_;            // rung when a socket is there that a sleeper does not know
  mutable std::mutex mutex_;  // guards the peers
  std::vector<std::unique_ptr<Peer>> peers_;
  Owners finished_;  // of messages that have gone or come: let go where the lock is not held
  std::atomic<int> open_{0};     // messages that have neither gone nor come
  std::atomic<int> waiting_{0};  // threads in wait()

  std::thread thread_;
  std::condition_variable woken_;
  bool sleeps_ = false, closed_ = false;
};

}  // namespace consistent::peer
