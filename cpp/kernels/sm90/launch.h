// From kernel templates to rows of the kernel table: what the SM90 kernels of both directions refuse, and their keys.
#pragma once

#include "common/kernel_entry.h"
#include "cuda/host/device.h"
#include "cuda/host/launch.h"
#include "cuda/tile/bias_tile.h"
#include "cuda/tile/element.h"
#include "cuda/tile/score_features.h"
#include "sm90/tensor_map.h"

namespace flashsdk::sm90 {

constexpr const char* kArch = "sm_90a";

// Null, or why no SM90 kernel with these head dimensions, tile and features takes the problem.
template <class Traits, cuda::Features kFeatures>
const char* refuse(const ForwardParams& p) {
  if (const char* reason = cuda::refuse_dtype_kv(p, false)) return reason;
  if (const char* reason = cuda::refuse_features<kFeatures>(p.score)) return reason;
  if (p.head_dim > Traits::kHeadDim || p.head_dim_v > Traits::kHeadDimV) return "head_dim is larger than the kernel's";
  if (p.head_dim % 8 != 0 || p.head_dim_v % 8 != 0) return "head_dim is not a multiple of 8";
  if (p.mask.kind == MaskKind::kBlockSparse &&
      (p.mask.block_q % Traits::kBlockM != 0 || p.mask.block_k % Traits::kBlockN != 0)) {
    return "the mask's blocks are not multiples of the kernel's tile";
  }
  for (const TensorParam* t : {&p.q, &p.out})
    if (const char* reason = tensor_map_refusal(*t, query_extent(p, p.head_dim))) return reason;
  for (const TensorParam* t : {&p.k, &p.v})
    if (const char* reason = tensor_map_refusal(*t, key_extent(p, p.head_dim))) return reason;
  const cuda::DeviceLimits& device = cuda::device_limits(p.device.index);
  if (device.capability != 90) return "the device is not of compute capability 9.0";
  // Last of these: of a call without a bias any other reason says more.
  if constexpr (cuda::has_bias(kFeatures)) return cuda::refuse_bias<typename Traits::Element>(p.score.bias);
  return nullptr;
}

template <class Traits, cuda::Features kFeatures>
KernelKey key_of(MaskKind mask) {
  return {Backend::kSm90, kArch,    cuda::kDType<typename Traits::Element>, Traits::kHeadDim, Traits::kHeadDimV,
          mask,           kFeatures};
}

}  // namespace flashsdk::sm90
