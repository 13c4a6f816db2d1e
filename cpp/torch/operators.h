// torch.ops.flashsdk for CPU and CUDA tensors: the kernels of python/flashsdk/_torch_schemas.txt. Through libtorch's
// stable ABI, so that one build serves PyTorch 2.11 and what comes after it.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "core_api.h"

namespace flashsdk::torch_ops {

// What the operators stand on, which Python's extension and a C++ program give each in its way.
struct Host {
  const CoreApi* core;
  bool (*current_stream)(int device, void** stream);  // of a GPU; false: there is none
  void (*raise)(const Failure& failure);              // throws
  decltype(&aoti_torch_empty_strided) empty_strided;  // may throw: the ABI's own forgets of what type an error was
};

// Kernels alone, as Python has defined the operators; or, with `define`, the operators as well: then nothing where they
// are defined already, as by flashsdk.torch.
void register_operators(const Host& host, bool define);

}  // namespace flashsdk::torch_ops
