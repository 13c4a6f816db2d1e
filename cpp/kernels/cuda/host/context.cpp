#include "context.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "cuda/host/device.h"

namespace flashsdk::cuda {
namespace {

PFN_cuCtxGetCurrent_v4000 current_context() {
  static const auto function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check(cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &entry, 4000, cudaEnableDefault, &found),
          "asking the driver for cuCtxGetCurrent");
    return reinterpret_cast<PFN_cuCtxGetCurrent_v4000>(found == cudaDriverEntryPointSuccess ? entry : nullptr);
  }();
  return function;
}

}  // namespace

void bind_context(int device) {
  int current = -1;
  check(cudaGetDevice(&current), "asking for the current device");
  if (current != device) return;  // a launch changes it, which binds that one's
  CUcontext context = nullptr;
  const auto get = current_context();
  if (get != nullptr && get(&context) == CUDA_SUCCESS && context != nullptr) return;
  check(cudaSetDevice(device), "making the device's context current");
}

}  // namespace flashsdk::cuda
