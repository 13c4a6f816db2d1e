// From what a caller says to what a kernel trusts. The one place where arguments are checked.
#pragma once

#include <optional>

#include "common/kernel_entry.h"
#include "flashsdk/attention.h"

namespace flashsdk {

// Whether tensors beyond q, k and v must be given: a launch needs them, a question about it does not.
enum class Completeness : std::uint8_t { kLaunch, kQuery };

// Throw Error on the first argument that is wrong. The mask is reduced to the simplest kind that says the same.
ForwardParams validate(const ForwardArgs& args, Completeness completeness = Completeness::kLaunch);
BackwardParams validate(const BackwardArgs& args, Completeness completeness = Completeness::kLaunch);

// Throws where this build has no kernels for a device, on which `name` is.
void check_kernels_for(const char* name, Device device);

enum class Operation : std::uint8_t { kForward, kBackward, kAppend };

// Throw where no kernel for a device has heads so wide: the tables of kernels say how wide they are. q's and k's, v's.
void check_head_dim(const char* name, std::int64_t head_dim, Operation operation, Device device);
void check_head_dim_v(const char* name, std::int64_t head_dim_v, Operation operation, Device device);

// The backend the caller insists on, if any. Fits the device of the tensors.
std::optional<Backend> forced_backend(const AttentionArgs& args);

// Largest extents that kernels count in 32 bits with room to round up.
inline constexpr std::int64_t kMaxRows = std::int64_t{1} << 30;

}  // namespace flashsdk
