// What launching a kernel takes on every GPU architecture: its key from its types, its limit of shared memory.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>

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

// Launches and checks this launch alone: an error that somebody left behind for cudaGetLastError is not taken for ours,
// and stays.
template <class... Params, class... Args>
void launch(const char* what, void (*kernel)(Params...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
            const Args&... args) {
  static_assert((std::is_same_v<std::remove_cv_t<Params>, Args> && ...), "kernels take exactly these types");
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, dim3(static_cast<unsigned>(threads)), pointers,
                         static_cast<std::size_t>(shared_bytes), stream),
        what);
}

}  // namespace flashsdk::cuda
