// Marks plain loops that the compiler vectorizes, once for each generation of x86.

#pragma once

#if defined(CONSISTENT_CLONES)  // empty in a build for one generation or with a sanitizer
#elif defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define CONSISTENT_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), noinline))
#else
#define CONSISTENT_CLONES __attribute__((noinline))
#endif
