/* A disk that fails at its n-th call: preloaded before libc, for what is opened for writing,
   written, synced, made, renamed or removed below one folder.

   disk_fail_at(folder, n, error, ways): the n-th call from now on returns -1 and sets errno to
   `error`. With STAYS all calls after it fail as well, but for removals where space is missing.
   With SHORT a write first takes half of its bytes, and the call after it fails.
   disk_failed(): the name of the call that failed first; 0 if none has. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { STAYS = 1, SHORT = 2 };

static char folder[4096];
static long at, calls;
static int error, ways;
static const char* failed;

void disk_fail_at(const char* path, long n, int with, int how) {
  strncpy(folder, path, sizeof folder - 1);
  error = with, ways = how, failed = 0;
  __atomic_store_n(&calls, 0, __ATOMIC_SEQ_CST);
  __atomic_store_n(&at, n, __ATOMIC_SEQ_CST);
}
const char* disk_failed(void) { return failed; }

static int is_below(const char* path) {
  char full[8192];
  if (!folder[0] || !path) return 0;
  if (path[0] != '/' && getcwd(full, 4096)) {
    strcat(full, "/"), strncat(full, path, 4000);
    path = full;
  }
  return !strncmp(path, folder, strlen(folder));
}
static int is_open_below(int file) {
  char link[64], path[4096];
  if (!folder[0]) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return is_below(path);
}
/* 0: the call goes on; 1: it fails; 2: it is a write that is short. */
static int meets(const char* name, int is_write) {
  long k = __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST);
  long n = __atomic_load_n(&at, __ATOMIC_SEQ_CST);
  if (!n) return 0;
  int is_removal = !strncmp(name, "unlink", 6) || !strcmp(name, "rmdir");
  int is_full = error == ENOSPC || error == EDQUOT;
  int here = k == n || ((ways & STAYS) && k > n && !(is_full && is_removal));
  if ((ways & SHORT) && k == n && is_write) {
    failed = name;
    return 2;
  }
  if ((ways & SHORT) && k == n + 1) here = 1;
  if (!here) return 0;
  if (!failed) failed = name;
  errno = error;
  return 1;
}

#define REAL(name)               \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, #name)
#define CALL(name, below, args, ...)           \
  int name args {                              \
    REAL(name);                                \
    if ((below) && meets(#name, 0)) return -1; \
    return real(__VA_ARGS__);                  \
  }

#define OPENS(name)                                                                              \
  int name(const char* path, int flags, ...) {                                                   \
    REAL(name);                                                                                  \
    va_list rest;                                                                                \
    va_start(rest, flags);                                                                       \
    mode_t mode = va_arg(rest, mode_t);                                                          \
    va_end(rest);                                                                                \
    if ((flags & (O_WRONLY | O_RDWR | O_CREAT)) && is_below(path) && meets(#name, 0)) return -1; \
    return real(path, flags, mode);                                                              \
  }
OPENS(open)
OPENS(open64)
#define OPENS_AT(name)                                                                           \
  int name(int at_, const char* path, int flags, ...) {                                          \
    REAL(name);                                                                                  \
    va_list rest;                                                                                \
    va_start(rest, flags);                                                                       \
    mode_t mode = va_arg(rest, mode_t);                                                          \
    va_end(rest);                                                                                \
    if ((flags & (O_WRONLY | O_RDWR | O_CREAT)) && is_below(path) && meets(#name, 0)) return -1; \
    return real(at_, path, flags, mode);                                                         \
  }
OPENS_AT(openat)
OPENS_AT(openat64)
#define FOPENS(name)                                                   \
  FILE* name(const char* path, const char* mode) {                     \
    REAL(name);                                                        \
    if (mode[0] != 'r' && is_below(path) && meets(#name, 0)) return 0; \
    return real(path, mode);                                           \
  }
FOPENS(fopen)
FOPENS(fopen64)
CALL(fsync, is_open_below(file), (int file), file)
CALL(fdatasync, is_open_below(file), (int file), file)
CALL(rename, is_below(from), (const char* from, const char* to), from, to)
CALL(mkdir, is_below(path), (const char* path, mode_t mode), path, mode)
CALL(unlink, is_below(path), (const char* path), path)
CALL(rmdir, is_below(path), (const char* path), path)
CALL(unlinkat, is_open_below(at_) || is_below(path), (int at_, const char* path, int flags), at_,
     path, flags)

#define WRITES(name, args, file, n, shorter, ...) \
  ssize_t name args {                             \
    REAL(name);                                   \
    if (is_open_below(file)) {                    \
      int how = meets(#name, (n) > 1);            \
      if (how == 1) return -1;                    \
      if (how == 2) return shorter;               \
    }                                             \
    return real(__VA_ARGS__);                     \
  }
WRITES(write, (int file, const void* data, size_t n), file, n, real(file, data, n / 2), file, data,
       n)
WRITES(pwrite64, (int file, const void* data, size_t n, off64_t from), file, n,
       real(file, data, n / 2, from), file, data, n, from)
WRITES(writev, (int file, const struct iovec* parts, int n), file, n, real(file, parts, n / 2),
       file, parts, n)
