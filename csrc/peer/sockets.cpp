#include "sockets.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <new>
#include <stdexcept>

namespace consistent::peer {
namespace {

constexpr int kSlice_ms = 50;  // between two checks for ranks that gave up, and for signals
// Polls before a sleep, as in meeting.cpp: to wake a sleeper takes longer than most waits.
constexpr int kLooks = 100;
constexpr double kLooking_s = 0.001;
// The background thread pauses for kPause between two turns while messages are open, then for
// kIdlePause in kIdle further turns, and then sleeps until it is notified. To wake it for each
// message would take longer than most messages take.
constexpr auto kPause = std::chrono::milliseconds(1);
constexpr auto kIdlePause = std::chrono::milliseconds(5);
constexpr int kIdle = 40;
constexpr double kFlush_s = 5;  // the longest that close() sends what is left
// The longest time from a peer's connect() until arrive_by() has the accepted socket.
constexpr double kHandedOver_s = 0.5;
constexpr char kClosed[] = "Connection closed by peer";
constexpr char kOtherLength[] = "a message has another length";
// Bytes that are sent before the receiving side gets its turn, and the reverse: few enough that the
// kernel's copy is still in a cache when the other process reads it.
constexpr size_t kTurn = 256 * 1024;
constexpr int kTurns = 64;  // turns per peer in one pass of the background thread

struct Header {
  uint32_t tag;
  uint32_t zero;
  uint64_t bytes;
  int64_t failures;
};
static_assert(sizeof(Header) == 24);

double now_s() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

bool in_a_moment(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

using ByTag = std::unordered_map<uint32_t, std::deque<std::shared_ptr<Message>>>;

// Removes and returns the first message with this tag; null if there is none.
std::shared_ptr<Message> take(ByTag& messages, uint32_t tag) {
  const auto found = messages.find(tag);
  if (found == messages.end()) return nullptr;
  std::shared_ptr<Message> first = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) messages.erase(found);
  return first;
}

}  // namespace

struct Sockets::Peer {
  int out = -1, in = -1;
  std::string lost;   // why the connection cannot be used any more; empty if it can
  double gone_s = 0;  // when note_end() saw the end of the process

  std::deque<std::shared_ptr<Message>> going;
  size_t sent = 0;  // bytes of the first message in `going` that are sent, its header included

  Header header{};
  size_t read = 0;                  // bytes received of the header and of the data after it
  int64_t failures = 0;             // the count in the last header
  std::shared_ptr<Message> filled;  // the message that arrives now; null while its header arrives
  std::shared_ptr<std::vector<char>> kept_memory;  // its memory, if it was not asked for yet
  ByTag asked, kept;
};

Sockets::Sockets(int ranks, double timeout_s, Callbacks callbacks)
    : timeout_s_(timeout_s),
      callbacks_(std::move(callbacks)),
      bell_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  for (int k = 0; k < ranks; ++k) peers_.push_back(std::make_unique<Peer>());
}

Sockets::~Sockets() {
  close();
  ::close(bell_);
}

void Sockets::leave_by(int rank, int file) {
  const std::lock_guard<std::mutex> lock(mutex_);
  peers_.at(rank)->out = file;
}

void Sockets::arrive_by(int rank, int file) {
  const std::lock_guard<std::mutex> lock(mutex_);
  Peer& peer = *peers_.at(rank);
  if (closed_ || peer.in >= 0) {
    ::close(file);
    return;
  }
  peer.in = file;
  const uint64_t one = 1;
  (void)!write(bell_, &one, sizeof one);
}

bool Sockets::reaches(int rank) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return peers_.at(rank)->out >= 0;
}

void Sockets::send(const std::shared_ptr<Message>& message) {
  std::unique_lock<std::mutex> lock(mutex_);
  Peer& peer = *peers_.at(message->rank);
  peer.going.push_back(message);
  ++open_;
  pump_out(peer);
  go_on();
  let_go(lock);
}

