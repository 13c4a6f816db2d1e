// The operators of torch.ops.flashsdk, for those who look on and for what the core refuses.
#pragma once

#include <vector>

#include "problem.h"

namespace flashsdk::torch_eager {

// The names of those that do what a call does.
const char* forward_operator(const Problem& p);
const char* backward_operator(const Problem& p);

// The backward one through the dispatcher: the gradients of q, k, v and a sink that there is. dlse may be undefined.
std::vector<at::Tensor> call_operator(const Problem& p, const at::Tensor& dout, const at::Tensor& dlse, const Saved& x);

}  // namespace flashsdk::torch_eager
