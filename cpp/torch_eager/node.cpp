#include "node.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <array>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core_call.h"
#include "module.h"
#include "operator_call.h"
#include "watched.h"

namespace flashsdk::torch_eager {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

#if __has_include(<torch/csrc/autograd/node.h>)  // PyTorch 2.13
template <class T>
c10::intrusive_ptr<T> make_node() {
  return c10::make_intrusive<T>();
}
#else
template <class T>
std::shared_ptr<T> make_node() {
  return {new T, torch::autograd::deleteNode};
}
#endif

class AttentionBackward final : public Node {
 public:
  std::string name() const override { return "FlashsdkAttentionBackward"; }

  // After set_history() of out. What hooks see has the order and the shapes of what the operators save: activation
  // checkpointing compares the lists, and somebody may look on at one of its two forwards alone.
  void save(const Problem& p, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
            const at::Tensor& lse, bool lse_is_output) {
    problem_ = p;
    Problem::visit_tensors(problem_, [](at::Tensor& t) { t.reset(); });
    Saved x{q, k, v, out, lse};
    Problem::visit_tensors(p, [&x, i = kLse](const at::Tensor& t) mutable { x[++i] = t; });
    transposed_ = p.heads_first && at::SavedTensorDefaultHooks::get_hooks().has_value();
    lse_is_output_ = lse_is_output;
    if (transposed_) x[kOut] = out.detach();  // a view of the output itself would hold this node
    for (int i = 0; i < kSaved; ++i)
      if (x[i].defined())
        saved_[i] = SavedVariable(transposed_ && i <= kOut ? x[i].transpose(1, 2) : x[i], is_output(i));
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard lock(mutex_);
    return gradients(problem_, unpacked(), grads);
  }

  void release_variables() override {
    const std::lock_guard lock(mutex_);
    for (SavedVariable& s : saved_) s.reset_data();
  }

  // Compiled autograd: the node's fields, and a function of them to trace with fake tensors, which calls the operator.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    for (int i = 0; i < kSaved; ++i) args.collect(saved_[i], is_output(i));
    Problem::visit_numbers(problem_, [&args](const auto& x) { args.collect(x); });
  }
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& saved) override {
    using namespace torch::dynamo::autograd;
    for (SavedVariable& s : saved_) saved.before(s);
    PackedArgs packed;
    for (const at::Tensor& t : unpacked()) packed.pack(t);
    Problem::visit_numbers(problem_, [&packed](const auto& x) { packed.pack(x); });
    std::vector<at::TypePtr> schema;
    for (const c10::IValue& x : packed.vec())
      schema.push_back(x.isTensor() ? at::TypePtr(at::TensorType::get()) : x.type());
    const auto& compiler = getPyCompilerInterface();
    const std::string name = compiler->bind_function(saved.get_py_compiler(), this->name(), functional, schema,
                                                     /*is_custom_function=*/true, /*is_traceable=*/true);
    const auto metadata = IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
        get_input_metadata(next_edges()));
    variable_list results =
        compiler->call_function(saved.get_py_compiler(), "apply_functional", name, grads, packed.vec(), metadata);
    for (SavedVariable& s : saved_) saved.after(s);
    return results;
  }

 private:
  bool is_output(int i) const { return (i == kOut && !transposed_) || (i == kLse && lse_is_output_); }

  Saved unpacked() {
    Saved x;
    for (int i = 0; i < kSaved; ++i) x[i] = saved_[i].unpack(getptr());
    for (int i = 0; transposed_ && i <= kOut; ++i) x[i] = x[i].transpose(1, 2);
    return x;
  }

  static variable_list functional(const variable_list& grads, const std::vector<c10::IValue>& args) {
    torch::dynamo::autograd::PackedArgs packed(args);
    Saved x;
    for (at::Tensor& t : x) t = packed.unpack<at::Tensor>();
    Problem p;
    Problem::visit_numbers(p, [&packed](auto& n) { n = packed.unpack<std::decay_t<decltype(n)>>(); });
    return gradients(p, x, grads);
  }

  static variable_list gradients(const Problem& numbers, const Saved& x, const variable_list& grads) {
    Problem p = numbers;
    Problem::visit_tensors(p, [&x, i = kLse](at::Tensor& t) mutable { t = x[++i]; });
    if (p.dropout_p != 0.) p.seed = where_it_is_read(p.seed, x[0]);
    at::Tensor dout = grads[0].defined() ? grads[0] : at::zeros_like(x[kOut]);  // zeros: only lse is used
    const at::Tensor dlse = grads.size() > 1 ? grads[1] : at::Tensor();
    bool ordinary = unwatched() && plain(dout) && plain_or_none(dlse) && !recorded(dout, dlse);
    for (const at::Tensor& t : x) ordinary = ordinary && plain_or_none(t) && !recorded(t);
    variable_list results;
    if (ordinary && backward(p, dout, dlse, x, results)) return results;
    return call_operator(p, dout, dlse, x);
  }

  // What a hook gave back for the seed. Of one on meta the operator would make gradients without a value.
  static at::Tensor where_it_is_read(const at::Tensor& seed, const at::Tensor& q) {
    if (!seed.defined() || seed.device().is_meta())
      raise({"invalid_argument", "seed: another tensor; that of the forward"});
    return seed.to(seed.sym_numel() == 1 ? at::Device(at::kCPU) : q.device());
  }

  Problem problem_;          // without its tensors
  bool transposed_ = false;  // q, k, v and out were saved (batch, seqlen, num_heads, head_dim), unlike the call's
  bool lse_is_output_ = false;
  std::array<SavedVariable, kSaved> saved_;
};

}  // namespace

void record(const Problem& p, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, at::Tensor& out,
            at::Tensor& lse, bool lse_is_output) {
  const auto node = make_node<AttentionBackward>();
  using torch::autograd::collect_next_edges;
  node->set_next_edges(p.sink.defined() ? collect_next_edges(q, k, v, p.sink) : collect_next_edges(q, k, v));
  torch::autograd::set_history(out, node);
  if (lse_is_output) torch::autograd::set_history(lse, node);
  node->save(p, q, k, v, out, lse, lse_is_output);
}

}  // namespace flashsdk::torch_eager
