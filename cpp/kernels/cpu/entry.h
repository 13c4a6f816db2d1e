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

// Times log2(e) a larger softmax_scale is infinite: only kernels with features multiply by the two one after the other.
inline const char* refuse_huge_scale(const ForwardParams& p) {
  constexpr float kMaxScale = 2.35e38f;
  const float scale = p.score.softmax_scale;
  return scale > kMaxScale || scale < -kMaxScale ? "softmax_scale times log2(e) is beyond float32" : nullptr;
}

// Beside that the CPU kernels take every problem their key admits.
template <class Kernel, class T, class Policy>
consteval KernelEntry make_entry(Op op, int head_dim, bool score_features) {
  return {{op, Backend::kCpu, FLASHSDK_STRINGIFY(FLASHSDK_ISA_NS), kDTypeOf<T>, head_dim, kMaskKindOf<Policy>,
           score_features},
          Kernel::kTile,
          score_features ? nullptr : &refuse_huge_scale,
          &Kernel::workspace_size,
          &Kernel::launch};
}

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
