// g++ -std=c++17 -O1 -g -DCONSISTENT_CLONES= -fsanitize=address,undefined
//   csrc/tests/peer_test.cpp csrc/peer/*.cpp -o peer_test && ./peer_test processes
// (or -fsanitize=thread and ./peer_test threads)
//
// Tests every move of csrc/peer between processes or threads, at sizes near that of a slot.

#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "../peer/group.h"

using namespace consistent::peer;

namespace {

constexpr int64_t kSlot = 1536;  // bytes: small, so that most messages take several rounds

void check(bool fact, const char* what) {
  if (fact) return;
  fprintf(stderr, "FAILED: %s\n", what);
  abort();
}

std::vector<int64_t> all(int n, int64_t size) { return std::vector<int64_t>(n, size); }

// The numbers that rank r holds. Their sums are exact.
double value(int rank, int64_t index) { return double((index * 7 + rank * 13) % 64) - 20; }

template <typename T>
std::vector<T> filled(int rank, int64_t count) {
  std::vector<T> x(count);
  for (int64_t i = 0; i < count; ++i) x[i] = T(value(rank, i));
  return x;
}

int64_t sum_of(const std::vector<int64_t>& sizes) {
  int64_t total = 0;
  for (const int64_t size : sizes) total += size;
  return total;
}

std::vector<Rows> cuts(void* base, int64_t outer, const std::vector<int64_t>& sizes,
                       int64_t inner_bytes) {
  std::vector<Rows> made;
  int64_t start = 0;
  for (const int64_t size : sizes) {
    made.push_back(cut(base, outer, sum_of(sizes), inner_bytes, start, size));
    start += size;
  }
  return made;
}

template <typename T>
void test_all_reduce(Group& g, Type type, int64_t count, Op op, int64_t one_shot, bool in_place) {
  g.set_one_shot(one_shot, one_shot);
  const int n = g.size();
  std::vector<T> x = filled<T>(g.me(), count), other(count);
  T* out = in_place ? x.data() : other.data();
  g.all_reduce({Kind::all_reduce, int(op)}, x.data(), out, count, type, op);
  for (int64_t i = 0; i < count; ++i) {
    double wanted = value(0, i);
    for (int k = 1; k < n; ++k) {
      const double v = value(k, i);
      wanted = op == Op::sum   ? wanted + v
               : op == Op::max ? std::max(wanted, v)
                               : std::min(wanted, v);
    }
    check(out[i] == T(wanted), "all_reduce");
  }
}

void test_reduce_scatter(Group& g, int64_t outer, const std::vector<int64_t>& sizes,
                         int64_t inner) {
  const int64_t dim = sum_of(sizes);
  std::vector<float> x = filled<float>(g.me(), outer * dim * inner);
  const int64_t own = sizes[g.me()];
  std::vector<float> out(outer * own * inner);
  g.reduce_scatter({Kind::reduce_scatter, 0}, chains(cuts(x.data(), outer, sizes, inner * 4)),
                   {out.data()}, Type::float32, Op::sum);
  int64_t before = 0;
  for (int k = 0; k < g.me(); ++k) before += sizes[k];
  for (int64_t i = 0; i < int64_t(out.size()); ++i) {
    const int64_t o = i / (own * inner), rest = i % (own * inner);
    float wanted = 0;
    for (int k = 0; k < g.size(); ++k) {
      wanted += float(value(k, o * dim * inner + before * inner + rest));
    }
    check(out[i] == wanted, "reduce_scatter");
  }
}

void test_all_gather(Group& g, int64_t outer, const std::vector<int64_t>& sizes, int64_t inner) {
  const int64_t dim = sum_of(sizes);
  std::vector<int16_t> x = filled<int16_t>(g.me(), outer * sizes[g.me()] * inner);
  std::vector<int16_t> out(outer * dim * inner);
  g.all_gather({Kind::all_gather}, joined(x.data(), int64_t(x.size()) * 2),
               chains(cuts(out.data(), outer, sizes, inner * 2)));
  int64_t before = 0;
  for (int k = 0; k < g.size(); before += sizes[k++]) {
    for (int64_t i = 0; i < outer * sizes[k] * inner; ++i) {
      const int64_t o = i / (sizes[k] * inner), rest = i % (sizes[k] * inner);
      check(out[o * dim * inner + before * inner + rest] == int16_t(value(k, i)), "all_gather");
    }
  }
}

// x is (a, b); ranks hold parts of b and need parts of a.
void test_all_to_all(Group& g, const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  const int64_t mine_a = a[g.me()], mine_b = b[g.me()], all_b = sum_of(b);
  int64_t before_a = 0, before_b = 0;
  for (int k = 0; k < g.me(); ++k) before_a += a[k], before_b += b[k];
  const auto whole = [&](int64_t i, int64_t j) { return int32_t(i * all_b + j); };
  std::vector<int32_t> x, out(mine_a * all_b);
  for (int64_t i = 0; i < sum_of(a); ++i) {
    for (int64_t j = 0; j < mine_b; ++j) x.push_back(whole(i, before_b + j));
  }
  g.all_to_all({Kind::all_to_all}, cuts(x.data(), 1, a, mine_b * 4),
               cuts(out.data(), mine_a, b, 4));
  for (int64_t i = 0; i < mine_a; ++i) {
    for (int64_t j = 0; j < all_b; ++j) {
      check(out[i * all_b + j] == whole(before_a + i, j), "all_to_all");
    }
  }
}

void test_broadcast(Group& g, int64_t count) {
  for (int source = 0; source < g.size(); ++source) {
    const std::vector<char> x(count, char(g.me()));
    std::vector<char> out(count);
    const char* given = g.me() == source ? x.data() : nullptr;
    g.broadcast({Kind::broadcast, -1, source}, source, given, out.data(), count);
    for (const char each : out) check(each == char(source), "broadcast");
  }
}

void test_objects(Group& g, int64_t longest) {
  const std::string mine(size_t(longest) * g.me(), char('a' + g.me()));
  const std::vector<std::string> got = g.gather_objects(mine);
  for (int k = 0; k < g.size(); ++k) {
    check(got[k] == std::string(size_t(longest) * k, char('a' + k)), "gather_objects");
  }
}

void test_peers(Group& g, int64_t count) {
  const std::vector<float> x = filled<float>(g.me(), count);
  const std::vector<void*> places = g.stage({Kind::peers}, x.data(), count * 4);
  for (int k = 0; k < g.size(); ++k) {
    const float* there = static_cast<const float*>(places[k]);
    for (int64_t i = 0; i < count; ++i) check(there[i] == float(value(k, i)), "peers");
  }
  g.unstage();
}

// All members find a mismatch and throw the same message, and the next call works.
void test_faults(Group& g) {
  float x[8] = {}, out[8];
  Call call{g.me() == 1 ? Kind::all_gather : Kind::all_reduce, g.me() == 1 ? -1 : 0};
  std::string said;
  try {
    if (g.me() == 1) {
      g.all_gather(call, joined(x, 8), std::vector<Chain>(g.size(), joined(out, 8)));
    } else {
      g.all_reduce(call, x, out, 8, Type::float32, Op::sum);
    }
  } catch (const std::runtime_error& error) {
    said = error.what();
  }
  check(said.find("rank 10 calls all_reduce(sum) while rank 11 calls all_gather") == 0, "calls");
  said.clear();
  try {
    std::vector<Chain> outs(g.size(), joined(out, 8));
    g.all_gather({Kind::all_gather}, joined(x, g.me() == 0 ? 12 : 8), outs);
  } catch (const std::runtime_error& error) {
    said = error.what();
  }
  check(said.find("rank 10 sends 12 bytes to rank 10") == 0, "sizes");
  test_all_reduce<float>(g, Type::float32, 8, Op::sum, 1024, false);
}

// Two-byte floats are added in float32 and rounded once.
void test_short_floats(Group& g) {
  const uint16_t halves[] = {0x3C00, 0x0001, 0x7BFF, 0x7C00, 0x8001, 0x83FF, 0x0400, 0xFBFF};
  uint16_t out[8];
  g.all_reduce({Kind::all_reduce, 1}, halves, out, 8, Type::float16, Op::max);
  check(memcmp(out, halves, sizeof out) == 0, "float16 there and back");
  const uint16_t brains[] = {0x3F80, 0x0001, 0x7F7F, 0x7F80, 0x8001, 0xFF80, 0x0080, 0x8000};
  g.all_reduce({Kind::all_reduce, 1}, brains, out, 8, Type::bfloat16, Op::max);
  check(memcmp(out, brains, sizeof out) == 0, "bfloat16 there and back");
  // In bfloat16 256 + 1 is a tie, which rounds to the even 256, and 256 + 3 one that rounds to 260.
  // Adding up in bfloat16 would lose every 1.
  const uint16_t one_more = g.me() == 0 ? 0x4380 : 0x3F80;
  uint16_t sum;
  g.all_reduce({Kind::all_reduce, 0}, &one_more, &sum, 1, Type::bfloat16, Op::sum);
  check(g.size() != 2 || sum == 0x4380, "bfloat16 sum of two");
  check(g.size() != 4 || sum == 0x4382, "bfloat16 sum of four");
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = HUGE_VALF;
  const float x[3] = {g.me() == 1 ? nan : 1, g.me() == 0 ? inf : 1, g.me() == 1 ? -inf : 1};
  for (const Op op : {Op::sum, Op::max, Op::min}) {
    float got[3];
    g.all_reduce({Kind::all_reduce, int(op)}, x, got, 3, Type::float32, op);
    check(std::isnan(got[0]), "NaN");
    check(got[1] == (op == Op::min ? 1 : inf), "infinity");
    check(got[2] == (op == Op::max ? 1 : -inf), "minus infinity");
  }
}

void test_every_move(Group& g) {
  const int n = g.size();
  for (const int64_t count : {0, 1, 7, 383, 384, 385, 1000, 5001}) {
    for (const int64_t one_shot : {0, 1 << 20}) {
      for (const Op op : {Op::sum, Op::max, Op::min}) {
        test_all_reduce<float>(g, Type::float32, count, op, one_shot, count % 2);
        test_all_reduce<int64_t>(g, Type::int64, count, op, one_shot, false);
        test_all_reduce<int8_t>(g, Type::int8, count, op, one_shot, true);
      }
      test_all_reduce<double>(g, Type::float64, count, Op::sum, one_shot, true);
    }
    test_broadcast(g, count);
    test_objects(g, count);
  }
  for (const int64_t scale : {0, 1, 5, 70}) {
    std::vector<int64_t> uneven, one_only(n, 0);
    for (int k = 0; k < n; ++k) uneven.push_back(scale * k);
    one_only[n - 1] = scale * 3;
    for (const auto& sizes : {uneven, one_only, all(n, scale)}) {
      for (const int64_t inner : {1, 3}) {
        for (const int64_t outer : {1, 4}) {
          test_reduce_scatter(g, outer, sizes, inner);
          test_all_gather(g, outer, sizes, inner);
        }
      }
      test_all_to_all(g, sizes, uneven);
      test_all_to_all(g, uneven, all(n, 3));
    }
  }
  test_peers(g, 0);
  test_peers(g, 384);
  test_short_floats(g);
  test_faults(g);
}

std::string said_by(Group& g) {
  float x = 1, out = 0;
  try {
    g.all_reduce({Kind::all_reduce, 0}, &x, &out, 1, Type::float32, Op::sum);
  } catch (const Broken& error) {
    return error.what();
  }
  return "";
}

// After one member gives up, the group is broken on all members for good. The last member calls
// only after the others have given up, and then the others call again.
void give_up(int me, int n, Segment segment, Segment) {
  std::vector<int> ranks(n);
  for (int k = 0; k < n; ++k) ranks[k] = 10 + k;
  Callbacks callbacks;
  callbacks.give_up = [](const std::string& why) { return why + ": all stop"; };
  Group group(std::move(segment), me, ranks, kSlot, me == 0 ? 0.2 : 60, callbacks);
  check(!group.waiting(), "nobody waits");
  const bool last = me == n - 1;
  if (last) usleep(600 * 1000);
  const std::string said = said_by(group);
  check(said.find("rank 10 has waited 0.2 s for rank ") == 0, "who gave up");
  check(said.find(": all stop") == said.size() - 10, "the words of the callback");
  check(said_by(group) == said && callbacks.alarm->words() == said, "it stays broken");
  check(!group.waiting(), "nobody waits any more");
}

// A waiting member throws the message of its alarm, which another thread sets off.
void alarmed(int me, int n, Segment segment, Segment) {
  Callbacks callbacks;
  Group group(std::move(segment), me, std::vector<int>(n, me), kSlot, 60, callbacks);
  const auto elsewhere = [&] {
    std::optional<Group::Waiting> waiting;
    while (!waiting) waiting = group.waiting();
    check(waiting->call == "all_reduce(sum)" && waiting->sleeper.seconds < 60, "who waits");
    callbacks.alarm->set_off("rank 7 gave up");
    callbacks.alarm->set_off("rank 8 gave up");
  };
  if (me == n - 1) {  // never comes
    callbacks.alarm->set_off("rank 7 gave up");
  } else {
    std::thread thread(elsewhere);
    check(said_by(group) == "rank 7 gave up", "the first words");
    thread.join();
  }
  check(said_by(group) == "rank 7 gave up", "in the next call");
}

void every_move(int me, int n, Segment segment, Segment bulk) {
  std::vector<int> ranks;
  for (int k = 0; k < n; ++k) ranks.push_back(10 + k);
  Group group(std::move(segment), me, ranks, kSlot, 60);
  group.set_bulk(std::move(bulk), 4096);
  // A member may be waited for only once it has joined: the first meeting comes after all have.
  test_every_move(group);
  test_peers(group, 1000);
  test_peers(group, 1024);
}

using Body = void (*)(int me, int n, Segment segment, Segment bulk);

void with_threads(int n, Body body) {
  Segment first = Segment::create(Group::segment_bytes(n, kSlot)), bulk = Segment::create(4096 * n);
  std::vector<Segment> segments, bulks;
  for (int k = 0; k < n; ++k) {
    segments.push_back(Segment::attach(first.name(), first.bytes()));
    bulks.push_back(Segment::attach(bulk.name(), bulk.bytes()));
  }
  std::vector<std::thread> threads;
  for (int k = 0; k < n; ++k) {
    threads.emplace_back(body, k, n, std::move(segments[k]), std::move(bulks[k]));
  }
  for (std::thread& thread : threads) thread.join();
}

void with_processes(int n, Body body) {
  Segment first = Segment::create(Group::segment_bytes(n, kSlot)), bulk = Segment::create(4096 * n);
  std::vector<pid_t> children;
  for (int k = 0; k < n; ++k) {
    children.push_back(fork());
    if (children.back() != 0) continue;
    body(k, n, Segment::attach(first.name(), first.bytes()),
         Segment::attach(bulk.name(), bulk.bytes()));
    _exit(0);
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    check(status == 0, "a process failed");
  }
}

}  // namespace

int main(int count, char** arguments) {
  const bool threads = count > 1 && strcmp(arguments[1], "threads") == 0;
  for (const int n : {2, 3, 4, 5}) {
    for (const Body body : {every_move, give_up, alarmed}) {
      threads ? with_threads(n, body) : with_processes(n, body);
    }
  }
  printf("every move is right\n");
}