void Sockets::receive(const std::shared_ptr<Message>& message) {
  std::unique_lock<std::mutex> lock(mutex_);
  Peer& peer = *peers_.at(message->rank);
  ++open_;
  if (const auto kept = take(peer.kept, message->tag)) {
    give(peer, *message, *kept);
  } else {
    peer.asked[message->tag].push_back(message);
    go_on();
  }
  let_go(lock);
}

// Copies a kept message, which arrived before it was asked for, to the receiver's memory.
void Sockets::give(Peer& peer, Message& asked, const Message& kept) {
  if (asked.bytes != kept.bytes) {
    peer.lost = kOtherLength;
    return;
  }
  if (asked.bytes != 0) memcpy(asked.data, kept.data, asked.bytes);
  finish(asked);
}

void Sockets::finish(Message& message) {
  finished_.push_back(std::move(message.owner));
  --open_;
  // Release: a thread that sees `done` reads the data that has arrived, without the lock.
  message.done.store(true, std::memory_order_release);
}

// Unlocks, and then releases the owners of finished messages. Releasing an owner may take the GIL
// (if the memory is a bytearray's, for example). Under the lock that would deadlock with a thread
// that holds the GIL and waits for the lock.
void Sockets::let_go(std::unique_lock<std::mutex>& lock) {
  Owners owners;
  owners.swap(finished_);
  lock.unlock();
}

