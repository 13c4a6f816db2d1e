#include "sdpa.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core_call.h"
#include "torch_threads.h"

namespace flashsdk::torch_sdpa {
namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
using MaybeDouble = std::optional<double>;

torch_ops::Host g_host;

// ---- tensors; each reader is false for what is not for our kernels

// As the eager way has it; integers, and values that are still to be negated, are not for our kernels.
bool view_of(const Tensor& t, bool heads_first, TensorView& view) {
  if (t.scalar_type() == at::kInt || t.is_neg() || (heads_first && t.dim() != 4)) return false;
  return torch_eager::view_of(t, heads_first, view);
}

// Autograd hands on an undefined tensor for none.
bool given(const MaybeTensor& t) { return t && t->defined(); }

// A mask that broadcasts to (batch, heads, seqlen_q, seqlen_k), of which PyTorch has made a float one.
bool view_of_mask(const MaybeTensor& mask, TensorView& view) {
  if (!given(mask)) return true;
  if (mask->dim() > 4 || mask->dim() < 2 || !view_of(*mask, false, view)) return false;
  const int missing = 4 - view.rank;
  for (int d = 3; d >= 0; --d) {
    view.shape[d] = d < missing ? 1 : view.shape[d - missing];
    view.stride[d] = d < missing ? 0 : view.stride[d - missing];
  }
  view.rank = 4;
  if (view.stride[3] == 0) view.shape[3] = 1;  // one value for all keys
  if (view.shape[3] == 1) view.stride[3] = 1;
  return true;
}

// What a call is about, in the order of aten's schemas.
struct Call {
  const Tensor &q, &k, &v;
  double dropout_p;
  bool is_causal;
  const MaybeTensor& mask;
  MaybeDouble scale;
  Alignment alignment;  // of a causal mask: unlike each other on a CPU and a GPU
};

bool fill(const Call& c, AttentionArgs& args) {
  if (c.dropout_p != 0. || (c.is_causal && given(c.mask))) return false;
  if (!view_of(c.q, true, args.q) || !view_of(c.k, true, args.k) || !view_of(c.v, true, args.v) ||
      !view_of_mask(c.mask, args.bias))
    return false;
  if (args.q.numel() == 0 || args.k.numel() == 0 || args.v.numel() == 0) return false;
  if (c.is_causal) args.mask = Band{std::nullopt, 0, c.alignment};
  if (c.scale) {
    args.softmax_scale = static_cast<float>(*c.scale);
    if (!std::isfinite(*args.softmax_scale)) return false;
  }
  args.deterministic = at::globalContext().deterministicAlgorithms();
  return true;
}

// False where the core refuses.
template <class Args>
bool run(bool (*function)(const Args&, bool, const GpuOptions&, Failure&), const Args& args, const Tensor& q) {
  struct Scratch {
    const Tensor& like;
    Tensor memory;
  } scratch{q, {}};
  GpuOptions gpu;
  if (q.is_cuda()) {
    if (!g_host.current_stream(q.get_device(), &gpu.stream)) return false;
    gpu.owner = &scratch;
    gpu.workspace = [](void* owner, std::size_t size) {
      auto& s = *static_cast<Scratch*>(owner);
      s.memory = at::empty({static_cast<std::int64_t>(size)}, s.like.options().dtype(at::kByte));
      return s.memory.mutable_data_ptr();
    };
  }
  const torch_ops::TorchThreads threads(*g_host.core);
  Failure failure;
  return function(args, /*packed=*/false, gpu, failure);
}

Tensor with_last_contiguous(const Tensor& t) { return t.stride(-1) == 1 ? t : t.contiguous(); }

// In memory (batch, seqlen, heads, dim).
Tensor empty_rows_first(const Tensor& like) {
  const auto n = like.sizes();
  return at::empty_strided(n, {n[1] * n[2] * n[3], n[3], n[1] * n[3], 1}, like.options());
}

bool forward(const Call& c, Tensor& out, Tensor& lse) {
  ForwardArgs args;
  if (!fill(c, args)) return false;
  lse = at::empty({c.q.size(0), c.q.size(1), c.q.size(2)}, c.q.options().dtype(at::kFloat));
  return view_of(out, true, args.out) && view_of(lse, false, args.lse) && run(g_host.core->forward, args, c.q);
}

bool backward(const Call& c, const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& dq,
              const Tensor& dk, const Tensor& dv) {
  BackwardArgs args;
  if (!fill(c, args)) return false;
  const Tensor rows = with_last_contiguous(dout), sums = with_last_contiguous(lse);
  return view_of(rows, true, args.dout) && view_of(out, true, args.out) && view_of(sums, false, args.lse) &&
         view_of(dq, true, args.dq) && view_of(dk, true, args.dk) && view_of(dv, true, args.dv) &&
         run(g_host.core->backward, args, c.q);
}

// ---- aten's kernels, as they were when ours came in their place

class Original {
 public:
  Original(const char* name, c10::DispatchKey key)
      : op_(c10::Dispatcher::singleton().findSchemaOrThrow(name, "")), keys_(key) {
    if (op_.hasComputedKernelForDispatchKey(key)) kernel_.emplace(op_.getComputedKernelForDispatchKey(key));
  }

