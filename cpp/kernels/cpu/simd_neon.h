// NEON as every 64-bit ARM processor has it, and FEAT_BF16 where the compiler's target has it.
#pragma once

#include <arm_neon.h>

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

using Vec = float32x4_t;
using IVec = int32x4_t;
inline constexpr int kLanes = 4;
inline constexpr int kVecs = 4;  // 6 x 4 accumulators, 4 operands and a broadcast fit 32 registers

// Unlike arm_neon.h's loads and stores these may meet words that have been stored as another type.
template <class V>
FLASHSDK_HD V load_raw(const void* p) {
  V x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
template <class V>
FLASHSDK_HD void store_raw(void* p, V x) {
  __builtin_memcpy(p, &x, sizeof x);
}

FLASHSDK_HD Vec zero() { return vdupq_n_f32(0.f); }
FLASHSDK_HD Vec set1(float x) { return vdupq_n_f32(x); }
FLASHSDK_HD Vec load(const float* p) { return load_raw<Vec>(p); }
FLASHSDK_HD void store(float* p, Vec x) { store_raw(p, x); }
FLASHSDK_HD Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
FLASHSDK_HD Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
FLASHSDK_HD Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
FLASHSDK_HD Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
FLASHSDK_HD Vec max(Vec a, Vec b) { return vmaxq_f32(a, b); }
FLASHSDK_HD Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
FLASHSDK_HD Vec fms(Vec a, Vec b, Vec c) { return vfmaq_f32(vnegq_f32(c), a, b); }
FLASHSDK_HD void keep_in_register(Vec& x) { asm("" : "+w"(x)); }

struct FloorParts {
  Vec floor, fraction;
};
FLASHSDK_HD FloorParts floor_parts(Vec t) {
  t = vmaxq_f32(t, set1(-127.f));  // below it the result is 0, and the exponent stays in range; a NaN passes
  Vec floor = vrndmq_f32(t);
  return {floor, vsubq_f32(t, floor)};
}
FLASHSDK_HD Vec scale_by_power_of_two(Vec p, FloorParts parts) {
  const IVec exponent = vaddq_s32(vcvtq_s32_f32(parts.floor), vdupq_n_s32(127));  // that of a NaN is 127
  return vmulq_f32(p, vreinterpretq_f32_s32(vshlq_n_s32(exponent, 23)));
}

FLASHSDK_HD Vec select_below(Vec x, float limit, Vec below, Vec other) {
  return vbslq_f32(vcltq_f32(x, set1(limit)), below, other);
}
FLASHSDK_HD Vec copy_sign(Vec magnitude, Vec sign) { return vbslq_f32(vdupq_n_u32(0x80000000u), sign, magnitude); }
// x where it is not -inf, else 0.
FLASHSDK_HD Vec finite_or_zero(Vec x) {
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(x), vceqq_f32(x, set1(-INFINITY))));
}

FLASHSDK_HD IVec load_int(const std::int32_t* p) { return load_raw<IVec>(p); }
FLASHSDK_HD Vec mask_keys(Vec s, IVec lo, IVec hi, std::int32_t j) {
  const IVec key = vdupq_n_s32(j);
  return vbslq_f32(vandq_u32(vcleq_s32(lo, key), vcgtq_s32(hi, key)), s, set1(-INFINITY));
}
// x where the lane's byte is >= threshold, else 0.
FLASHSDK_HD Vec keep_at_least(Vec x, const std::uint8_t* bytes, int threshold) {
  const uint32x4_t b = vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(load_raw<std::uint32_t>(bytes)))));
  const uint32x4_t kept = vcgeq_u32(b, vdupq_n_u32(static_cast<std::uint32_t>(threshold)));
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), kept));
}

FLASHSDK_HD Vec load_as_float(const float* p) { return load(p); }
FLASHSDK_HD Vec load_as_float(const Bf16* p) { return vreinterpretq_f32_u32(vshll_n_u16(load_raw<uint16x4_t>(p), 16)); }
FLASHSDK_HD Vec load_as_float(const Fp16* p) { return vcvt_f32_f16(vreinterpret_f16_u16(load_raw<uint16x4_t>(p))); }
// By way of fp16, whose exponents are 8 apart.
FLASHSDK_HD Vec load_as_float(const Fp8* p) {
  const int8x8_t x = vcreate_s8(load_raw<std::uint32_t>(p));
  const uint16x4_t half = vreinterpret_u16_s16(vget_low_s16(vshll_n_s8(x, 7)));  // the sign twice
  const uint16x4_t value = vand_u16(half, vdup_n_u16(0xBF80)), magnitude = vand_u16(half, vdup_n_u16(0x3F80));
  const uint16x4_t nan = vceq_u16(magnitude, vdup_n_u16(0x3F80));
  return vmulq_n_f32(vcvt_f32_f16(vreinterpret_f16_u16(vorr_u16(value, nan))), 0x1p8f);
}
// As bf16, bit by bit.
FLASHSDK_HD uint16x4_t to_bf16(Vec x) {
#if defined(FLASHSDK_NEON_BF16)
  return vreinterpret_u16_bf16(vcvt_bf16_f32(x));
#else
  const uint32x4_t u = vreinterpretq_u32_f32(x), odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7FFF)));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, vorrq_u32(u, vdupq_n_u32(0x400000))), 16);
