// Who looks on: a call goes past PyTorch's dispatcher only where nobody but autograd would see it there.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace flashsdk::torch_eager {

// Modes, tracers and the transforms of torch.func have keys of their own in what a thread includes.
inline bool unwatched() {
  return (c10::impl::tls_local_dispatch_key_set().included_ - c10::default_included_set).empty() &&
         !at::impl::torch_function_mode_enabled();
}

// Whether memory shows the values and autograd is all that wants to know: no subclass, no wrapper of a transform, no
// view yet to be negated, none on meta.
inline bool plain(const at::Tensor& t) {
  using K = c10::DispatchKey;
  constexpr c10::DispatchKeySet kPlain(
      {K::CPU, K::AutogradCPU, K::AutocastCPU, K::CUDA, K::AutogradCUDA, K::AutocastCUDA, K::ADInplaceOrView});
  return (t.key_set().raw_repr() & ~kPlain.raw_repr()) == 0 && !t._fw_grad(0).defined();
}

inline bool plain_or_none(const at::Tensor& t) { return !t.defined() || plain(t); }

template <class... Tensors>
bool recorded(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && ((tensors.defined() && tensors.requires_grad()) || ...);
}

}  // namespace flashsdk::torch_eager
