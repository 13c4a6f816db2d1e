#include "cuda/host/device.h"

#include <array>
#include <cstdint>
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

bool any_runs_on(const std::string& architectures, int capability) {
  std::istringstream list(architectures);
  for (std::string architecture; list >> architecture;)
    if (runs_on(architecture.c_str(), capability)) return true;
  return false;
}

std::string describe_refusal(int device, const char* name, int capability, const std::string& architectures) {
  return "q: on cuda:" + std::to_string(device) + ", " + name + " of compute capability " +
         std::to_string(capability / 10) + "." + std::to_string(capability % 10) +
         "; a GPU that this build has code for (CMAKE_CUDA_ARCHITECTURES: " + architectures + ")";
}

namespace {

int device_attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, device), "asking for a device attribute");
  return value;
}

int capability_of(int device) {
  return 10 * device_attribute(cudaDevAttrComputeCapabilityMajor, device) +
         device_attribute(cudaDevAttrComputeCapabilityMinor, device);
}

}  // namespace

std::string machine_refusal(const std::string& arch) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess) {
    cudaGetLastError();
    devices = 0;
  }
  if (devices == 0) return "no GPU";
  const bool one_chip = arch.back() == 'a';
  const int needed = std::atoi(arch.c_str() + arch.find('_') + 1);
  for (int device = 0; device < devices; ++device) {
    const int capability = capability_of(device);
    const bool fits = one_chip ? capability == needed : capability >= needed;
    if (fits && any_runs_on(built_architectures(), capability)) return {};
  }
  return "no GPU that " + arch + " is for";
}

void check_stream(void* stream, int device) {
  // Null and the two special streams are of whichever device is current, which a launch sets.
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread) return;
  const auto given = static_cast<cudaStream_t>(stream);
  // A stream that is being captured may not be asked; the launch itself then fails on another device.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(given, &capture), "asking whether the stream is being captured");
  if (capture != cudaStreamCaptureStatusNone) return;
  int of = device;
  check(cudaStreamGetDevice(given, &of), "asking for the stream's device");
  if (of == device) return;
  throw Error(ErrorCode::kInvalidArgument,
              "stream: on cuda:" + std::to_string(of) + "; one on cuda:" + std::to_string(device) + ", where q is");
}

const DeviceLimits& device_limits(int device) {
  constexpr int kMaxDevices = 64;
  static std::array<DeviceLimits, kMaxDevices> limits;
  static std::array<std::once_flag, kMaxDevices> known;
  if (device < 0 || device >= kMaxDevices) {
    throw Error(ErrorCode::kInvalidArgument,
                "device: cuda:" + std::to_string(device) + "; cuda:0 to cuda:63 are supported");
  }
  std::call_once(known[device], [device] {
    DeviceLimits found;
    found.capability = capability_of(device);
    found.shared_memory_per_block = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    found.shared_memory_per_multiprocessor = device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    found.multiprocessors = device_attribute(cudaDevAttrMultiProcessorCount, device);
    found.l2_bytes = device_attribute(cudaDevAttrL2CacheSize, device);
    const std::int64_t megahertz = device_attribute(cudaDevAttrMemoryClockRate, device) / 1000;
    const int bits = device_attribute(cudaDevAttrGlobalMemoryBusWidth, device);
    found.memory_rate = static_cast<int>(2 * megahertz * bits / 8 / 1000);  // both edges of the clock
    if (!any_runs_on(built_architectures(), found.capability)) {
      cudaDeviceProp properties{};
      cudaGetDeviceProperties(&properties, device);
      throw Error(ErrorCode::kUnsupported,
                  describe_refusal(device, properties.name, found.capability, built_architectures()));
    }
    limits[device] = found;
  });
  return limits[device];
}

void synchronize(void* stream, int device) {
  DeviceGuard guard(device);
  check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "waiting for the stream");
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
