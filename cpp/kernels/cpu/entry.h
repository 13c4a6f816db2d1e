// A row of the kernel table from a CPU kernel's template arguments.
#pragma once

#include "common/kernel_entry.h"
#include "cpu/traits.h"

#define FLASHSDK_STRINGIFY_(x) #x
#define FLASHSDK_STRINGIFY(x) FLASHSDK_STRINGIFY_(x)

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

// The CPU kernels take every problem their key admits.
template <class Params, class Kernel, class T, class Policy>
consteval KernelEntry<Params> make_entry(int head_dim, Features features) {
  return {
      {Backend::kCpu, FLASHSDK_STRINGIFY(FLASHSDK_ISA_NS), kDTypeOf<T>, head_dim, head_dim, Policy::kKind, features},
      Kernel::kTile,
      nullptr,
      &Kernel::workspace_size,
      &Kernel::launch};
}

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
