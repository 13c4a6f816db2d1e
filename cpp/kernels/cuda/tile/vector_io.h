// Eight 16-bit elements at a time from and to tensors that need not be aligned to 16 bytes.
#pragma once

#include <cstdint>

#include "common/host_device.h"
#include "common/params.h"

namespace flashsdk::cuda {

inline constexpr int kVectorElements = 8;  // of 16 bits: 16 bytes

// Whether rows that start here and are `columns` wide can be read and written in whole vectors.
FLASHSDK_HD bool vector_rows(const void* row, std::int64_t row_stride, int columns) {
  return reinterpret_cast<std::uintptr_t>(row) % 16 == 0 && row_stride % kVectorElements == 0 &&
         columns % kVectorElements == 0;
}

// The same for every row and head of a tensor, as the host sees it.
inline bool vector_aligned(const TensorParam& t) {
  return vector_rows(t.ptr, t.row, 0) && t.batch % kVectorElements == 0 && t.head % kVectorElements == 0;
}

#if defined(__CUDACC__)

// A whole vector, aligned, in device memory that nobody writes while the kernel runs. Not kept in L1: for what is read
// once.
__device__ __forceinline__ uint4 load_once(const void* from) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(from));
  return v;
}

// Elements one by one; those from `count` on are zero.
__device__ __forceinline__ uint4 gather_vector(const void* from, int count) {
  const auto* element = static_cast<const std::uint16_t*>(from);
  uint4 vector;
  auto* word = reinterpret_cast<std::uint32_t*>(&vector);
#pragma unroll
  for (int e = 0; e < kVectorElements; e += 2) {
    const std::uint32_t low = e < count ? element[e] : 0, high = e + 1 < count ? element[e + 1] : 0;
    word[e / 2] = low | high << 16;
  }
  return vector;
}

// The first `count` elements one by one.
__device__ __forceinline__ void scatter_vector(void* to, const uint4& vector, int count) {
  auto* element = static_cast<std::uint16_t*>(to);
  const auto* word = reinterpret_cast<const std::uint32_t*>(&vector);
#pragma unroll
  for (int e = 0; e < kVectorElements; ++e)
    if (e < count) element[e] = static_cast<std::uint16_t>(word[e / 2] >> (e % 2 * 16));
}

#endif

}  // namespace flashsdk::cuda
