// The core for what stands beside it, the Python extension too: a table of functions. The shared library shows nothing
// of its inside but this and what a user's own kernels call. An Error comes back as a Failure; other exceptions, such
// as those of a caller's workspace, pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "flashsdk/attention.h"
#include "peak.h"

namespace flashsdk {

struct Failure {
  const char* code = "";  // as to_string(ErrorCode) names it
  std::string message;    // one line
};

// What a call needs besides its arguments; on a CPU no stream and no workspace. Functions are called in the order seed,
// current_stream, workspace, at_launch, when all checks have passed, and their exceptions do pass.
struct GpuOptions {
  void* stream = nullptr;
  void* (*current_stream)(void* owner) = nullptr;               // in place of `stream`
  void* (*workspace)(void* owner, std::size_t size) = nullptr;  // 256-byte aligned
  // Where q is, {seed, offset} of dropout in place of the arguments'. A call that is refused draws none.
  const std::uint64_t* (*seed)(void* owner) = nullptr;
  void (*at_launch)(void* owner) = nullptr;  // nothing is asked after it: a lock may go
  void* owner = nullptr;
};

struct CoreApi {
  // Of the structs below: where they are not the same, the two sides are of different builds.
  std::size_t layout;
  // False on failure: then the outputs are as they were. `packed`: made as mha_varlen_…
  bool (*forward)(const ForwardArgs& args, bool packed, const GpuOptions& options, Failure& failure);
  bool (*backward)(const BackwardArgs& args, bool packed, const GpuOptions& options, Failure& failure);
  // As kv_append, on a GPU on the stream.
  bool (*append)(const KvAppendArgs& args, void* stream, Failure& failure);
  const Executor* (*use_executor)(const Executor* executor) noexcept;
  // Waits until a stream of the device has done all that is in it. Null in a build without CUDA.
  void (*synchronize)(void* stream, int device);
  // profiler_range.h
  void (*begin_range)(const char* name) noexcept;
  void (*end_range)() noexcept;
  double (*measure_peak)(PeakKind kind, const std::string& isa, int num_threads, double seconds);

  static constexpr std::size_t kLayout =
      (sizeof(ForwardArgs) * 65536 + sizeof(BackwardArgs)) * 65536 + sizeof(GpuOptions) + sizeof(KvAppendArgs);
};

FLASHSDK_API const CoreApi& core_api() noexcept;

}  // namespace flashsdk
