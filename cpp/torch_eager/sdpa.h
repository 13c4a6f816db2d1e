// PyTorch's own scaled_dot_product_attention on our kernels: overrides of the flash kernels below it.
#pragma once

#include <Python.h>

#include "operators.h"

namespace flashsdk::torch_sdpa {

// Functions of flashsdk._torch_native. override_sdpa(operators, key) puts our kernels in place of those that aten has
// at a dispatch key, until restore_sdpa(operators). What ours do not take goes on to those. "for_cpu" are
// _scaled_dot_product_flash_attention_for_cpu and its backward, "flash" the two without "_for_cpu".
extern PyMethodDef const kOverrideSdpa, kRestoreSdpa;

// Before either is called.
void set_sdpa_host(const torch_ops::Host& host);

}  // namespace flashsdk::torch_sdpa
