// x86-64-v4, and AVX512_BF16 where the compiler's target has it.
#pragma once

#include <immintrin.h>

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

using Vec = __m512;
using IVec = __m512i;
inline constexpr int kLanes = 16;
inline constexpr int kVecs = 4;  // 6 x 4 accumulators, 4 operands and a broadcast fit 32 registers

FLASHSDK_HD Vec zero() { return _mm512_setzero_ps(); }
FLASHSDK_HD Vec set1(float x) { return _mm512_set1_ps(x); }
FLASHSDK_HD Vec load(const float* p) { return _mm512_loadu_ps(p); }
FLASHSDK_HD void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
FLASHSDK_HD Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
FLASHSDK_HD Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
FLASHSDK_HD Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
FLASHSDK_HD Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
FLASHSDK_HD Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
FLASHSDK_HD Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
FLASHSDK_HD Vec fms(Vec a, Vec b, Vec c) { return _mm512_fmsub_ps(a, b, c); }
// Keeps a loaded operand in a register: GCC would fold the load into every product that uses it.
FLASHSDK_HD void keep_in_register(Vec& x) { asm("" : "+v"(x)); }

struct FloorParts {
  Vec t, fraction;
};
FLASHSDK_HD FloorParts floor_parts(Vec t) { return {t, _mm512_reduce_ps(t, 0x09)}; }
FLASHSDK_HD Vec scale_by_power_of_two(Vec p, FloorParts parts) { return _mm512_scalef_ps(p, parts.t); }

FLASHSDK_HD Vec select_below(Vec x, float limit, Vec below, Vec other) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, set1(limit), _CMP_LT_OQ), other, below);
}
FLASHSDK_HD Vec copy_sign(Vec magnitude, Vec sign) { return _mm512_or_ps(magnitude, _mm512_and_ps(sign, set1(-0.f))); }
// x where it is not -inf, else 0.
FLASHSDK_HD Vec finite_or_zero(Vec x) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, set1(-INFINITY), _CMP_NEQ_UQ), x);
}

FLASHSDK_HD IVec load_int(const std::int32_t* p) { return _mm512_loadu_si512(p); }
FLASHSDK_HD Vec mask_keys(Vec s, IVec lo, IVec hi, std::int32_t j) {
  IVec key = _mm512_set1_epi32(j);
  __mmask16 seen = _mm512_cmple_epi32_mask(lo, key) & _mm512_cmpgt_epi32_mask(hi, key);
  return _mm512_mask_blend_ps(seen, set1(-INFINITY), s);
}
// x where the lane's byte is >= threshold, else 0.
FLASHSDK_HD Vec keep_at_least(Vec x, const std::uint8_t* bytes, int threshold) {
  __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  return _mm512_maskz_mov_ps(_mm512_cmpge_epi32_mask(b, _mm512_set1_epi32(threshold)), x);
}

FLASHSDK_HD Vec load_as_float(const float* p) { return load(p); }
FLASHSDK_HD Vec load_as_float(const Bf16* p) {
  __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
FLASHSDK_HD Vec load_as_float(const Fp16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// By way of fp16, whose exponents are 8 apart: unlike a product of subnormals it keeps them in every mode of the
// processor.
FLASHSDK_HD Vec load_as_float(const Fp8* p) {
  const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __mmask16 number = _mm_cmpneq_epi8_mask(_mm_or_si128(x, _mm_set1_epi8(-128)), _mm_set1_epi8(-1));
  const __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(x), 7);  // the sign twice
  const Vec value = _mm512_cvtph_ps(_mm256_and_si256(half, _mm256_set1_epi16(static_cast<short>(0xBF80))));
  return _mm512_mask_mul_ps(set1(NAN), number, value, set1(0x1p8f));
}
FLASHSDK_HD void store_as(float* p, Vec x) { store(p, x); }
FLASHSDK_HD void store_as(Bf16* p, Vec x) {
  __m512i u = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  __m512i nan = _mm512_or_si512(u, _mm512_set1_epi32(0x400000));
  rounded = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), rounded, nan);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
FLASHSDK_HD void store_as(Fp16* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

// dst[c][i] = r[i][c] for a 16 x 16 block of 32-bit words; the stride in words.
FLASHSDK_HD void store_transposed(__m512i (&r)[16], std::uint32_t* d, std::int64_t dst_stride) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  // r[4g + c] now holds, in 128-bit lane l, column 4l + c of rows 4g … 4g + 3: a 4 x 4 transpose of lanes remains.
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    __m512i a = _mm512_shuffle_i32x4(r[c], r[4 + c], 0x88), b = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0x88);
    __m512i e = _mm512_shuffle_i32x4(r[c], r[4 + c], 0xDD), f = _mm512_shuffle_i32x4(r[8 + c], r[12 + c], 0xDD);
    _mm512_storeu_si512(d + c * dst_stride, _mm512_shuffle_i32x4(a, b, 0x88));
    _mm512_storeu_si512(d + (8 + c) * dst_stride, _mm512_shuffle_i32x4(a, b, 0xDD));
    _mm512_storeu_si512(d + (4 + c) * dst_stride, _mm512_shuffle_i32x4(e, f, 0x88));
    _mm512_storeu_si512(d + (12 + c) * dst_stride, _mm512_shuffle_i32x4(e, f, 0xDD));
  }
}

