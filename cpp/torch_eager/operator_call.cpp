#include "operator_call.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace flashsdk::torch_eager {
namespace {

std::vector<std::int64_t> encoded(const Problem& p) {
  if (!p.band) return {};
  return {p.left, p.right, p.top_left};
}

}  // namespace

const char* forward_operator(const Problem& p) {
  if (p.more()) return "flashsdk::attention_fwd";
  return p.packed ? "flashsdk::mha_varlen_fwd" : "flashsdk::mha_fwd";
}

const char* backward_operator(const Problem& p) {
  if (p.more()) return "flashsdk::attention_bwd";
  return p.packed ? "flashsdk::mha_varlen_bwd" : "flashsdk::mha_bwd";
}

std::vector<at::Tensor> call_operator(const Problem& p, const at::Tensor& dout, const at::Tensor& dlse,
                                      const Saved& x) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(backward_operator(p), "");
  const auto rows_first = [&p](const at::Tensor& t) { return p.heads_first ? t.transpose(1, 2) : t; };
  const auto optional = [](const at::Tensor& t) { return t.defined() ? c10::IValue(t) : c10::IValue(); };
  torch::jit::Stack stack;
  for (const c10::Argument& argument : op.schema().arguments()) {
    const std::string& name = argument.name();
    if (name == "dout")
      stack.emplace_back(rows_first(dout));
    else if (name == "dlse")
      stack.push_back(optional(dlse));
    else if (name == "q")
      stack.emplace_back(rows_first(x[0]));
    else if (name == "k")
      stack.emplace_back(rows_first(x[1]));
    else if (name == "v")
      stack.emplace_back(rows_first(x[2]));
    else if (name == "out")
      stack.emplace_back(rows_first(x[3]));
    else if (name == "lse")
      stack.emplace_back(x[4]);
    else if (name == "sink")
      stack.push_back(optional(p.sink));
    else if (name == "seqused_q")
      stack.push_back(optional(p.seqused_q));
    else if (name == "seqused_k")
      stack.push_back(optional(p.seqused_k));
    else if (name == "block_table")
      stack.push_back(optional(p.block_table));
    else if (name == "k_descale" || name == "v_descale")
      stack.emplace_back();  // no call with them comes here
    else if (name == "num_splits")
      stack.emplace_back(p.num_splits);
    else if (name == "cu_seqlens_q")
      stack.push_back(optional(p.cu_seqlens_q));
    else if (name == "cu_seqlens_k")
      stack.push_back(optional(p.cu_seqlens_k));
    else if (name == "max_seqlen_q")
      stack.emplace_back(p.max_seqlen_q);
    else if (name == "max_seqlen_k")
      stack.emplace_back(p.max_seqlen_k);
    else if (name == "bias")
      stack.push_back(optional(p.bias));
    else if (name == "alibi_slopes")
      stack.push_back(optional(p.alibi_slopes));
    else if (name == "seed")
      stack.push_back(optional(p.seed));
    else if (name == "blocks")
      stack.emplace_back();
    else if (name == "mask")
      stack.emplace_back(encoded(p));
    else if (name == "softmax_scale")
      stack.push_back(p.scaled ? c10::IValue(p.softmax_scale) : c10::IValue());
    else if (name == "softcap")
      stack.emplace_back(p.softcap);
    else if (name == "dropout_p")
      stack.emplace_back(p.dropout_p);
    else if (name == "deterministic")
      stack.emplace_back(p.deterministic);
    else if (name == "backend")
      stack.emplace_back(p.backend);
    else
      TORCH_CHECK(false, "flashsdk: an operator with an argument that is not known here: ", name);
  }
  op.callBoxed(&stack);
  std::vector<at::Tensor> gradients;
  for (const c10::IValue& gradient : stack) gradients.push_back(rows_first(gradient.toTensor()));
  if (!p.sink.defined()) gradients.resize(3);  // attention_bwd has an empty one
  return gradients;
}

}  // namespace flashsdk::torch_eager
