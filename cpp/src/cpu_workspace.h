// Scratch memory of each calling thread, kept between calls on a CPU.
#pragma once

#include <cstdlib>

#include "check.h"
#include "flashsdk/attention.h"

namespace flashsdk {

class CpuWorkspace {
 public:
  static CpuWorkspace& of_thread() {
    thread_local CpuWorkspace workspace;
    return workspace;
  }
  ~CpuWorkspace() { std::free(data_); }

  Workspace at_least(std::size_t size) {
    if (size > size_) {
      std::free(data_);
      size_ = (size + kAlignment - 1) / kAlignment * kAlignment;
      data_ = std::aligned_alloc(kAlignment, size_);
      if (data_ == nullptr) {
        size_ = 0;
        fail("workspace", "no memory for " + std::to_string(size) + " bytes", "less is free", ErrorCode::kRuntime);
      }
    }
    return {data_, size_};
  }
  // Large ones are not worth keeping: getting them anew costs little beside the call.
  void trim() {
    if (size_ <= kMostKept) return;
    std::free(data_);
    data_ = nullptr;
    size_ = 0;
  }

 private:
  static constexpr std::size_t kAlignment = 256, kMostKept = std::size_t{64} << 20;
  void* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace flashsdk