  template <class... Args>
  torch::jit::Stack operator()(Args&&... args) const {
    TORCH_CHECK_NOT_IMPLEMENTED(kernel_, op_.operator_name(), ": neither flashsdk nor PyTorch has a kernel for this");
    torch::jit::Stack stack;
    torch::jit::push(stack, std::forward<Args>(args)...);
    kernel_->callBoxed(op_, keys_, &stack);
    return stack;
  }

 private:
  c10::OperatorHandle op_;
  c10::DispatchKeySet keys_;
  std::optional<c10::SafeKernelFunction> kernel_;
};

// ---- scaled_dot_product_attention's flash attention on a CPU

// Aten's kernels of both directions. Never given back: a call of another thread may be on its way to them.
struct Originals {
  Originals(const char* forward_name, const char* backward_name, c10::DispatchKey key)
      : forward(forward_name, key), backward(backward_name, key) {}
  Original forward, backward;
};

constexpr const char *kForCpu = "aten::_scaled_dot_product_flash_attention_for_cpu",
                     *kForCpuBackward = "aten::_scaled_dot_product_flash_attention_for_cpu_backward";
std::atomic<const Originals*> g_for_cpu{nullptr};

std::tuple<Tensor, Tensor> for_cpu_forward(const Tensor& q, const Tensor& k, const Tensor& v, double dropout_p,
                                           bool is_causal, const MaybeTensor& attn_mask, MaybeDouble scale) {
  if (v.size(-1) == q.size(-1)) {
    Tensor out = at::empty_like(q), lse;
    if (forward({q, k, v, dropout_p, is_causal, attn_mask, scale, Alignment::kTopLeft}, out, lse)) {
      // (batch, seqlen, heads) in memory, as PyTorch's has it: compiled code relies on that.
      if (lse.size(1) > 1 && lse.size(2) > 1) lse = lse.transpose(1, 2).contiguous().transpose(1, 2);
      return {out, lse};
    }
  }
  const auto results = g_for_cpu.load()->forward(q, k, v, dropout_p, is_causal, attn_mask, scale);
  return {results[0].toTensor(), results[1].toTensor()};
}

std::tuple<Tensor, Tensor, Tensor> for_cpu_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                                    const Tensor& v, const Tensor& out, const Tensor& lse,
                                                    double dropout_p, bool is_causal, const MaybeTensor& attn_mask,
                                                    MaybeDouble scale) {
  if (q.dim() == 4 && k.dim() == 4 && v.dim() == 4) {
    const Tensor dq = empty_rows_first(q), dk = empty_rows_first(k), dv = empty_rows_first(v);
    if (backward({q, k, v, dropout_p, is_causal, attn_mask, scale, Alignment::kTopLeft}, dout, out, lse, dq, dk, dv))
      return {dq, dk, dv};
  }
  const auto results = g_for_cpu.load()->backward(dout, q, k, v, out, lse, dropout_p, is_causal, attn_mask, scale);
  return {results[0].toTensor(), results[1].toTensor(), results[2].toTensor()};
}

// ---- and on a GPU

