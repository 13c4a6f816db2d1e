// A row of the kernel table from a CPU kernel's template arguments.
#pragma once

#include "common/kernel_entry.h"
#include "cpu/traits.h"

#define FLASHSDK_STRINGIFY_(x) #x
#define FLASHSDK_STRINGIFY(x) FLASHSDK_STRINGIFY_(x)

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

template <class Policy>
inline constexpr MaskKind kMaskKindOf = MaskKind::kDense;
template <>
inline constexpr MaskKind kMaskKindOf<BandPolicy> = MaskKind::kBand;
template <>
inline constexpr MaskKind kMaskKindOf<BlockSparsePolicy> = MaskKind::kBlockSparse;

// The CPU kernels take every problem their key admits.
template <class Kernel, class T, class Policy>
consteval KernelEntry make_entry(Op op, int head_dim, bool score_features) {
  return {{op, Backend::kCpu, FLASHSDK_STRINGIFY(FLASHSDK_ISA_NS), kDTypeOf<T>, head_dim, kMaskKindOf<Policy>,
           score_features},
          Kernel::kTile,
          nullptr,
          &Kernel::workspace_size,
          &Kernel::launch};
}

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
