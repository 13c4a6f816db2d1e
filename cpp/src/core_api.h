// The core for libraries beside it that do not link it: a table of functions. An Error comes back as a Failure; other
// exceptions, such as those of a caller's workspace, pass.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "flashsdk/attention.h"

namespace flashsdk {

struct Failure {
  const char* code = "";  // as to_string(ErrorCode) names it
  std::string message;    // one line
};

// What a call needs besides its arguments; on a CPU no stream and no workspace.
struct GpuOptions {
  void* stream = nullptr;
  void* (*workspace)(void* owner, std::size_t size) = nullptr;  // 256-byte aligned; exceptions of it do pass
  // Where q is, {seed, offset} of dropout in place of the arguments'. Asked when all checks have passed: a call that is
  // refused draws none.
  const std::uint64_t* (*seed)(void* owner) = nullptr;
  void* owner = nullptr;
};

struct CoreApi {
  // Of the structs below: where they are not the same, the two sides are of different builds.
  std::size_t layout;
  // False on failure: then the outputs are as they were. `packed`: made as mha_varlen_…
  bool (*forward)(const ForwardArgs& args, bool packed, const GpuOptions& options, Failure& failure);
  bool (*backward)(const BackwardArgs& args, bool packed, const GpuOptions& options, Failure& failure);
  const Executor* (*use_executor)(const Executor* executor) noexcept;

  static constexpr std::size_t kLayout = sizeof(ForwardArgs) * 65536 + sizeof(BackwardArgs) + 1;
};

FLASHSDK_API const CoreApi& core_api() noexcept;

}  // namespace flashsdk
