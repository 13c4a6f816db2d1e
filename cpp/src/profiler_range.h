// Ranges that profilers show above the GPU's kernels and on the timeline of the host: those of NVTX.
#pragma once

namespace flashsdk {

// On this thread, in NVTX's domain "flashsdk"; an end is of the last that began. Where no profiler listens a range
// costs some nanoseconds; in a build without NVTX's headers it is nothing.
void begin_range(const char* name) noexcept;
void end_range() noexcept;

// From construction to destruction.
class ProfilerRange {
 public:
  explicit ProfilerRange(const char* name) noexcept { begin_range(name); }
  ~ProfilerRange() { end_range(); }
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
};

}  // namespace flashsdk
