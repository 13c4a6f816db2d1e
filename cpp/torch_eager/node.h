// Attention as autograd records it.
#pragma once

#include <ATen/core/Tensor.h>

#include "problem.h"

namespace flashsdk::torch_eager {

// Makes out, and lse where it is an output, the results of a node whose backward is attention's.
void record(const Problem& p, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, at::Tensor& out,
            at::Tensor& lse, bool lse_is_output);

}  // namespace flashsdk::torch_eager
