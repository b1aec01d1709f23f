#include "segment.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <random>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace consistent::peer {
namespace {

const char kFolder[] = "/dev/shm";
const char kPrefix[] = "consistent";

[[noreturn]] void fail(const std::string& what, int error = errno) {
  throw std::system_error(error, std::generic_category(), what);
}

unsigned long long inode(const char* path) {
  struct stat found;
  return stat(path, &found) == 0 ? found.st_ino : 0;
}

// consistent-<PID namespace>-<pid>-<start>-<random>. From the first three, abandoned() tells
// whether the creator still runs.
std::string fresh_name() {
  std::random_device random;
  char name[160];
  snprintf(name, sizeof name, "/%s-%llu-%ld-%llu-%08x%08x", kPrefix, inode("/proc/self/ns/pid"),
           long(getpid()), started(getpid()), random(), random());
  return name;
}

// The text of a small file without the end of its last line; empty if there is none. No C++ stream
// reads it: other libraries of the process may export a libstdc++ of their own, whose locales do
// not fit the streams here.
std::string text_of(const char* path) {
  char text[4096];
  FILE* file = fopen(path, "re");
  if (file == nullptr) return "";
  const size_t size = fread(text, 1, sizeof text, file);
  fclose(file);
  return {text, size > 0 && text[size - 1] == '\n' ? size - 1 : size};
}

bool abandoned(const char* name) {
  unsigned long long space, start;
  long pid;
  const std::string pattern = std::string(kPrefix) + "-%llu-%ld-%llu-";
  if (sscanf(name, pattern.c_str(), &space, &pid, &start) != 3) return false;
  return space == inode("/proc/self/ns/pid") && started(pid) != start;
}

// The path that shm_open would open. shm_open is not called, since it is in librt on older systems.
std::string path_of(const std::string& name) { return kFolder + name; }

bool belongs_to_us(const struct stat& found) { return found.st_uid == geteuid(); }

}  // namespace

std::string host_identity() {
  struct stat shm = {};
  stat(kFolder, &shm);
  char text[256];
  snprintf(text, sizeof text, "%s %u %llu %llu %llu",
           text_of("/proc/sys/kernel/random/boot_id").c_str(), geteuid(),
           static_cast<unsigned long long>(shm.st_dev), inode("/proc/self/ns/pid"),
           inode("/proc/self/ns/net"));
  return text;
}

unsigned long long started(long pid) {
  const std::string text = text_of(("/proc/" + std::to_string(pid) + "/stat").c_str());
  // Field 2, the program's name in parentheses, may contain anything, so fields are counted from
  // the last parenthesis: field 3 is the state, field 22 the start time.
  const size_t end = text.rfind(')');
  if (end == std::string::npos) return 0;
  char state = 0;
  unsigned long long start = 0;
  const char* fields = text.c_str() + end + 1;
  const int found = sscanf(fields,
                           " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s "
                           "%*s %*s %llu",
                           &state, &start);
  return found == 2 && state != 'Z' && state != 'X' ? start : 0;
}

void remove_abandoned() {
  DIR* folder = opendir(kFolder);
  if (folder == nullptr) return;
  while (const dirent* entry = readdir(folder)) {
    struct stat found;
    if (!abandoned(entry->d_name)) continue;
    if (fstatat(dirfd(folder), entry->d_name, &found, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (belongs_to_us(found)) unlinkat(dirfd(folder), entry->d_name, 0);
  }
  closedir(folder);
}

Segment Segment::create(size_t bytes) {
  Segment made;
  made.name_ = fresh_name();
  const int file = open(path_of(made.name_).c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) fail("creating the shared memory " + made.name_);
  made.named_by_ = getpid();
  // Not ftruncate: if /dev/shm is full, it succeeds, and the first access to a page that cannot be
  // allocated ends the process with SIGBUS.
  const int error = posix_fallocate(file, 0, off_t(bytes));
  void* data =
      error ? MAP_FAILED : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  const int failed = error ? error : errno;
  close(file);
  if (data == MAP_FAILED) fail("reserving " + std::to_string(bytes) + " shared bytes", failed);
  made.data_ = static_cast<char*>(data);
  made.bytes_ = bytes;
  return made;
}

Segment Segment::attach(const std::string& name, size_t bytes) {
  Segment made;
  made.name_ = name;
  const int file = open(path_of(name).c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC);
  if (file < 0) fail("opening the shared memory " + name);
  struct stat found;
  const bool known = fstat(file, &found) == 0;
  const bool ours = known && belongs_to_us(found), whole = known && size_t(found.st_size) >= bytes;
  void* data = MAP_FAILED;
  if (ours && whole) data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  const int error = errno;  // of mmap: close() may change errno
  close(file);
  if (!ours) throw std::runtime_error("the shared memory " + name + " is another user's");
  if (!whole) throw std::runtime_error("the shared memory " + name + " is too short");
  if (data == MAP_FAILED) fail("mapping the shared memory " + name, error);
  made.data_ = static_cast<char*>(data);
  made.bytes_ = bytes;
  return made;
}

Segment::Segment(Segment&& other) noexcept { *this = std::move(other); }

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(name_, other.name_);
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(named_by_, other.named_by_);
  return *this;
}

Segment::~Segment() {
  if (data_ != nullptr) munmap(data_, bytes_);
  unlink();
}

void Segment::unlink() {
  if (named_by_ == getpid()) ::unlink(path_of(name_).c_str());
  named_by_ = 0;
}

}  // namespace consistent::peer