// Sends up to kTurn bytes without waiting. Returns whether any byte was sent.
bool Sockets::pump_out(Peer& peer) {
  size_t moved = 0;
  while (moved < kTurn && !peer.going.empty() && peer.lost.empty() && peer.out >= 0) {
    Message& first = *peer.going.front();
    Header header{first.tag, 0, first.bytes, first.failures};
    const size_t skipped = std::min(peer.sent, sizeof header), at = peer.sent - skipped;
    // One system call for header and data; MSG_NOSIGNAL gives EPIPE in place of a SIGPIPE.
    iovec parts[] = {{reinterpret_cast<char*>(&header) + skipped, sizeof header - skipped},
                     {first.data + at, std::min(first.bytes - at, kTurn)}};
    msghdr all{};
    all.msg_iov = parts;
    all.msg_iovlen = 2;
    const ssize_t count = sendmsg(peer.out, &all, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (count < 0) {
      if (errno == EINTR) continue;
      if (!in_a_moment(errno)) peer.lost = strerror(errno);
      break;
    }
    moved += size_t(count);
    peer.sent += size_t(count);
    if (peer.sent < sizeof header + first.bytes) continue;
    peer.sent = 0;
    finish(first);
    peer.going.pop_front();
  }
  return moved != 0;
}

// Chooses the memory of the message whose header has arrived. Returns false if the message has to
// stay in the kernel's buffers: nobody has asked for it, and `keeps` is false.
bool Sockets::begin(Peer& peer, bool keeps) {
  peer.failures = peer.header.failures;
  peer.filled = take(peer.asked, peer.header.tag);
  if (peer.filled) {
    if (peer.filled->bytes != peer.header.bytes) peer.lost = kOtherLength;
    return peer.lost.empty();
  }
  if (!keeps) return false;
  std::shared_ptr<std::vector<char>> memory;
  try {
    memory = std::make_shared<std::vector<char>>(peer.header.bytes);
  } catch (const std::bad_alloc&) {
    throw std::runtime_error("no memory for a message of " + std::to_string(peer.header.bytes) +
                             " bytes that came before the one that is waited for");
  }
  peer.filled = std::make_shared<Message>();
  peer.filled->tag = peer.header.tag;
  peer.filled->data = memory->data();
  peer.filled->bytes = memory->size();
  peer.kept_memory = std::move(memory);
  return true;
}

// Handles the result of recv(). Returns whether it received any bytes.
bool Sockets::got(Peer& peer, long count) {
  if (count > 0) {
    peer.read += size_t(count);
    return true;
  }
  if (count == 0) peer.lost = kClosed;
  if (count < 0 && errno != EINTR && !in_a_moment(errno)) peer.lost = strerror(errno);
  return false;
}

// Receives up to kTurn bytes without waiting. Returns whether any byte was received.
bool Sockets::pump_in(Peer& peer, bool keeps) {
  size_t moved = 0;
  while (moved < kTurn && peer.in >= 0 && peer.lost.empty()) {
    if (peer.read < sizeof peer.header) {
      char* to = reinterpret_cast<char*>(&peer.header) + peer.read;
      const ssize_t count = recv(peer.in, to, sizeof peer.header - peer.read, MSG_DONTWAIT);
      if (!got(peer, count)) break;
      moved += size_t(count);
      continue;
    }
    if (!peer.filled && !begin(peer, keeps)) break;
    const size_t there = peer.read - sizeof peer.header;
    if (there < peer.filled->bytes) {
      char* to = peer.filled->data + there;
      const size_t most = std::min(peer.filled->bytes - there, kTurn);
      const ssize_t count = recv(peer.in, to, most, MSG_DONTWAIT);
      if (!got(peer, count)) break;
      moved += size_t(count);
      continue;
    }
    if (peer.kept_memory) {
      peer.filled->owner = std::move(peer.kept_memory);
      // Someone may have asked for the message while it arrived.
      if (const auto asked = take(peer.asked, peer.filled->tag)) {
        give(peer, *asked, *peer.filled);
      } else {
        peer.kept[peer.filled->tag].push_back(peer.filled);
      }
    } else {
      finish(*peer.filled);
    }
    peer.filled = nullptr;
    peer.kept_memory = nullptr;
    peer.read = 0;
  }
  return moved != 0;
}

// Sends and receives what is possible without waiting. With `keeps`, it also receives messages that
// nobody has asked for yet: they may come before a message that is waited for. Returns whether any
// byte was moved.
bool Sockets::look(Peer& peer, bool keeps) {
  const bool came = (keeps || peer.filled || !peer.asked.empty()) && pump_in(peer, keeps);
  return pump_out(peer) || came;
}

void Sockets::wait(const Messages& messages) {
  struct Waiting {
    std::atomic<int>& count;
    ~Waiting() { --count; }
  };
  ++waiting_;
  const Waiting waiting{waiting_};
  const auto here = [](const std::shared_ptr<Message>& message) {
    return message->done.load(std::memory_order_acquire);
  };
  const double begin = now_s();
  std::vector<bool> waited_for(peers_.size());
  for (int k = 0;; ++k) {
    bool moved = false;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      std::fill(waited_for.begin(), waited_for.end(), false);
      for (const auto& message : messages) {
        if (!here(message)) waited_for[message->rank] = true;
      }
      for (size_t rank = 0; rank < peers_.size(); ++rank) {
        moved |= look(*peers_[rank], waited_for[rank]);
      }
      for (const auto& message : messages) {
        if (here(message)) continue;
        const Peer& peer = *peers_[message->rank];
        const std::string rank = "rank " + std::to_string(message->rank);
        if (!peer.lost.empty()) throw std::runtime_error(peer.lost + " (" + rank + ")");
        if (peer.failures > message->failures)
          throw std::runtime_error(other_step(rank, "this rank"));
      }
      let_go(lock);
    }
    if (std::all_of(messages.begin(), messages.end(), here)) return;
    if (moved) continue;
    const double waited = now_s() - begin;
    if (k < kLooks || waited < kLooking_s) {
      sched_yield();
    } else {
      sleep(messages, waited);
    }
  }
}