constexpr const char *kFlash = "aten::_scaled_dot_product_flash_attention",
                     *kFlashBackward = "aten::_scaled_dot_product_flash_attention_backward";
std::atomic<const Originals*> g_flash{nullptr};

using FlashResult = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

FlashResult flash_forward(const Tensor& q, const Tensor& k, const Tensor& v, double dropout_p, bool is_causal,
                          bool return_debug_mask, MaybeDouble scale) {
  if (!return_debug_mask && q.dim() == 4 && v.size(-1) == q.size(-1)) {
    Tensor out = at::empty_like(q), lse;
    if (forward({q, k, v, dropout_p, is_causal, std::nullopt, scale, Alignment::kBottomRight}, out, lse)) {
      // Without dropout nobody reads its state.
      const auto state = q.options().dtype(at::kUInt64);
      return {out,
              lse,
              {},
              {},
              q.size(2),
              k.size(2),
              at::empty({2}, state),
              at::empty({}, state),
              at::empty({0}, q.options())};
    }
  }
  const auto r = g_flash.load()->forward(q, k, v, dropout_p, is_causal, return_debug_mask, scale);
  return {r[0].toTensor(), r[1].toTensor(), r[2].toTensor(), r[3].toTensor(), r[4].toSymInt(),
          r[5].toSymInt(), r[6].toTensor(), r[7].toTensor(), r[8].toTensor()};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const Tensor& out, const Tensor& lse, const Tensor& cum_seq_q,
                                                  const Tensor& cum_seq_k, c10::SymInt max_q, c10::SymInt max_k,
                                                  double dropout_p, bool is_causal, const Tensor& philox_seed,
                                                  const Tensor& philox_offset, MaybeDouble scale) {
  const Tensor dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
  if ((!cum_seq_q.defined() || cum_seq_q.numel() == 0) &&
      backward({q, k, v, dropout_p, is_causal, std::nullopt, scale, Alignment::kBottomRight}, dout, out, lse, dq, dk,
               dv))
    return {dq, dk, dv};
  const auto r = g_flash.load()->backward(dout, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                                          is_causal, philox_seed, philox_offset, scale);
  return {r[0].toTensor(), r[1].toTensor(), r[2].toTensor()};
}

// ---- from Python

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// The overrides of each pair of operators, with which they go.
std::unique_ptr<torch::Library> g_for_cpu_library, g_flash_library;

template <class Forward, class Backward>
void override_with(std::unique_ptr<torch::Library>& library, std::atomic<const Originals*>& originals,
                   c10::DispatchKey key, const char* forward_name, Forward forward, const char* backward_name,
                   Backward backward) {
  if (library != nullptr) return;
  originals.store(new Originals(forward_name, backward_name, key));
  auto overrides = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  Silent silent;  // PyTorch warns of every override
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  overrides->impl(forward_name, forward);
  overrides->impl(backward_name, backward);
  library = std::move(overrides);
}

bool is_flash(const char* operators) { return std::string(operators) == "flash"; }

PyObject* override_sdpa(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char *operators, *key_name;
  if (!PyArg_ParseTuple(args, "ss", &operators, &key_name)) return nullptr;
  const c10::DispatchKey key = c10::parseDispatchKey(key_name);
  if (is_flash(operators)) {
    override_with(g_flash_library, g_flash, key, kFlash, TORCH_FN(flash_forward), kFlashBackward,
                  TORCH_FN(flash_backward));
  } else {
    override_with(g_for_cpu_library, g_for_cpu, key, kForCpu, TORCH_FN(for_cpu_forward), kForCpuBackward,
                  TORCH_FN(for_cpu_backward));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* restore_sdpa(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char* operators;
  if (!PyArg_ParseTuple(args, "s", &operators)) return nullptr;
  (is_flash(operators) ? g_flash_library : g_for_cpu_library).reset();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace

PyMethodDef const kOverrideSdpa{"override_sdpa", override_sdpa, METH_VARARGS, nullptr};
PyMethodDef const kRestoreSdpa{"restore_sdpa", restore_sdpa, METH_VARARGS, nullptr};

void set_sdpa_host(const torch_ops::Host& host) { g_host = host; }

}  // namespace flashsdk::torch_sdpa
