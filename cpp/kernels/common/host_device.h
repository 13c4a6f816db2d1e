// One spelling for functions shared by CPU kernels, CUDA kernels and host code.
//
// Always inlined, also because the same header is compiled for several instruction sets: a function that never exists
// out of line cannot be picked up by the linker in its AVX-512 version for a machine without AVX-512.
#pragma once

#if defined(__CUDACC__)
#define FLASHSDK_HD __host__ __device__ __forceinline__
#else
#define FLASHSDK_HD inline __attribute__((always_inline))
#endif

namespace flashsdk {

FLASHSDK_HD constexpr int min_of(int a, int b) { return a < b ? a : b; }
FLASHSDK_HD constexpr int max_of(int a, int b) { return a > b ? a : b; }
FLASHSDK_HD constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
FLASHSDK_HD constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

}  // namespace flashsdk