// dst[c][r] = src[r][c] for a 16 x 16 block of 32-bit words; strides in words.
FLASHSDK_HD void transpose(const void* src, std::int64_t src_stride, void* dst, std::int64_t dst_stride) {
  const auto* s = static_cast<const std::uint32_t*>(src);
  __m512i r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(s + i * src_stride);
  store_transposed(r, static_cast<std::uint32_t*>(dst), dst_stride);
}

// Lane i: the sum of all lanes of x[i].
FLASHSDK_HD Vec sum_of_each(const Vec (&x)[16]) {
  __m512d quarter[8];  // of two vectors in each 128-bit lane: sums of lanes 0 and 2, and of 1 and 3
  Vec of_four[4], half[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    quarter[i] =
        _mm512_castps_pd(add(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1])));
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)  // one sum of each of four vectors in each 128-bit lane
    of_four[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(quarter[2 * i], quarter[2 * i + 1])),
                     _mm512_castpd_ps(_mm512_unpackhi_pd(quarter[2 * i], quarter[2 * i + 1])));
  const auto add_lanes = [](Vec a, Vec b) __attribute__((always_inline)) {  // neighbouring ones
    return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD));
  };
  for (int i = 0; i < 2; ++i) half[i] = add_lanes(of_four[2 * i], of_four[2 * i + 1]);
  return add_lanes(half[0], half[1]);
}

#if defined(__AVX512BF16__)
// Two bf16 of neighbouring steps in each 32-bit lane: the operand of the dot-product instruction.
FLASHSDK_HD Vec dot_pairs(Vec acc, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
FLASHSDK_HD __m512i load_pairs(const std::uint32_t* p) { return _mm512_loadu_si512(p); }
FLASHSDK_HD __m512i set1_pairs(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
FLASHSDK_HD void keep_in_register(__m512i& x) { asm("" : "+v"(x)); }
FLASHSDK_HD void store_pairs(std::uint32_t* p, __m512i x) { _mm512_storeu_si512(p, x); }
// bf16(a) in lanes 0 … 15 and bf16(b) in lanes 16 … 31.
FLASHSDK_HD __m512i to_bf16(Vec a, Vec b) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(b, a)); }
// The same as sums of kParts bf16: of each float the nearest, and of what that leaves out.
template <int kParts>
struct Bf16Parts {
  __m512i part[kParts];
  FLASHSDK_HD Bf16Parts(Vec a, Vec b) {
    if constexpr (kParts == 2) {
      const Vec first_a = nearest(a), first_b = nearest(b);
      part[1] = to_bf16(sub(a, first_a), sub(b, first_b));
      a = first_a, b = first_b;
    }
    part[0] = to_bf16(a, b);
  }

 private:
  // In two instructions: the second part makes up for ties that go up, not to even, and for a NaN that wraps round.
  static FLASHSDK_HD Vec nearest(Vec x) {
    const __m512i half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(x), half), upper));
  }
};
// Lane l: bf16(a[l]) low, bf16(b[l]) high.
FLASHSDK_HD __m512i interleave_halves(__m512i ab) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return _mm512_permutexvar_epi16(order, ab);
}
// 32 bf16 of row a and of row b as 32 pairs (a[c], b[c]).
FLASHSDK_HD void interleave_rows(const std::uint16_t* a, const std::uint16_t* b, std::uint32_t* dst) {
  __m256i a0 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
  __m256i b0 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
  store_pairs(dst, _mm512_or_si512(_mm512_cvtepu16_epi32(a0), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b0), 16)));
}
// dst[c][i] = (src[2i][c], src[2i + 1][c]), i and c < 16; zeros for rows from `rows` and columns from `columns` on.
FLASHSDK_HD void transpose_row_pairs(const std::uint16_t* src, std::int64_t stride, int rows, int columns,
                                     std::uint32_t* dst, std::int64_t dst_stride) {
  const auto in_row = static_cast<__mmask16>(columns >= 16 ? 0xFFFF : (columns > 0 ? (1 << columns) - 1 : 0));
  auto row = [&](int n) __attribute__((always_inline)) {
    return _mm256_maskz_loadu_epi16(n < rows ? in_row : 0, src + n * stride);
  };
  __m512i r[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i)
    r[i] = interleave_halves(_mm512_inserti64x4(_mm512_castsi256_si512(row(2 * i)), row(2 * i + 1), 1));
  store_transposed(r, dst, dst_stride);
}
#endif

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
