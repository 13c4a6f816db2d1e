// From Python's arguments. Each reader is false, and no error set, for what it does not know: no number of NumPy's, no
// subclass of Tensor.
#pragma once

#include <Python.h>

#include <array>

#include "problem.h"

namespace flashsdk::torch_eager {

bool read_tensor(PyObject* given, at::Tensor& t);
bool read_constant(PyObject* given, at::Tensor& t);  // None, or one that requires no gradient, which would be lost
bool read_number(PyObject* given, double& x);
bool read_integer(PyObject* given, std::int64_t& x);
bool read_flag(PyObject* given, bool& x);

bool read_qkv(PyObject* const* given, int rank, std::array<at::Tensor, 3>& qkv);
bool read_lengths(PyObject* const* given, Problem& p);  // cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
bool read_more(PyObject* const* given, Problem& p);     // sink, seqused_q, seqused_k, block_table, num_splits
bool read_mask(PyObject* given, Problem& p);            // None, Dense or Band
bool read_scale(PyObject* given, Problem& p);
bool read_seed(PyObject* given, Problem& p);                    // after dropout_p: without dropout none is held
bool read_deterministic(PyObject* given, bool& deterministic);  // None is what PyTorch has been told
bool read_backend(PyObject* given, std::string& backend);

}  // namespace flashsdk::torch_eager
