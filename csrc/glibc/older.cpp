// What newer releases of glibc have in another version than 2.28, which torch's wheels run with: a
// module that is built beside a newer one would ask for it. Each name is defined here, for the
// module alone, by what older releases have too.

#include <features.h>
#ifdef __GLIBC_PREREQ

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CONSISTENT_HIDDEN __attribute__((visibility("hidden")))

extern "C" {

#if __GLIBC_PREREQ(2, 29) && defined(__x86_64__)
// The old name sets errno through another function and computes the same.
double exp_of_2_2_5(double x);
__asm__(".symver exp_of_2_2_5, exp@GLIBC_2.2.5");
CONSISTENT_HIDDEN double exp_here(double x) __asm__("exp");
double exp_here(double x) { return exp_of_2_2_5(x); }
#endif

#if __GLIBC_PREREQ(2, 32)
// libstdc++ counts references without atomics while this is not 0; torch has threads.
CONSISTENT_HIDDEN char __libc_single_threaded = 0;
#endif

#if __GLIBC_PREREQ(2, 33) && defined(SYS_newfstatat)
CONSISTENT_HIDDEN int fstatat(int folder, const char* path, struct stat* found, int flags) {
  return int(syscall(SYS_newfstatat, folder, path, found, flags));
}
CONSISTENT_HIDDEN int stat(const char* path, struct stat* found) {
  return fstatat(AT_FDCWD, path, found, 0);
}
CONSISTENT_HIDDEN int fstat(int file, struct stat* found) {
  return fstatat(file, "", found, AT_EMPTY_PATH);
}
#endif

}  // extern "C"
#endif
