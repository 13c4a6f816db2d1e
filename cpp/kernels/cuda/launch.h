// What launching a kernel takes on every GPU architecture: its key from its types, its limit of shared memory.
#pragma once

#include <atomic>
#include <cstdint>

#include <cuda_runtime.h>
#include <cutlass/numeric_types.h>

#include "common/mask_policy.h"
#include "cuda/device.h"

namespace flashsdk::cuda {

template <class Element>
inline constexpr DType kDType = DType::kFloat16;
template <>
inline constexpr DType kDType<cutlass::bfloat16_t> = DType::kBFloat16;

template <class Policy>
inline constexpr MaskKind kMaskKind = MaskKind::kDense;
template <>
inline constexpr MaskKind kMaskKind<BandPolicy> = MaskKind::kBand;
template <>
inline constexpr MaskKind kMaskKind<BlockSparsePolicy> = MaskKind::kBlockSparse;

// Raises a kernel's limit of shared memory, once a device.
template <class Kernel>
void allow_shared_memory(Kernel kernel, int bytes, int device, std::atomic<std::uint64_t>& done) {
  const std::uint64_t bit = std::uint64_t{1} << device;
  if (bytes <= 48 * 1024 || (done.load(std::memory_order_relaxed) & bit) != 0) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "preparing a kernel");
  done.fetch_or(bit, std::memory_order_relaxed);
}

}  // namespace flashsdk::cuda
