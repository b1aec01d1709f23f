// What newer releases of glibc and libstdc++ have in another version than glibc 2.28 and GCC 8,
// which torch's wheels run with: a module that is built beside newer ones would ask for it. Each
// name is defined here, for the module alone, by what older releases have too.

#include <features.h>
#ifdef __GLIBC_PREREQ

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <new>

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
// On Linux both set the mask of the calling thread.
CONSISTENT_HIDDEN int pthread_sigmask(int how, const sigset_t* set, sigset_t* before) noexcept {
  return sigprocmask(how, set, before) == 0 ? 0 : errno;
}
#endif

#if __GLIBC_PREREQ(2, 33) && defined(SYS_newfstatat)
CONSISTENT_HIDDEN int fstatat(int folder, const char* path, struct stat* found,
                              int flags) noexcept {
  return int(syscall(SYS_newfstatat, folder, path, found, flags));
}
CONSISTENT_HIDDEN int stat(const char* path, struct stat* found) noexcept {
  return fstatat(AT_FDCWD, path, found, 0);
}
CONSISTENT_HIDDEN int fstat(int file, struct stat* found) noexcept {
  return fstatat(file, "", found, AT_EMPTY_PATH);
}
#endif

// A compiler that brings libstdc++ as an archive has its own of these two, and no versions of
// names.
#ifndef CONSISTENT_STATIC_LIBSTDCXX
#if defined(_GLIBCXX_RELEASE) && _GLIBCXX_RELEASE >= 11
CONSISTENT_HIDDEN void bad_length_here() __asm__("_ZSt28__throw_bad_array_new_lengthv");
void bad_length_here() { throw std::bad_array_new_length(); }
#endif

#if defined(_GLIBCXX_RELEASE) && _GLIBCXX_RELEASE >= 12
// std::condition_variable::wait, which has moved into a newer version as it is.
#define CONSISTENT_WAIT "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE"
void wait_of_3_4_11(void* condition, void* lock);
__asm__(".symver wait_of_3_4_11, " CONSISTENT_WAIT "@GLIBCXX_3.4.11");
CONSISTENT_HIDDEN void wait_here(void* condition, void* lock) __asm__(CONSISTENT_WAIT);
void wait_here(void* condition, void* lock) { wait_of_3_4_11(condition, lock); }
#endif
#endif

}  // extern "C"
#endif
