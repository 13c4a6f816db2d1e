// One vector type per instruction set, under one set of names, in the namespace of that instruction set.
//
// The build compiles every kernel source once per instruction set with FLASHSDK_ISA_NS set to its name. All that is
// compiled so lives in flashsdk::cpu::FLASHSDK_ISA_NS, so that no two versions can be confused by the linker.
//
// Each simd_*.h gives: Vec, IVec, kLanes, kVecs (vectors per micro-kernel row) and
//   zero set1 load store add sub mul div max fma fms      fp32 arithmetic; load and store take any address
//   load_as_float(T*) store_as(T*, Vec)                   conversion from and to float, Bf16, Fp16; from Fp8
//   floor_parts scale_by_power_of_two                     the two ends of exp2
//   load_int mask_keys                                    lo <= j < hi per lane, -inf elsewhere
//   transpose(src, src_stride, dst, dst_stride)           kLanes x kLanes block of 32-bit words
//   sum_of_each(Vec[kLanes])                              over the lanes of each
//   min_all max_all (IVec)
#pragma once

#include <cmath>
#include <cstdint>

#include "cpu/dtype.h"

#ifndef FLASHSDK_ISA_NS
#error "FLASHSDK_ISA_NS must name the namespace of the instruction set this file is compiled for"
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "cpu/simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "cpu/simd_avx2.h"
#elif defined(__aarch64__) && !defined(FLASHSDK_PORTABLE_SIMD)  // where every processor has NEON
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define FLASHSDK_NEON_BF16
#endif
#include "cpu/simd_neon.h"
#else
#include "cpu/simd_portable.h"
#endif

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

// 2^t, t <= 8 in practice. Cody-Waite: 2^t = 2^floor(t)·2^f, f in [0, 1), the second by a minimax polynomial
// of those that are 1 at 0: 2^0 is exact, so that rescaling by it any number of times changes nothing.
// Largest relative error 8.3e-8 (degree 5), 2.9e-6 (4), 8.6e-5 (3, for a result that is rounded to bf16).
template <int kDegree>
FLASHSDK_HD Vec exp2(Vec t) {
  static_assert(kDegree >= 3 && kDegree <= 5);
  FloorParts parts = floor_parts(t);
  Vec f = parts.fraction, p;
  if constexpr (kDegree == 5) {
    p = fma(set1(1.86713017e-3f), f, set1(9.01702978e-3f));
    p = fma(p, f, set1(5.57999127e-2f));
    p = fma(p, f, set1(2.40164444e-1f));
    p = fma(p, f, set1(6.93151295e-1f));
    p = fma(p, f, set1(1.f));
  } else if constexpr (kDegree == 4) {
    p = fma(set1(1.34266857e-2f), f, set1(5.22424728e-2f));
    p = fma(p, f, set1(2.41280213e-1f));
    p = fma(p, f, set1(6.93044841e-1f));
    p = fma(p, f, set1(1.f));
  } else {
    p = fma(set1(7.70670548e-2f), f, set1(2.2764498e-1f));
    p = fma(p, f, set1(6.95116818e-1f));
    p = fma(p, f, set1(1.f));
  }
  return scale_by_power_of_two(p, parts);
}

// tanh(x) = 1 - 2 / (e^2x + 1), and its Taylor series where that difference would cancel.
FLASHSDK_HD Vec tanh(Vec x) {
  Vec magnitude = max(x, sub(zero(), x));
  Vec e = exp2<5>(mul(max(sub(zero(), magnitude), set1(-20.f)), set1(2.885390082f)));  // e^-2|x|
  Vec large = div(sub(set1(1.f), e), add(set1(1.f), e));
  Vec x2 = mul(x, x);
  Vec series = fma(x2, set1(-17.f / 315.f), set1(2.f / 15.f));
  series = fma(series, x2, set1(-1.f / 3.f));
  series = fma(mul(series, x2), x, x);
  return select_below(magnitude, 0.1f, series, copy_sign(large, x));
}

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
