// CONSISTENT_CLONES marks functions of plain loops that the compiler vectorizes once for each
// generation of x86; an ifunc picks the version when the library is loaded.

#pragma once

#if defined(CONSISTENT_CLONES)  // defined as empty for a sanitizer, or to build one generation
#elif defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define CONSISTENT_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), noinline))
#else
#define CONSISTENT_CLONES __attribute__((noinline))
#endif
