// flashsdk::torch::attention: the operators of libflashsdk_torch with gradients, for programs of libtorch's C++ API.
//
// libflashsdk_torch itself stands on PyTorch's stable ABI, which has no autograd. This header is compiled with the
// program, against the PyTorch at hand; the program links or loads libflashsdk_torch.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace flashsdk::torch {

struct AttentionOptions {
  static constexpr std::int64_t kUnlimited = std::numeric_limits<std::int32_t>::max();

  // Keys before and behind a query's own that it sees, and whether query 0 stands at key 0 (top left) or the last
  // query at the last key. Empty: all keys.
  std::vector<std::int64_t> mask;
  std::optional<at::Tensor> bias;          // (batch, num_heads, seqlen_q, seqlen_k), each of them or 1; has no gradient
  std::optional<at::Tensor> alibi_slopes;  // float32 (num_heads) or (batch, num_heads)
  std::optional<double> softmax_scale;     // head_dim^-1/2 when absent
  double softcap = 0.;
  double dropout_p = 0.;
  std::optional<at::Tensor> seed;  // of dropout: int64 {seed, offset} where q is; drawn when absent
  bool deterministic = false;
  std::string backend;  // "" is the best that fits

  static AttentionOptions causal() {
    AttentionOptions options;
    options.mask = {kUnlimited, 0, /*top_left=*/0};
    return options;
  }
};

namespace detail {

using Maybe = const std::optional<at::Tensor>&;

class Attention : public ::torch::autograd::Function<Attention> {
 public:
  static ::torch::autograd::variable_list forward(::torch::autograd::AutogradContext* context, const at::Tensor& q,
                                                  const at::Tensor& k, const at::Tensor& v, AttentionOptions options) {
    using Signature = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&, Maybe,
                                                         Maybe, Maybe, Maybe, c10::SymIntArrayRef,
                                                         std::optional<double>, double, double, bool, std::string_view);
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("flashsdk::mha_fwd", "").typed<Signature>();
    if (options.dropout_p != 0. && !options.seed)
      options.seed = at::randint(std::numeric_limits<std::int64_t>::max(), {2}, q.options().dtype(at::kLong));
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [out, lse] = op.call(q, k, v, options.bias, options.alibi_slopes, options.seed, std::nullopt,
                              c10::fromIntArrayRefSlow(options.mask), options.softmax_scale, options.softcap,
                              options.dropout_p, options.deterministic, options.backend);
    context->set_materialize_grads(false);  // no gradient of lse for those who do not use it
    context->save_for_backward({q, k, v, out, lse, options.bias.value_or(at::Tensor()),
                                options.alibi_slopes.value_or(at::Tensor()), options.seed.value_or(at::Tensor())});
    auto& saved = context->saved_data;
    saved["mask"] = options.mask;
    saved["softmax_scale"] = options.softmax_scale;
    saved["softcap"] = options.softcap;
    saved["dropout_p"] = options.dropout_p;
    saved["deterministic"] = options.deterministic;
    saved["backend"] = options.backend;
    return {out, lse};
  }

  static ::torch::autograd::variable_list backward(::torch::autograd::AutogradContext* context,
                                                   ::torch::autograd::variable_list grads) {
    using Signature = std::tuple<at::Tensor, at::Tensor, at::Tensor>(
        const at::Tensor&, Maybe, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
        const at::Tensor&, Maybe, Maybe, Maybe, Maybe, c10::SymIntArrayRef, std::optional<double>, double, double, bool,
        std::string_view);
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("flashsdk::mha_bwd", "").typed<Signature>();
    const auto tensors = context->get_saved_variables();
    const at::Tensor &q = tensors[0], &k = tensors[1], &v = tensors[2], &out = tensors[3], &lse = tensors[4];
    // Gradients that are recorded themselves: below the dispatcher they would be constants, in silence.
    const auto recorded = [](const at::Tensor& t) { return t.defined() && t.requires_grad(); };
    TORCH_CHECK(!at::GradMode::is_enabled() ||
                    !(std::any_of(grads.begin(), grads.end(), recorded) || recorded(q) || recorded(k) || recorded(v)),
                "create_graph: True; False, as attention has no second derivative");
    const auto given = [](const at::Tensor& t) { return t.defined() ? std::optional(t) : std::nullopt; };
    auto& saved = context->saved_data;
    const std::vector<std::int64_t> mask = saved["mask"].toIntVector();
    const std::string backend = saved["backend"].toStringRef();
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [dq, dk, dv] =
        op.call(grads[0].defined() ? grads[0] : at::zeros_like(out), given(grads[1]), q, k, v, out, lse,
                given(tensors[5]), given(tensors[6]), given(tensors[7]), std::nullopt, c10::fromIntArrayRefSlow(mask),
                saved["softmax_scale"].toOptional<double>(), saved["softcap"].toDouble(), saved["dropout_p"].toDouble(),
                saved["deterministic"].toBool(), backend);
    return {dq, dk, dv, at::Tensor()};
  }
};

}  // namespace detail

// out (batch, seqlen_q, num_heads, head_dim_v) and lse, float32 (batch, num_heads, seqlen_q), of q (batch, seqlen_q,
// num_heads, head_dim), k (batch, seqlen_k, num_heads_kv, head_dim) and v (…, head_dim_v). Gradients reach q, k and v,
// through both results. Throws std::runtime_error, one line, for what is not allowed.
inline std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                    const AttentionOptions& options = {}) {
  auto results = detail::Attention::apply(q, k, v, options);
  return {results[0], results[1]};
}

}  // namespace flashsdk::torch
