// PyTorch's own scaled_dot_product_attention on our kernels: overrides of the flash kernels below it.
#pragma once

#include <Python.h>

namespace flashsdk::torch_sdpa {

// Functions of flashsdk._torch_native. override_sdpa(operators, key) puts our kernels in place of those that aten has
// at a dispatch key, until restore_sdpa(). What ours do not take goes on to those. "for_cpu" are
// _scaled_dot_product_flash_attention_for_cpu and its backward, "flash" the two without "_for_cpu", "packed" are
// _flash_attention_forward and _flash_attention_backward.
extern PyMethodDef const kOverrideSdpa, kRestoreSdpa;

}  // namespace flashsdk::torch_sdpa
