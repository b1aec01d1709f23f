#include "group.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <unordered_set>
#include <utility>

namespace consistent::peer {
namespace {

thread_local bool in_call = false;

size_t aligned(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }  // to a page

size_t headers_at(int members) { return aligned(Meeting::bytes(members)); }

size_t slots_at(int members) {
  return headers_at(members) + aligned(2 * size_t(members) * Header::bytes(members));
}

template <typename Box>
std::vector<int64_t> sizes_of(const std::vector<Box>& boxes) {
  std::vector<int64_t> sizes;
  for (const Box& box : boxes) sizes.push_back(box.bytes());
  return sizes;
}

int64_t rounds(int64_t bytes, int64_t each) {
  return std::max<int64_t>(1, (bytes + each - 1) / each);
}

// The groups of this process. Never destroyed, since a group may outlive static objects.
struct Living {
  std::mutex mutex;
  std::unordered_set<Group*> groups;
};

Living& living() {
  static Living* const found = new Living;
  return *found;
}

}  // namespace

bool is_in_call() { return in_call; }

Group::Lock::Lock(std::mutex& mutex) : held_(mutex) { in_call = true; }

Group::Lock::~Lock() {
  if (held_.owns_lock()) in_call = false;
}

void Group::Lock::unlock() { held_.unlock(); }

size_t Group::segment_bytes(int members, int64_t slot_bytes) {
  return slots_at(members) + 2 * size_t(members) * size_t(slot_bytes);
}

Group::Group(Segment segment, int me, std::vector<int> ranks, int64_t slot_bytes, double timeout_s,
             Callbacks callbacks)
    : segment_(std::move(segment)),
      meeting_(segment_.data(), me, std::move(ranks), timeout_s, std::move(callbacks)),
      slot_bytes_(slot_bytes),
      headers_at_(headers_at(size())),
      slots_at_(slots_at(size())) {
  const std::lock_guard<std::mutex> lock(living().mutex);
  living().groups.insert(this);
  tell_failures();
}

Group::~Group() {
  const std::lock_guard<std::mutex> lock(living().mutex);
  living().groups.erase(this);
}

void add_failures(int64_t number) {
  const std::lock_guard<std::mutex> lock(living().mutex);
  failures += number;
  for (Group* group : living().groups) group->tell_failures();
}

char* Group::slot(int member, uint64_t step) const {
  return segment_.data() + slots_at_ + (size_t(member) * 2 + step % 2) * size_t(slot_bytes_);
}

Header* Group::header(int member, uint64_t step) const {
  const size_t place = (size_t(member) * 2 + step % 2) * Header::bytes(size());
  return reinterpret_cast<Header*>(segment_.data() + headers_at_ + place);
}

std::atomic<int64_t> failures{0};  // declared in group.h
thread_local bool explaining = false;

Group::Lock Group::begin(const Call& call, const std::vector<int64_t>& sent,
                         const std::vector<int64_t>& due) {
  if (stager_ == std::this_thread::get_id()) {
    throw std::logic_error(call.text() +
                           " is called while the peers' tensors are open.\n  It would overwrite "
                           "them.\n  Call it after the `with` block of peers().");
  }
  if (in_call) {
    throw std::logic_error(call.text() +
                           " is called in the middle of another call, in which this rank waits for "
                           "others.\n  They do not make this one.\n  Call it after that one.");
  }
  Lock lock(mutex_);
  meeting_.check_whole();
  call_ = call;
  call_.failures = explaining ? kUnknown : failures.load();
  first_ = next_step();
  Header* mine = header(me(), first_);
  mine->call = call_;
  std::copy(sent.begin(), sent.end(), mine->sizes);
  std::copy(due.begin(), due.end(), mine->sizes + size());
  return lock;
}

void Group::wait() {
  meeting_.wait([this] { return call_.text(); },
                call_.failures == kUnknown ? INT64_MAX : call_.failures);
  if (meeting_.steps() == first_) check_headers();
}

std::optional<Group::Waiting> Group::waiting() const {
  std::optional<Waiting> found;
  // A member that sleeps in a call does not begin another one, so `call_` does not change while
  // with_sleeper() keeps the member asleep.
  meeting_.with_sleeper(
      [&](const Sleeper& sleeper) { found = {sleeper, call_.text(), meeting_.steps_of_all()}; });
  return found;
}

void Group::check_headers() {
  std::vector<const Header*> headers;
  for (int k = 0; k < size(); ++k) headers.push_back(header(k, first_));
  compare(headers, ranks());
}

// The most bytes that one member sends to another, from the headers of the call's first step, so it
// is the same on all members. Call it before this member arrives at the next step: once all have
// arrived there, another member may begin a call whose header overwrites these headers.
int64_t Group::longest_between() const {
  int64_t longest = 0;
  for (int from = 0; from < size(); ++from) {
    for (int to = 0; to < size(); ++to) {
      if (from != to) longest = std::max(longest, header(from, first_)->sizes[to]);
    }
  }
  return longest;
}

void Group::all_gather(const Call& call, const Chain& mine, const std::vector<Chain>& outs) {
  const Lock lock = begin(call, std::vector<int64_t>(size(), mine.bytes()), sizes_of(outs));
  int64_t count = 1;
  for (int64_t r = 0; r < count; ++r) {
    const uint64_t step = next_step();
    const int64_t begin = r * slot_bytes_, end = begin + slot_bytes_;
    pack(slot(me(), step), mine, begin, std::min(end, mine.bytes()));
    arrive();
    wait();  // without it the others' slots and headers are read before they are written
    if (r == 0) count = rounds(longest_between(), slot_bytes_);
    for (int k = 0; k < size(); ++k) {
      const int64_t stop = std::min(end, outs[k].bytes());
      unpack(outs[k], begin, stop, slot(k, step));
    }
  }
}

std::vector<std::string> Group::gather_objects(const std::string& mine) {
  Call call{Kind::objects};
  const int64_t bytes = int64_t(mine.size());
  const Lock lock =
      begin(call, std::vector<int64_t>(size(), bytes), std::vector<int64_t>(size(), kUnknown));
  std::vector<std::string> outs(size());
  int64_t count = 1;
  for (int64_t r = 0; r < count; ++r) {
    const uint64_t step = next_step();
    const int64_t begin = r * slot_bytes_, end = begin + slot_bytes_;
    pack(slot(me(), step), joined(mine.data(), bytes), begin, std::min(end, bytes));
    arrive();
    wait();  // as in all_gather; the headers now hold the sizes and the slots the bytes
    if (r == 0) {
      count = rounds(longest_between(), slot_bytes_);
      for (int k = 0; k < size(); ++k) outs[k].resize(header(k, first_)->sizes[me()]);
    }
    for (int k = 0; k < size(); ++k) {
      const int64_t all = int64_t(outs[k].size());
      unpack(joined(outs[k].data(), all), begin, std::min(end, all), slot(k, step));
    }
  }
  return outs;
}

void Group::all_to_all(const Call& call, const std::vector<Rows>& ins,
                       const std::vector<Rows>& outs) {
  const Lock lock = begin(call, sizes_of(ins), sizes_of(outs));
  int64_t count = 1;
  for (int64_t r = 0; r < count; ++r) {
    const uint64_t step = next_step();
    const int64_t begin = r * part_bytes(), end = begin + part_bytes();
    for (int k = 0; k < size(); ++k) {
      if (k == me()) continue;
      pack(slot(me(), step) + part(me(), k), ins[k], begin, std::min(end, ins[k].bytes()));
    }
    arrive();
    wait();  // without it the parts are read before the others have written them
    if (r == 0) {
      count = rounds(longest_between(), part_bytes());
      copy(outs[me()], ins[me()], 0, ins[me()].bytes());
    }
    for (int k = 0; k < size(); ++k) {
      if (k == me()) continue;
      unpack(outs[k], begin, std::min(end, outs[k].bytes()), slot(k, step) + part(k, me()));
    }
  }
}

void Group::broadcast(const Call& call, int source, const void* x, void* out, int64_t bytes) {
  std::vector<int64_t> sent(size(), 0), due(size(), 0);
  if (me() == source) sent.assign(size(), bytes);
  due[source] = bytes;
  const Lock lock = begin(call, sent, due);
  int64_t count = 1;
  for (int64_t r = 0; r < count; ++r) {
    const uint64_t step = next_step();
    const int64_t begin = r * slot_bytes_, end = std::min(begin + slot_bytes_, bytes);
    if (me() == source) pack(slot(source, step), joined(x, bytes), begin, end);
    arrive();
    wait();  // without it the source's slot is read before it is written
    if (r == 0) count = rounds(bytes, slot_bytes_);
    unpack(joined(out, bytes), begin, end, slot(source, step));
  }
}

void Group::check(const Call& call, const std::vector<int64_t>& sent,
                  const std::vector<int64_t>& due) {
  const Lock lock = begin(call, sent, due);
  arrive();
  wait();  // compares the headers, which are complete only after this meeting
}

void Group::refuse(uint64_t steps_before) {
  if (steps() != steps_before) {
    meeting_.give_up("rank " + std::to_string(ranks()[me()]) + " got no memory for " +
                     call_.text());
  }
  Call call{Kind::objects};
  call.lacks_memory = true;
  const std::vector<int64_t> none(size(), 0);
  check(call, none, none);
  throw std::logic_error("members that lack memory do not meet");
}

std::vector<void*> Group::stage(const Call& call, const void* x, int64_t bytes) {
  Lock lock = begin(call, std::vector<int64_t>(size(), bytes), std::vector<int64_t>(size(), bytes));
  const bool fits = bytes <= slot_bytes_;
  // A member has only one place in the bulk segment, not two. Other members may still read there
  // what the call before staged, until all members have arrived here.
  if (!fits) {
    arrive();
    wait();
  }
  const uint64_t step = next_step();
  std::vector<void*> places;
  for (int k = 0; k < size(); ++k) {
    places.push_back(fits ? slot(k, step) : bulk_->data() + k * bulk_bytes_);
  }
  if (bytes > 0) memcpy(places[me()], x, bytes);
  arrive();
  wait();  // without it the caller reads the others' places before they are written
  // Python code runs until unstage(), and it is not in the middle of this call. begin() refuses
  // calls of this thread by `stager_`.
  in_call = false;
  staged_ = std::move(lock);
  stager_ = std::this_thread::get_id();
  return places;
}

void Group::unstage() {
  stager_ = std::thread::id();
  staged_.unlock();
}

void Group::set_bulk(std::optional<Segment> segment, int64_t bytes) {
  bulk_ = std::move(segment);
  bulk_bytes_ = bytes;
}

void Group::unlink() {
  segment_.unlink();
  if (bulk_) bulk_->unlink();
}

}  // namespace consistent::peer
