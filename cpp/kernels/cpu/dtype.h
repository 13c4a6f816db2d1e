// Storage types and their scalar conversions. Vectors convert in simd_*.h; this is for tails and the portable build.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"
#include "flashsdk/tensor.h"

namespace flashsdk::cpu {

struct Bf16 {
  std::uint16_t bits;
};
struct Fp16 {
  std::uint16_t bits;
};
// float8_e4m3fn: no infinity, and NaN is all ones. bf16 and fp16 hold every value.
struct Fp8 {
  std::uint8_t bits;
};

template <class T>
inline constexpr DType kDTypeOf = DType::kFloat32;
template <>
inline constexpr DType kDTypeOf<Bf16> = DType::kBFloat16;
template <>
inline constexpr DType kDTypeOf<Fp16> = DType::kFloat16;

template <class To, class From>
FLASHSDK_HD To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

FLASHSDK_HD float to_float(float x) { return x; }
FLASHSDK_HD float to_float(Bf16 x) { return bit_cast<float>(std::uint32_t{x.bits} << 16); }
#if defined(__aarch64__)  // every processor has the instruction
FLASHSDK_HD float to_float(Fp16 x) { return bit_cast<__fp16>(x.bits); }
#else
FLASHSDK_HD float to_float(Fp16 x) {
  std::uint32_t sign = std::uint32_t{x.bits & 0x8000u} << 16, magnitude = x.bits & 0x7FFFu;
  if (magnitude >= 0x7C00u) return bit_cast<float>(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);  // inf, NaN
  // Exponents are re-biased by a product, which normalises subnormals on the way.
  float scaled = bit_cast<float>(magnitude << 13) * bit_cast<float>(0x77800000u);  // 2^112
  return bit_cast<float>(sign | bit_cast<std::uint32_t>(scaled));
}
#endif

FLASHSDK_HD float to_float(Fp8 x) {
  const std::uint32_t sign = std::uint32_t{x.bits & 0x80u} << 24, magnitude = x.bits & 0x7Fu;
  if (magnitude == 0x7Fu) return bit_cast<float>(sign | 0x7FC00000u);
  // Exponents are 120 apart. Subnormals count units of 2^-9.
  const float value =
      magnitude < 8u ? static_cast<float>(magnitude) * 0x1p-9f : bit_cast<float>((magnitude << 20) + (120u << 23));
  return bit_cast<float>(sign | bit_cast<std::uint32_t>(value));
}

// Round to nearest, ties to even; NaN stays NaN.
template <class T>
FLASHSDK_HD T from_float(float x);
template <>
FLASHSDK_HD float from_float<float>(float x) {
  return x;
}
template <>
FLASHSDK_HD Bf16 from_float<Bf16>(float x) {
  std::uint32_t u = bit_cast<std::uint32_t>(x);
  if ((u & 0x7FFFFFFFu) > 0x7F800000u) return {static_cast<std::uint16_t>((u >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>((u + 0x7FFFu + ((u >> 16) & 1u)) >> 16)};
}
#if defined(__aarch64__)
template <>
FLASHSDK_HD Fp16 from_float<Fp16>(float x) {
  return {bit_cast<std::uint16_t>(static_cast<__fp16>(x))};
}
#else
template <>
FLASHSDK_HD Fp16 from_float<Fp16>(float x) {
  std::uint32_t u = bit_cast<std::uint32_t>(x), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return {static_cast<std::uint16_t>(sign | 0x7E00u)};
  if (magnitude >= 0x477FF000u) return {static_cast<std::uint16_t>(sign | 0x7C00u)};  // rounds to 65536 or more
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 aligns the mantissa to multiples of 2^-24 and rounds
    std::uint32_t aligned = bit_cast<std::uint32_t>(bit_cast<float>(magnitude) + 0.5f);
    return {static_cast<std::uint16_t>(sign | (aligned - 0x3F000000u))};
  }
  std::uint32_t rounded = magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u);
  return {static_cast<std::uint16_t>(sign | (rounded >> 13))};
}
#endif

}  // namespace flashsdk::cpu
