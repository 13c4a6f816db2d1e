// From float32 to float8_e4m3fn in plain arithmetic, of which every CPU and GPU makes the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace flashsdk {

// The code of the nearest number; a tie goes to the even code. What lies beyond 448, the largest, becomes ±448. NaN is
// 0x7f whatever its sign, which processors set differently.
FLASHSDK_HD std::uint8_t fp8_from_float(float x) {
  constexpr std::uint32_t kInfinity = 0x7f800000u, kLargest = 0x43e00000u, kSmallestNormal = 0x3c800000u;
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const std::uint32_t sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  const std::uint32_t finite = magnitude < kLargest ? magnitude : kLargest;
  // The biases of exponents differ by 120, and the mantissa is 20 bits shorter.
  const std::uint32_t normal = (finite - (120u << 23) + 0x7ffffu + (finite >> 20 & 1u)) >> 20;
  // Subnormals count units of 2^-9, the last place of 2^14: a sum with it rounds to them.
  float value;
  std::memcpy(&value, &finite, sizeof value);
  value += 0x1p14f;
  std::uint32_t sum;
  std::memcpy(&sum, &value, sizeof sum);
  const std::uint32_t code = finite < kSmallestNormal ? sum - 0x46800000u : normal;
  return static_cast<std::uint8_t>(magnitude > kInfinity ? 0x7fu : sign | code);
}

}  // namespace flashsdk
