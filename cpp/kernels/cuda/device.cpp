#include "cuda/device.h"

#include <array>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <string>

#include <cuda_runtime_api.h>

#include "flashsdk/status.h"

namespace flashsdk::cuda {

void check(int code, const char* what) {
  if (code == cudaSuccess) return;
  cudaGetLastError();  // not left behind for the caller's next CUDA call
  throw Error(ErrorCode::kRuntime, std::string(what) + ": " + cudaGetErrorString(static_cast<cudaError_t>(code)) +
                                       " (CUDA error " + std::to_string(code) + ")");
}

bool runs_on(const char* architecture, int capability) {
  const std::string text = architecture;
  const int built = std::atoi(architecture);
  const bool machine_code = text.find("virtual") == std::string::npos, ptx = text.find("real") == std::string::npos;
  // "90a" is for that chip alone; other machine code also for later ones of its generation, and PTX for all later ones.
  if (text.substr(0, text.find('-')).back() == 'a') return capability == built;
  return (machine_code && capability / 10 == built / 10 && capability >= built) || (ptx && capability >= built);
}

namespace {

// One line that names the card and what would do.
[[noreturn]] void refuse_device(int device, int capability) {
  cudaDeviceProp properties{};
  cudaGetDeviceProperties(&properties, device);
  throw Error(ErrorCode::kUnsupported,
              "q: on cuda:" + std::to_string(device) + ", " + properties.name + " of compute capability " +
                  std::to_string(capability / 10) + "." + std::to_string(capability % 10) +
                  "; a GPU that this build has code for (CMAKE_CUDA_ARCHITECTURES: " + built_architectures() + ")");
}

bool any_runs_on(int capability) {
  std::istringstream list(built_architectures());
  for (std::string architecture; list >> architecture;)
    if (runs_on(architecture.c_str(), capability)) return true;
  return false;
}

}  // namespace

const DeviceLimits& device_limits(int device) {
  constexpr int kMaxDevices = 64;
  static std::array<DeviceLimits, kMaxDevices> limits;
  static std::array<std::once_flag, kMaxDevices> known;
  if (device < 0 || device >= kMaxDevices) {
    throw Error(ErrorCode::kInvalidArgument,
                "device: cuda:" + std::to_string(device) + "; cuda:0 to cuda:63 are supported");
  }
  std::call_once(known[device], [device] {
    auto attribute = [device](cudaDeviceAttr which) {
      int value = 0;
      check(cudaDeviceGetAttribute(&value, which, device), "asking for a device attribute");
      return value;
    };
    DeviceLimits found;
    found.capability = 10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
    found.shared_memory_per_block = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    found.shared_memory_per_multiprocessor = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    if (!any_runs_on(found.capability)) refuse_device(device, found.capability);
    limits[device] = found;
  });
  return limits[device];
}

DeviceGuard::DeviceGuard(int device) {
  check(cudaGetDevice(&previous_), "asking for the current device");
  if (previous_ != device) {
    check(cudaSetDevice(device), "changing the current device");
    changed_ = true;
  }
}

DeviceGuard::~DeviceGuard() {
  if (changed_) cudaSetDevice(previous_);
}

}  // namespace flashsdk::cuda
