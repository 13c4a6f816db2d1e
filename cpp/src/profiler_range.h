// Ranges that profilers show above the GPU's kernels and on the timeline of the host: those of NVTX.
#pragma once

namespace flashsdk {

// On this thread from construction to destruction, in NVTX's domain "flashsdk". Where no profiler listens it costs some
// nanoseconds; in a build without NVTX's headers it is nothing.
class ProfilerRange {
 public:
  explicit ProfilerRange(const char* name) noexcept;
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
};

}  // namespace flashsdk
