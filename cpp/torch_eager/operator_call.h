// The operators of torch.ops.flashsdk, for those who look on and for what the core refuses.
#pragma once

#include <vector>

#include "problem.h"

namespace flashsdk::torch_eager {

// mha_bwd or mha_varlen_bwd through the dispatcher: the gradients of q, k and v. dlse may be undefined.
std::vector<at::Tensor> call_operator(const Problem& p, const at::Tensor& dout, const at::Tensor& dlse, const Saved& x);

}  // namespace flashsdk::torch_eager
