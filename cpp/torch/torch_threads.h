// CPU calls on PyTorch's own threads.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <cstdint>
#include <stdexcept>

#include "core_api.h"

namespace flashsdk::torch_ops {

// While it lives, the core's calls of this thread run by at::parallel_for, on torch.get_num_threads() threads.
class TorchThreads {
 public:
  explicit TorchThreads(const CoreApi& core) : core_(core) {
    std::uint32_t threads = 1;
    if (torch_get_num_threads(&threads) == AOTI_TORCH_SUCCESS) executor_.num_threads = static_cast<int>(threads);
    executor_.run = run;
    before_ = core.use_executor(&executor_);
  }
  ~TorchThreads() { core_.use_executor(before_); }
  TorchThreads(const TorchThreads&) = delete;
  TorchThreads& operator=(const TorchThreads&) = delete;

 private:
  // Inside a parallel region all slots come to this thread, one chunk: its first one does all the work.
  static void run(void*, int num_threads, void (*fn)(void*, int), void* context) {
    struct Job {
      void (*fn)(void*, int);
      void* context;
    } job{fn, context};
    const auto chunk = [](std::int64_t begin, std::int64_t, void* given) {
      const Job& j = *static_cast<Job*>(given);
      j.fn(j.context, static_cast<int>(begin));
    };
    if (torch_parallel_for(0, num_threads, /*grain_size=*/1, chunk, &job) != AOTI_TORCH_SUCCESS)
      throw std::runtime_error("flashsdk: at::parallel_for failed; its message is above");
  }

  const CoreApi& core_;
  Executor executor_;
  const Executor* before_;
};

}  // namespace flashsdk::torch_ops