// Sleeps until something can be sent or received, for kSlice_ms at most. Every socket on which
// something may happen is polled, also of peers that `messages` do not name.
void Sockets::sleep(const Messages& messages, double waited_s) {
  std::vector<pollfd> files{{bell_, POLLIN, 0}};
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& message : messages) {
      if (message->done.load(std::memory_order_acquire)) continue;
      const Peer& peer = *peers_[message->rank];
      if (peer.in >= 0) files.push_back({peer.in, POLLIN, 0});
      // The peer sends nothing on this socket, so POLLRDHUP means that its process has ended.
      const bool looks_for_end = peer.in < 0 && peer.gone_s == 0;
      if (peer.out >= 0 && looks_for_end) files.push_back({peer.out, POLLRDHUP, 0});
    }
    for (const auto& peer : peers_) {
      if (peer->out >= 0 && !peer->going.empty()) files.push_back({peer->out, POLLOUT, 0});
      if (peer->in >= 0 && peer->filled) files.push_back({peer->in, POLLIN, 0});
    }
  }
  poll(files.data(), files.size(), kSlice_ms);
  uint64_t rung;
  (void)!read(bell_, &rung, sizeof rung);
  if (callbacks_.alarm->is_on()) throw Broken(callbacks_.alarm->words());
  if (callbacks_.interrupted()) throw std::runtime_error("it was interrupted");
  if (waited_s > timeout_s_) throw std::runtime_error("Timed out waiting");
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& message : messages) note_end(*peers_[message->rank]);
}

// Notes the end of a process from which there is no connection (`in` < 0). The end of any other
// process is seen on that connection, after everything that it sent has arrived.
void Sockets::note_end(Peer& peer) {
  char byte;
  if (peer.in >= 0 || peer.out < 0) return;
  if (recv(peer.out, &byte, 1, MSG_DONTWAIT | MSG_PEEK) != 0) return;
  if (peer.gone_s == 0) peer.gone_s = now_s();
  // It may have connected, sent a message and ended, with its socket not yet in arrive_by().
  if (now_s() - peer.gone_s > kHandedOver_s) peer.lost = kClosed;
}

// Starts the background thread, or wakes it if it sleeps. The lock is held.
void Sockets::go_on() {
  if (open_.load() == 0) return;
  if (sleeps_) woken_.notify_one();
  if (thread_.joinable() || closed_) return;
  sigset_t all, before;
  sigfillset(&all);
  // The new thread inherits a mask that blocks all signals: the program's own threads handle them.
  pthread_sigmask(SIG_SETMASK, &all, &before);
  thread_ = std::thread([this] {
    std::unique_lock<std::mutex> lock(mutex_);
    for (int idle = 0; !closed_; ++idle) {
      if (idle > kIdle) {
        sleeps_ = true;
        woken_.wait(lock);
        sleeps_ = false;
        idle = 0;
      }
      let_go(lock);
      std::this_thread::sleep_for(idle == 0 ? kPause : kIdlePause);
      const bool looks = open_.load() != 0 && waiting_.load() == 0;
      lock.lock();
      if (open_.load() != 0) idle = -1;
      if (!looks) continue;  // a thread in wait() moves the messages by itself
      for (const auto& peer : peers_) {
        for (int turn = 0; turn < kTurns && look(*peer, false); ++turn) continue;
      }
    }
  });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Sockets::close() {
  const double begin = now_s();
  {
    std::unique_lock<std::mutex> lock(mutex_);
    if (closed_) return;
    const auto goes = [](const std::unique_ptr<Peer>& peer) {
      return !peer->going.empty() && peer->lost.empty() && peer->out >= 0;
    };
    while (std::any_of(peers_.begin(), peers_.end(), goes) && now_s() - begin < kFlush_s &&
           !callbacks_.alarm->is_on()) {
      for (const auto& peer : peers_) pump_out(*peer);
      lock.unlock();
      std::this_thread::sleep_for(kPause);
      lock.lock();
    }
    closed_ = true;
    woken_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
  std::unique_lock<std::mutex> lock(mutex_);
  for (const auto& peer : peers_) {
    if (peer->out >= 0) ::close(peer->out);
    if (peer->in >= 0) ::close(peer->in);
    peer->out = peer->in = -1;
    peer->lost = "this process has closed it";
  }
  let_go(lock);
}

}  // namespace consistent::peer
