// The functions of flashsdk._torch_native, each with its arguments by position. nullptr, and no error set, where a call
// is not for this way.
#pragma once

#include <Python.h>

namespace flashsdk::torch_eager {

// (q, k, v, mask, bias, alibi_slopes, softmax_scale, softcap, dropout_p, seed, return_lse, deterministic, backend), and
// the four of packed sequences behind them.
PyObject* attention(PyObject* const* given, Py_ssize_t count);

// (q, k, v, None or the tuple of the four of packed sequences, dropout_p, softmax_scale, causal, window_size, softcap,
// alibi_slopes, deterministic, return_attn_probs)
PyObject* flash_attn(PyObject* const* given, Py_ssize_t count);

// (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa), each (batch, heads, seqlen, dim): what is to
// be broadcast otherwise than attention itself does has to be expanded first.
PyObject* scaled_dot_product_attention(PyObject* const* given, Py_ssize_t count);

}  // namespace flashsdk::torch_eager
