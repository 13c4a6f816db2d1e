// One call, validated and with its kernel chosen, ready to launch.
#pragma once

#include <cstddef>

#include "common/kernel_entry.h"
#include "flashsdk/attention.h"

namespace flashsdk {

template <class Params>
struct Plan {
  Params params;  // what the kernel computes: pack_heads.h
  const KernelEntry<Params>* entry;
  int num_threads;             // that the workspace is for
  std::size_t workspace_size;  // bytes

  // Throws when the workspace does not do; nothing has been written then.
  void launch(const LaunchOptions& options) const;
};

extern template struct Plan<ForwardParams>;
extern template struct Plan<BackwardParams>;

// `packed`: the call was made as mha_varlen_…, which the arguments must agree with.
Plan<ForwardParams> plan(const ForwardArgs& args, bool packed);
Plan<BackwardParams> plan(const BackwardArgs& args, bool packed);

}  // namespace flashsdk
