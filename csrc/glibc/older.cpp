// Functions that newer releases of glibc and libstdc++ export under a newer symbol version than
// glibc 2.28 and GCC 8, with which torch's wheels run. A module built with newer releases would
// require the newer versions, or take the functions from those of torch's libraries that happen to
// export them. So each name is defined here, hidden in the module, in terms of functions that the
// older releases have too.

#include <features.h>
#ifdef __GLIBC_PREREQ

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ios>
#include <new>
#include <sstream>
#include <string>

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

// If libstdc++ is linked statically, the functions below are in its archive, whose symbols have no
// versions.
#ifndef CONSISTENT_STATIC_LIBSTDCXX
#if defined(_GLIBCXX_RELEASE) && _GLIBCXX_RELEASE >= 9
// std::ostringstream(), which is std::ostringstream(std::ios_base::out).
#define CONSISTENT_STREAM "_ZNSt7__cxx1119basic_ostringstreamIcSt11char_traitsIcESaIcEEC1E"
void stream_of_3_4_21(void* stream, std::ios_base::openmode mode);
__asm__(".symver stream_of_3_4_21, " CONSISTENT_STREAM "St13_Ios_Openmode@GLIBCXX_3.4.21");
CONSISTENT_HIDDEN void stream_here(void* stream) __asm__(CONSISTENT_STREAM "v");
void stream_here(void* stream) { stream_of_3_4_21(stream, std::ios_base::out); }
#endif

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

#if !defined(CONSISTENT_STATIC_LIBSTDCXX) && defined(_GLIBCXX_RELEASE) && _GLIBCXX_RELEASE >= 11
// std::stringbuf::str() const &, as C++20 has it, is str() const of older releases; str() && leaves
// the buffer empty besides.
#define CONSISTENT_BUFFER "St7__cxx1115basic_stringbufIcSt11char_traitsIcESaIcEE3strEv"
extern "C" std::string text_of_3_4_21(const void* buffer);
__asm__(".symver text_of_3_4_21, _ZNK" CONSISTENT_BUFFER "@GLIBCXX_3.4.21");
CONSISTENT_HIDDEN std::string text_here(const void* buffer) __asm__("_ZNKR" CONSISTENT_BUFFER);
std::string text_here(const void* buffer) { return text_of_3_4_21(buffer); }
CONSISTENT_HIDDEN std::string taken_here(std::stringbuf* buffer) __asm__("_ZNO" CONSISTENT_BUFFER);
std::string taken_here(std::stringbuf* buffer) {
  std::string text = text_of_3_4_21(buffer);
  const std::string nothing;  // an lvalue: C++20 has a newer str(std::string&&)
  buffer->str(nothing);
  return text;
}
#endif
#endif
