// Functions that newer releases of glibc and libstdc++ export under a newer symbol version than
// glibc 2.28 and GCC 8, with which torch's wheels run. A module built with newer releases would
// require the newer versions. So each name is defined here, hidden in the module, in terms of
// functions that the older releases have too.

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
// exp@GLIBC_2.2.5 computes the same values as exp@GLIBC_2.29 and differs only in how it sets errno.
double exp_of_2_2_5(double x);
__asm__(".symver exp_of_2_2_5, exp@GLIBC_2.2.5");
CONSISTENT_HIDDEN double exp_here(double x) __asm__("exp");
double exp_here(double x) { return exp_of_2_2_5(x); }
#endif

#if __GLIBC_PREREQ(2, 32)
// While this is not 0, libstdc++ counts the references of shared_ptr without atomics. torch has
// threads, so it is 0 from the start.
CONSISTENT_HIDDEN char __libc_single_threaded = 0;
// On Linux, sigprocmask too sets the mask of the calling thread only.
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

// If libstdc++ is linked statically, the two functions below are in its archive, whose symbols have
// no versions.
#ifndef CONSISTENT_STATIC_LIBSTDCXX
#if defined(_GLIBCXX_RELEASE) && _GLIBCXX_RELEASE >= 11
CONSISTENT_HIDDEN void bad_length_here() __asm__("_ZSt28__throw_bad_array_new_lengthv");
void bad_length_here() { throw std::bad_array_new_length(); }
#endif

#if defined(_GLIBCXX_RELEASE) && _GLIBCXX_RELEASE >= 12
// std::condition_variable::wait, which got a newer symbol version without a change of its code.
#define CONSISTENT_WAIT "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE"
void wait_of_3_4_11(void* condition, void* lock);
__asm__(".symver wait_of_3_4_11, " CONSISTENT_WAIT "@GLIBCXX_3.4.11");
CONSISTENT_HIDDEN void wait_here(void* condition, void* lock) __asm__(CONSISTENT_WAIT);
void wait_here(void* condition, void* lock) { wait_of_3_4_11(condition, lock); }
#endif
#endif

}  // extern "C"
#endif
