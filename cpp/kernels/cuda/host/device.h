// What the host asks of a CUDA device, without a CUDA header. Implemented in cuda/host/device.cpp. What kernels of
// one's own call is exported.
#pragma once

#include <string>

#include "flashsdk/export.h"

namespace flashsdk::cuda {

struct DeviceLimits {
  int capability = 0;               // 90 for compute capability 9.0
  int shared_memory_per_block = 0;  // bytes a thread block may opt in to
  int shared_memory_per_multiprocessor = 0;
  int multiprocessors = 0;
  int l2_bytes = 0;
  int memory_rate = 0;  // GB/s, by the clock and the width of its memory; 0: the driver does not tell
};

// The architectures this build has code for, as CMAKE_CUDA_ARCHITECTURES lists them, separated by spaces. Generated.
const char* built_architectures();

// Whether code of one such architecture ("80-real", "90a", "80-virtual") runs on a device of that capability.
bool runs_on(const char* architecture, int capability);

// Whether code of any of several runs there; they are separated by spaces.
bool any_runs_on(const std::string& architectures, int capability);

// One line that names the card and what would do, for a device that this build has no code for.
std::string describe_refusal(int device, const char* name, int capability, const std::string& architectures);

// Why this machine runs no kernel of an architecture as KernelKey has it ("sm_80", "sm_90a"); empty: it does. Asks the
// driver, so nothing but a listing should call it.
std::string machine_refusal(const std::string& arch);

// Throws kInvalidArgument unless work on the device can be put into the stream (a cudaStream_t).
void check_stream(void* stream, int device);

// Waits until a stream of the device has done all that is in it: for frameworks that cannot be told of streams.
void synchronize(void* stream, int device);

// Read once a device and kept. Throws kUnsupported if this build has no code for it, kRuntime if it cannot be asked.
FLASHSDK_API const DeviceLimits& device_limits(int device);

// Makes a device current, and the one before it on leaving.
class FLASHSDK_API DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

// Throws kRuntime with what failed when code (a cudaError_t) is not success.
FLASHSDK_API void check(int code, const char* what);

}  // namespace flashsdk::cuda
