// Scratch memory of each calling thread, kept between calls on a CPU.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
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
    used_ = 0;  // nothing to lend, should there be no memory
    if (size > size_) {
      std::free(data_);
      size_ = (size + kAlignment - 1) / kAlignment * kAlignment;
      data_ = std::aligned_alloc(kAlignment, size_);
      if (data_ == nullptr) {
        size_ = 0;
        fail("workspace", "no memory for " + std::to_string(size) + " bytes", "less is free", ErrorCode::kRuntime);
      }
    }
    used_ = size;
    return {data_, size_};
  }
  // What the call used beyond kMostKept is lent back: the system takes pages of it when memory is short, and until then
  // the next call finds them. To get them anew costs a fault a page, which short sequences take twice the time for.
  // What a call did not touch has been lent by the one before.
  void trim() {
    if (used_ <= kMostKept) return;
    const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE)),
               begin = reinterpret_cast<std::uintptr_t>(data_);
    const std::uintptr_t first = (begin + kMostKept + page - 1) / page * page, end = (begin + used_) / page * page;
    if (first >= end || madvise(reinterpret_cast<void*>(first), end - first, MADV_FREE) == 0) return;
    std::free(data_);  // an old system, which does not lend
    data_ = nullptr;
    size_ = 0;
  }

 private:
  static constexpr std::size_t kAlignment = 256, kMostKept = std::size_t{64} << 20;
  void* data_ = nullptr;
  std::size_t size_ = 0, used_ = 0;  // bytes, and those of the last call
};

// Launches with this thread's memory, which is trimmed however that ends.
template <class Planned>
void launch_on_cpu(const Planned& planned, LaunchOptions options) {
  struct Guard {
    CpuWorkspace& workspace;
    ~Guard() { workspace.trim(); }
  } guard{CpuWorkspace::of_thread()};
  options.workspace = guard.workspace.at_least(planned.workspace_size);
  planned.launch(options);
}

}  // namespace flashsdk
