// g++ -std=c++17 -Og -pthread csrc/tests/killed_test.cpp csrc/peer/meeting.cpp
//   csrc/peer/segment.cpp -o killed_test && ./killed_test
//
// Kills a process after each single instruction of Meeting::arrive(), as SIGKILL may. The other
// member must find at once that all have arrived, or that a member has ended.

#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "../peer/meeting.h"

using namespace consistent::peer;

namespace {

constexpr double kTimeout_s = 5;
constexpr int kMost = 2000;  // instructions; there are about 200

void check(bool fact, const std::string& what) {
  if (fact) return;
  fprintf(stderr, "FAILED: %s\n", what.c_str());
  abort();
}

char* shared_memory() {
  void* found =
      mmap(nullptr, Meeting::bytes(2), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  check(found != MAP_FAILED, "shared memory");
  return static_cast<char*>(found);
}

// A child that stops, arrives, and stops again.
pid_t last_to_arrive(char* memory) {
  const pid_t child = fork();
  check(child >= 0, "fork");
  if (child != 0) return child;
  Meeting meeting(memory, 1, {10, 11}, kTimeout_s, {});
  if (ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) _exit(2);
  raise(SIGSTOP);
  meeting.arrive();
  raise(SIGSTOP);
  _exit(0);
}

// The signal by which the child stops next.
int stopped(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  check(WIFSTOPPED(status), "a process that may be traced");
  return WSTOPSIG(status);
}

// Lets the child make so many instructions, and kills it. Returns whether it has come to its end.
bool killed_after(int instructions, pid_t child) {
  check(stopped(child) == SIGSTOP, "before arrive()");
  bool through = false;
  for (int k = 0; k < instructions && !through; ++k) {
    check(ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr) == 0, "one instruction");
    through = stopped(child) == SIGSTOP;
  }
  kill(child, SIGKILL);
  int status = 0;
  waitpid(child, &status, 0);
  return through;
}

// How the wait of the first member ended: "met", or the words of Broken.
std::string outcome(Meeting& meeting) {
  try {
    meeting.wait([] { return "a test"; });
    return "met";
  } catch (const Broken& error) {
    return error.what();
  }
}

}  // namespace

int main() {
  std::vector<std::string> found;
  found.reserve(kMost);  // the threads below refer to its elements
  std::vector<std::thread> waiting;
  bool through = false;
  while (!through && int(found.size()) < kMost) {
    char* const memory = shared_memory();
    found.emplace_back();
    std::string& said = found.back();
    waiting.emplace_back([memory, &said] {
      Meeting meeting(memory, 0, {10, 11}, kTimeout_s, {});
      meeting.arrive();
      said = outcome(meeting);
    });
    usleep(3000);  // by now it sleeps
    through = killed_after(int(found.size()) - 1, last_to_arrive(memory));
  }
  for (std::thread& each : waiting) each.join();
  check(through, "arrive() has an end");
  int met = 0;
  for (size_t k = 0; k < found.size(); ++k) {
    const bool ended = found[k].find("has ended while rank 10 waits") != std::string::npos;
    check(ended || found[k] == "met", "after " + std::to_string(k) + " instructions: " + found[k]);
    met += found[k] == "met";
  }
  check(met > 0 && met < int(found.size()) && found.back() == "met", "both outcomes");
  printf("nobody waits for a process that was killed\n");
}