#endif
}
FLASHSDK_HD void store_as(float* p, Vec x) { store(p, x); }
FLASHSDK_HD void store_as(Bf16* p, Vec x) { store_raw(p, to_bf16(x)); }
FLASHSDK_HD void store_as(Fp16* p, Vec x) { store_raw(p, vcvt_f16_f32(x)); }

// Lane i: the sum of all lanes of x[i].
FLASHSDK_HD Vec sum_of_each(const Vec (&x)[4]) { return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])); }

// dst[c][r] = src[r][c] for a 4 x 4 block of 32-bit words; strides in words.
FLASHSDK_HD void transpose(const void* src, std::int64_t src_stride, void* dst, std::int64_t dst_stride) {
  const auto* s = static_cast<const float*>(src);
  auto* d = static_cast<float*>(dst);
  // Columns 0, 2 and 1, 3 of two rows each; then halves of these side by side.
  const Vec r0 = load(s), r1 = load(s + src_stride), r2 = load(s + 2 * src_stride), r3 = load(s + 3 * src_stride);
  const float64x2_t even01 = vreinterpretq_f64_f32(vtrn1q_f32(r0, r1)),
                    odd01 = vreinterpretq_f64_f32(vtrn2q_f32(r0, r1));
  const float64x2_t even23 = vreinterpretq_f64_f32(vtrn1q_f32(r2, r3)),
                    odd23 = vreinterpretq_f64_f32(vtrn2q_f32(r2, r3));
  store(d, vreinterpretq_f32_f64(vtrn1q_f64(even01, even23)));
  store(d + dst_stride, vreinterpretq_f32_f64(vtrn1q_f64(odd01, odd23)));
  store(d + 2 * dst_stride, vreinterpretq_f32_f64(vtrn2q_f64(even01, even23)));
  store(d + 3 * dst_stride, vreinterpretq_f32_f64(vtrn2q_f64(odd01, odd23)));
}

#if defined(FLASHSDK_NEON_BF16)
// Four bf16 of neighbouring steps in each 64-bit word, two words in a register: the operand of the matrix instruction,
// which adds to a block of two rows and two lanes, by rows, the products of two rows with two lanes.
FLASHSDK_HD Vec multiply_blocks(Vec block, bfloat16x8_t rows, bfloat16x8_t lanes) {
  return vbfmmlaq_f32(block, rows, lanes);
}
FLASHSDK_HD bfloat16x8_t load_words(const std::uint64_t* p) { return load_raw<bfloat16x8_t>(p); }
FLASHSDK_HD bfloat16x8_t load_words(const std::uint64_t* first, const std::uint64_t* second) {
  return vcombine_bf16(load_raw<bfloat16x4_t>(first), load_raw<bfloat16x4_t>(second));
}
// One row of the blocks of lanes 0, 1 and lanes 2, 3.
template <int kRow>
FLASHSDK_HD Vec row_of_blocks(Vec low, Vec high) {
  const float64x2_t a = vreinterpretq_f64_f32(low), b = vreinterpretq_f64_f32(high);
  return vreinterpretq_f32_f64(kRow == 0 ? vtrn1q_f64(a, b) : vtrn2q_f64(a, b));
}
// Of four rows a word a lane, which holds that lane of each.
FLASHSDK_HD void store_words(std::uint64_t* p, const uint16x4_t (&row)[4]) {
  const uint16x4x4_t rows{{row[0], row[1], row[2], row[3]}};
  vst4_u16(reinterpret_cast<std::uint16_t*>(p), rows);
}
// Of one row a word, which holds its lanes.
FLASHSDK_HD void store_word(std::uint64_t* p, uint16x4_t row) { store_raw(p, row); }
// Columns c … c + 3 of four rows as words.
FLASHSDK_HD void interleave_rows(const std::uint16_t* const (&row)[4], int c, std::uint64_t* dst) {
  const uint16x4_t columns[4] = {load_raw<uint16x4_t>(row[0] + c), load_raw<uint16x4_t>(row[1] + c),
                                 load_raw<uint16x4_t>(row[2] + c), load_raw<uint16x4_t>(row[3] + c)};
  store_words(dst, columns);
}
// dst[c][r] = src[r][c] for a 4 x 4 block of 64-bit words; strides in words.
FLASHSDK_HD void transpose(const std::uint64_t* src, std::int64_t src_stride, std::uint64_t* dst,
                           std::int64_t dst_stride) {
#pragma GCC unroll 2
  for (int r = 0; r < 4; r += 2)
#pragma GCC unroll 2
    for (int c = 0; c < 4; c += 2) {
      const auto a = load_raw<uint64x2_t>(src + r * src_stride + c),
                 b = load_raw<uint64x2_t>(src + (r + 1) * src_stride + c);
      store_raw(dst + c * dst_stride + r, vtrn1q_u64(a, b));
      store_raw(dst + (c + 1) * dst_stride + r, vtrn2q_u64(a, b));
    }
}
#endif

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
