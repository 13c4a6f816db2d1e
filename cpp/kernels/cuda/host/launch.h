// What launching a kernel takes on every GPU architecture: its limit of shared memory, and when it may start.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <type_traits>

#include <cuda_runtime.h>

#include "cuda/host/device.h"
#include "cuda/schedule/tile_scheduler.h"

namespace flashsdk::cuda {

// Raises a kernel's limit of shared memory, once a device, as far as that goes.
template <class Kernel>
void allow_shared_memory(Kernel kernel, int bytes, int device, std::atomic<std::uint64_t>& done) {
  const std::uint64_t bit = std::uint64_t{1} << device;
  if (bytes <= 48 * 1024 || (done.load(std::memory_order_relaxed) & bit) != 0) return;
  bytes = min_of(bytes, device_limits(device).shared_memory_per_block);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "preparing a kernel");
  done.fetch_or(bit, std::memory_order_relaxed);
}

// Of a device, for thread blocks that fill a multiprocessor, or clusters of these.
inline Workers workers_of(int device, int cluster_size = 1) {
  const DeviceLimits& limits = device_limits(device);
  return {limits.l2_bytes, max_of(1, limits.multiprocessors / cluster_size)};
}

// When a kernel's thread blocks may start: when the kernel before it in the stream is done, or while that one runs.
// Then they call wait_for_kernel_before() ahead of what they need of it (programmatic dependent launch).
enum class Start { kAfter, kDuring };

// During, where the device can and the code it runs was compiled to wait.
template <auto kKernel>
Start start_during(int device) {
  constexpr int kFirst = 90;  // compute capability
  if (device_limits(device).capability < kFirst) return Start::kAfter;
  static std::array<std::atomic<int>, 64> versions{};  // of each device's code; 0: not asked yet
  std::atomic<int>& version = versions[static_cast<std::size_t>(device)];
  if (version.load(std::memory_order_relaxed) == 0) {
    cudaFuncAttributes code;
    check(cudaFuncGetAttributes(&code, kKernel), "looking at a kernel");
    version.store(code.ptxVersion, std::memory_order_relaxed);
  }
  return version.load(std::memory_order_relaxed) < kFirst ? Start::kAfter : Start::kDuring;
}

// A number that no other launch has and that no memory holds by chance.
inline std::uint64_t launch_name() {
  static std::atomic<std::uint64_t> count{
      static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count())};
  std::uint64_t x = count.fetch_add(1, std::memory_order_relaxed) * 0x9E3779B97F4A7C15u;  // odd: a permutation
  x ^= x >> 32;
  return x != 0 ? x : 1;
}

// Launches and checks this launch alone: an error that somebody left behind for cudaGetLastError is not taken for ours,
// and stays.
template <class... Params, class... Args>
void launch(const char* what, Start start, void (*kernel)(Params...), dim3 grid, int threads, int shared_bytes,
            cudaStream_t stream, const Args&... args) {
  static_assert((std::is_same_v<std::remove_cv_t<Params>, Args> && ...), "kernels take exactly these types");
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&args))...};
  cudaLaunchAttribute during{};
  during.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  during.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &during;
  config.numAttrs = start == Start::kDuring ? 1 : 0;
  check(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), pointers), what);
}
template <class Kernel, class... Rest>
void launch(const char* what, Kernel kernel, dim3 grid, const Rest&... rest) {
  launch(what, Start::kAfter, kernel, grid, rest...);
}

// In a kernel whose next may start during it: from here on it may, where there is room.
__device__ __forceinline__ void allow_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
// Until the kernel before is done, and what it has written can be read.
__device__ __forceinline__ void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace flashsdk::cuda
