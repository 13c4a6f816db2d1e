// What goes wrong, and how it is said: every failure is one exception with a code and a one-line message.
#pragma once

#include <stdexcept>
#include <string>

#include "flashsdk/export.h"

namespace flashsdk {

enum class ErrorCode {
  kInvalidArgument,  // the call can never work: a wrong shape, stride, dtype or value
  kUnsupported,      // a valid problem that no kernel of this build implements
  kRuntime,          // the machine failed: out of memory, a CUDA error
};

// The name under which bindings report a code: "invalid_argument", "unsupported" or "runtime".
FLASHSDK_API const char* to_string(ErrorCode code) noexcept;

// Thrown before anything is launched: the outputs of the failing call are untouched.
// what() is one line that names the argument, the value given and what is allowed.
class FLASHSDK_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message);
  ~Error() override;
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace flashsdk
