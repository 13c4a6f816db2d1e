// The table of CPU kernels: one for every dtype, operation, head_dim, mask and set of features below, and for every
// instruction set.
#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>

#include "table/row.h"

namespace flashsdk::table {

constexpr DType kCpuDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};
// Widths of packed tiles, not of loops: a smaller head_dim runs in the next one and computes no more for it.
constexpr int kCpuHeadDims[] = {128, 256, 576};
constexpr Features kCpuFeatures[] = {kNone, kAll};

// Whether an instruction set adds something for a dtype: where not, the next slower one has its kernels.
constexpr bool cpu_has(std::string_view isa, DType dtype) {
  if (isa == "avx512_bf16" || isa == "neon_bf16") return dtype == DType::kBFloat16;
  if (isa == "avx512_amx") return dtype != DType::kFloat32;
  return true;
}
// Wide heads take plain calls with features compiled in: beside their products these cost 0 to 2 %, and to leave them
// out another half of the time and size that kernels of a head_dim take.
constexpr bool cpu_has(int head_dim, Features features) { return head_dim <= 256 || features == kAll; }

// The largest head_dim of a list, which no call on the device may exceed.
template <std::size_t kCount>
constexpr int widest(const int (&head_dims)[kCount]) {
  return *std::max_element(head_dims, head_dims + kCount);
}

}  // namespace flashsdk::table
