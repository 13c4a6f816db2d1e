// Numbers of float8_e4m3fn as pairs of 16 bits. fp16 and bf16 have all of them: nothing is rounded.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_fp16.h>
#include <cutlass/numeric_types.h>

#include "common/params.h"
#include "cuda/tile/dropout.h"
#include "cuda/tile/fragments.h"

namespace flashsdk::cuda {

inline constexpr int kFp8Vector = 16;  // of 8 bits: 16 bytes

// Whether a row that starts here and is `columns` wide can be read in whole vectors.
FLASHSDK_HD bool fp8_vector_row(const void* row, int columns) {
  return reinterpret_cast<std::uintptr_t>(row) % kFp8Vector == 0 && columns % kFp8Vector == 0;
}
// The same for every row and head of a tensor, but for its width, as the host sees it.
inline bool fp8_vector_aligned(const TensorParam& t) {
  return fp8_vector_row(t.ptr, 0) && (t.batch | t.row | t.head) % kFp8Vector == 0;
}

// Bytes 2·kHalf and 2·kHalf + 1 of a word as two fp16.
template <int kHalf>
__device__ __forceinline__ std::uint32_t fp16_from_fp8(std::uint32_t word) {
#if __CUDA_ARCH__ >= 890
  std::uint32_t pair;
  if constexpr (kHalf == 0) {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}" : "=r"(pair) : "r"(word));
  } else {
    asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}" : "=r"(pair) : "r"(word));
  }
  return pair;
#else
  // Each byte s eeee mmm becomes the upper half of 16 bits. What follows the sign, a bit further down, is an fp16 of
  // 2^-8 of the number, also where that is subnormal. Only of NaN, 0x7f, does a one in the last place carry into that
  // of the sign, and moved down with the rest it makes the exponent fp16's largest.
  const std::uint32_t bytes = pick_bytes(word, 0, kHalf == 0 ? 0x1404 : 0x3424), magnitude = bytes & 0x7f007f00u;
  const std::uint32_t carried = magnitude | ((magnitude + 0x01000100u) & 0x80008000u);
  const std::uint32_t small = (carried >> 1) | (bytes & 0x80008000u);
  const __half2 pair = __hmul2(reinterpret_cast<const __half2&>(small), __float2half2_rn(256.f));
  return reinterpret_cast<const std::uint32_t&>(pair);
#endif
}

// The same as two elements.
template <class Element, int kHalf>
__device__ __forceinline__ std::uint32_t pair_from_fp8(std::uint32_t word) {
  const std::uint32_t fp16 = fp16_from_fp8<kHalf>(word);
  if constexpr (std::is_same_v<Element, cutlass::half_t>) {
    return fp16;
  } else {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(fp16));
    return pack<Element>(pair.x, pair.y);
  }
}

// Elements one by one; those from `count` on are zero.
__device__ __forceinline__ uint4 gather_fp8(const std::uint8_t* from, int count) {
  uint4 vector;
  auto* word = reinterpret_cast<std::uint32_t*>(&vector);
#pragma unroll
  for (int e = 0; e < kFp8Vector; ++e) {
    const std::uint32_t byte = e < count ? from[e] : 0;
    word[e / 4] = e % 4 == 0 ? byte : word[e / 4] | byte << 8 * (e % 4);
  }
  return vector;
}

}  // namespace flashsdk::cuda
