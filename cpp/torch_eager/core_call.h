// Calls of the core: what they are given of tensors, and the memory of their results.
#pragma once

#include <vector>

#include "problem.h"

namespace flashsdk::torch_eager {

// The stream of a GPU on which PyTorch works now; false: there is none. It says with Python's errors why it does not
// know, which needs the GIL.
bool current_stream(int device, void** stream);

// What the core is told of a tensor; heads_first: of (batch, heads, seqlen, dim). False for what it would not take.
bool view_of(const at::Tensor& t, bool heads_first, TensorView& view);

at::Tensor with_last_contiguous(const at::Tensor& x);

// Makes out and lse, and the seed of dropout that has none. False for what the core would not take.
bool forward(Problem& p, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, at::Tensor& out,
             at::Tensor& lse);

// Makes the gradients of q, k, v and a sink that there is; dlse may be undefined.
bool backward(const Problem& p, const at::Tensor& dout, const at::Tensor& dlse, const Saved& x,
              std::vector<at::Tensor>& gradients);

}  // namespace flashsdk::torch_eager
