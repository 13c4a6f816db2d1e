// Calls of a kernel that the library does not have: made from its templates, with a policy of one's own.
#pragma once

#include "common/kernel_entry.h"
#include "flashsdk/attention.h"

namespace flashsdk {

// As plan(args), for the kernel `entry`: what cpu/, sm80/ and sm90/ give as forward_entry<…>() and backward_entry<…>().
// Arguments are checked as those of any call. `user` is what the policy finds as MaskParam::user: memory that kernels
// can read, and that lives until the last launch is done. A policy with walks of its own (Policy::kKind) wants
// args.mask = Dense{}; one that is built on a mask of the library's wants that mask. Throws Error where the kernel does
// not take the call: another device, dtype, mask, a larger head_dim, a feature that is not compiled in.
FLASHSDK_API Plan plan_own(const ForwardArgs& args, const ForwardEntry& entry, const void* user);
FLASHSDK_API Plan plan_own(const BackwardArgs& args, const BackwardEntry& entry, const void* user);

}  // namespace flashsdk
