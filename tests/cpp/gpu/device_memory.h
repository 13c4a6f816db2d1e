// Memory of a GPU that a test owns, poisoned.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

#include "cuda/host/device.h"

namespace flashsdk::testing {

class DeviceMemory {
 public:
  DeviceMemory(std::size_t bytes, int device) {
    cuda::DeviceGuard guard(device);
    cuda::check(cudaMalloc(&data_, bytes), "cudaMalloc");
    cuda::check(cudaMemset(data_, 0xFF, bytes), "cudaMemset");  // NaN
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

}  // namespace flashsdk::testing
