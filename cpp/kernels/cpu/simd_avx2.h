// x86-64-v3: AVX2, FMA and F16C.
#pragma once

#include <immintrin.h>

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

using Vec = __m256;
using IVec = __m256i;
inline constexpr int kLanes = 8;
inline constexpr int kVecs = 2;  // 6 x 2 accumulators, 2 operands and a broadcast fit 16 registers

FLASHSDK_HD Vec zero() { return _mm256_setzero_ps(); }
FLASHSDK_HD Vec set1(float x) { return _mm256_set1_ps(x); }
FLASHSDK_HD Vec load(const float* p) { return _mm256_loadu_ps(p); }
FLASHSDK_HD void store(float* p, Vec x) { _mm256_storeu_ps(p, x); }
FLASHSDK_HD Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
FLASHSDK_HD Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
FLASHSDK_HD Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
FLASHSDK_HD Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
FLASHSDK_HD Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
FLASHSDK_HD Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
FLASHSDK_HD Vec fms(Vec a, Vec b, Vec c) { return _mm256_fmsub_ps(a, b, c); }
FLASHSDK_HD void keep_in_register(Vec& x) { asm("" : "+x"(x)); }

struct FloorParts {
  Vec floor, fraction;
};
FLASHSDK_HD FloorParts floor_parts(Vec t) {
  // Below -127 the result is 0; the clamp keeps the exponent in range. max(limit, NaN) is NaN in this operand order.
  t = _mm256_max_ps(set1(-127.f), t);
  Vec floor = _mm256_floor_ps(t);
  return {floor, _mm256_sub_ps(t, floor)};
}
FLASHSDK_HD Vec scale_by_power_of_two(Vec p, FloorParts parts) {
  __m256i exponent = _mm256_cvtps_epi32(_mm256_add_ps(parts.floor, set1(127.f)));
  return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}

FLASHSDK_HD Vec select_below(Vec x, float limit, Vec below, Vec other) {
  return _mm256_blendv_ps(other, below, _mm256_cmp_ps(x, set1(limit), _CMP_LT_OQ));
}
FLASHSDK_HD Vec copy_sign(Vec magnitude, Vec sign) { return _mm256_or_ps(magnitude, _mm256_and_ps(sign, set1(-0.f))); }
// x where it is not -inf, else 0.
FLASHSDK_HD Vec finite_or_zero(Vec x) { return _mm256_and_ps(_mm256_cmp_ps(x, set1(-INFINITY), _CMP_NEQ_UQ), x); }

FLASHSDK_HD IVec load_int(const std::int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
FLASHSDK_HD Vec mask_keys(Vec s, IVec lo, IVec hi, std::int32_t j) {
  IVec key = _mm256_set1_epi32(j);
  IVec unseen =
      _mm256_or_si256(_mm256_cmpgt_epi32(lo, key), _mm256_cmpeq_epi32(_mm256_max_epi32(hi, key), key));  // hi <= j
  return _mm256_blendv_ps(s, set1(-INFINITY), _mm256_castsi256_ps(unseen));
}
// x where the lane's byte is >= threshold, else 0.
FLASHSDK_HD Vec keep_at_least(Vec x, const std::uint8_t* bytes, int threshold) {
  __m256i b = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
  return _mm256_and_ps(x, _mm256_castsi256_ps(_mm256_cmpgt_epi32(b, _mm256_set1_epi32(threshold - 1))));
}

FLASHSDK_HD Vec load_as_float(const float* p) { return load(p); }
FLASHSDK_HD Vec load_as_float(const Bf16* p) {
  __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
FLASHSDK_HD Vec load_as_float(const Fp16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
// By way of fp16, whose exponents are 8 apart: unlike a product of subnormals it keeps them in every mode of the
// processor.
FLASHSDK_HD Vec load_as_float(const Fp8* p) {
  const __m128i x = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i nan = _mm_cvtepi8_epi16(_mm_cmpeq_epi8(_mm_or_si128(x, _mm_set1_epi8(-128)), _mm_set1_epi8(-1)));
  const __m128i half = _mm_slli_epi16(_mm_cvtepi8_epi16(x), 7);  // the sign twice
  const __m128i value = _mm_and_si128(half, _mm_set1_epi16(static_cast<short>(0xBF80)));
  return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(value, nan)), set1(0x1p8f));
}
FLASHSDK_HD void store_as(float* p, Vec x) { store(p, x); }
FLASHSDK_HD void store_as(Bf16* p, Vec x) {
  __m256i u = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
  __m256i nan = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, nan, is_nan), 16);
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
FLASHSDK_HD void store_as(Fp16* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

// Lane i: the sum of all lanes of x[i].
FLASHSDK_HD Vec sum_of_each(const Vec (&x)[8]) {
  const auto of_four = [&](int i) __attribute__((always_inline)) {  // a sum of each in both halves
    return _mm256_hadd_ps(_mm256_hadd_ps(x[i], x[i + 1]), _mm256_hadd_ps(x[i + 2], x[i + 3]));
  };
  const Vec low = of_four(0), high = of_four(4);
  return add(_mm256_blend_ps(low, high, 0xF0), _mm256_permute2f128_ps(low, high, 0x21));
}

// dst[c][r] = src[r][c] for an 8 x 8 block of 32-bit words; strides in words.
FLASHSDK_HD void transpose(const void* src, std::int64_t src_stride, void* dst, std::int64_t dst_stride) {
  const auto* s = static_cast<const float*>(src);
  auto* d = static_cast<float*>(dst);
  Vec r[8], t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 4; ++i) {  // low halves of rows i and i + 4 side by side, then the high halves
    const float *a = s + i * src_stride, *b = s + (i + 4) * src_stride;
    r[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(a)), _mm_loadu_ps(b), 1);
    r[i + 4] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(a + 4)), _mm_loadu_ps(b + 4), 1);
  }
#pragma GCC unroll 2
  for (int h = 0; h < 8; h += 4) {
    t[h] = _mm256_unpacklo_ps(r[h], r[h + 1]);
    t[h + 1] = _mm256_unpackhi_ps(r[h], r[h + 1]);
    t[h + 2] = _mm256_unpacklo_ps(r[h + 2], r[h + 3]);
    t[h + 3] = _mm256_unpackhi_ps(r[h + 2], r[h + 3]);
    store(d + (h + 0) * dst_stride, _mm256_shuffle_ps(t[h], t[h + 2], 0x44));
    store(d + (h + 1) * dst_stride, _mm256_shuffle_ps(t[h], t[h + 2], 0xEE));
    store(d + (h + 2) * dst_stride, _mm256_shuffle_ps(t[h + 1], t[h + 3], 0x44));
    store(d + (h + 3) * dst_stride, _mm256_shuffle_ps(t[h + 1], t[h + 3], 0xEE));
  }
}

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
