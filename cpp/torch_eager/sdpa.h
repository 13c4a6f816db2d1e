// PyTorch's own scaled_dot_product_attention on our kernels: overrides of the flash and efficient kernels below it.
#pragma once

#include <Python.h>

namespace flashsdk::torch_sdpa {

// Functions of flashsdk._torch_native. override_sdpa(operators, key) puts our kernels in place of those that aten has
// at a dispatch key, until restore_sdpa(). What ours do not take goes on to those. "for_cpu" are
// _scaled_dot_product_flash_attention_for_cpu and its backward, "flash" the two without "_for_cpu", "efficient" are
// _scaled_dot_product_efficient_attention and its backward, "packed" are _flash_attention_forward and
// _flash_attention_backward.
//
// watch_sdpa(function) calls function(is_backward, taken, q, k, v, mask, band, scale, dropout_p, packed) behind each
// call of those: q, k and v (batch, seqlen, heads, dim) or (total, heads, dim), band (left, right, top_left) or None,
// packed (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) or None. What it raises is told on stderr.
extern PyMethodDef const kOverrideSdpa, kRestoreSdpa, kWatchSdpa;

}  // namespace flashsdk::torch_sdpa
