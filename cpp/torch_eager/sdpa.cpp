#include "sdpa.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "sdpa_call.h"

namespace flashsdk::torch_sdpa {
namespace {

// ---- aten's kernels, as they were when ours came in their place

class Original {
 public:
  Original(const char* name, c10::DispatchKey key)
      : op_(c10::Dispatcher::singleton().findSchemaOrThrow(name, "")), keys_(key) {
    if (op_.hasComputedKernelForDispatchKey(key)) kernel_.emplace(op_.getComputedKernelForDispatchKey(key));
  }

  // Of the arguments on the stack makes the results on it.
  void run(torch::jit::Stack& stack) const {
    TORCH_CHECK_NOT_IMPLEMENTED(kernel_, op_.operator_name(), ": neither flashsdk nor PyTorch has a kernel for this");
    kernel_->callBoxed(op_, keys_, &stack);
  }

  template <class... Args>
  torch::jit::Stack operator()(Args&&... args) const {
    torch::jit::Stack stack;
    torch::jit::push(stack, std::forward<Args>(args)...);
    run(stack);
    return stack;
  }

 private:
  c10::OperatorHandle op_;
  c10::DispatchKeySet keys_;
  std::optional<c10::SafeKernelFunction> kernel_;
};

// Aten's kernels of both directions. Never given back: a call of another thread may be on its way to them.
struct Originals {
  Originals(const char* forward_name, const char* backward_name, c10::DispatchKey key)
      : forward(forward_name, key), backward(backward_name, key) {}
  Original forward, backward;
};

// Ours in the place of a pair of aten's kernels, and those.
struct Override {
  std::unique_ptr<torch::Library> library;
  std::atomic<const Originals*> originals{nullptr};

  const Originals* operator->() const { return originals.load(); }
};

const MaybeTensor kNone;

// What is_causal stands for, which is unlike on a CPU and on a GPU.
std::optional<Band> causal(bool is_causal, Alignment alignment) {
  if (!is_causal) return std::nullopt;
  return Causal(alignment);
}

// What torch.compile has compiled comes here even where sdpa_kernel has turned flash attention off since: PyTorch does
// not guard against that. Then it is not ours either. Memory-efficient attention asks the same: who allows that alone
// asks for PyTorch's own.
bool turned_off() { return !at::globalContext().userEnabledFlashSDP(); }

Tensor empty_as(const Tensor& like, at::IntArrayRef shape, at::ScalarType dtype) {
  return at::empty(shape, like.options().dtype(dtype));
}

// ---- scaled_dot_product_attention's flash attention on a CPU

// In memory (batch, seqlen, heads, dim).
Tensor empty_rows_first(const Tensor& like) {
  const auto n = like.sizes();
  return at::empty_strided(n, {n[1] * n[2] * n[3], n[3], n[1] * n[3], 1}, like.options());
}

constexpr const char *kForCpu = "aten::_scaled_dot_product_flash_attention_for_cpu",
                     *kForCpuBackward = "aten::_scaled_dot_product_flash_attention_for_cpu_backward";
Override g_for_cpu;

// Of queries that see no key lse becomes 0: where PyTorch's backward comes instead of ours, such as behind a `with` of
// enable(), it takes exp(-inf - lse), which would be NaN.
void clear_blind_rows(const Tensor& lse) {
  auto* const values = lse.mutable_data_ptr<float>();
  std::replace(values, values + lse.numel(), -std::numeric_limits<float>::infinity(), 0.f);
}

std::tuple<Tensor, Tensor> for_cpu_forward(const Tensor& q, const Tensor& k, const Tensor& v, double dropout_p,
                                           bool is_causal, const MaybeTensor& attn_mask, MaybeDouble scale) {
  if (!turned_off() && v.size(-1) == q.size(-1)) {
    Tensor out = at::empty_like(q), lse;
    if (forward({q, k, v, dropout_p, causal(is_causal, Alignment::kTopLeft), scale, attn_mask}, out, lse)) {
      if (attn_mask && attn_mask->defined()) clear_blind_rows(lse);
      // (batch, seqlen, heads) in memory, as PyTorch's has it: compiled code relies on that.
      if (lse.size(1) > 1 && lse.size(2) > 1) lse = lse.transpose(1, 2).contiguous().transpose(1, 2);
      return {out, lse};
    }
  }
  const auto results = g_for_cpu->forward(q, k, v, dropout_p, is_causal, attn_mask, scale);
  return {results[0].toTensor(), results[1].toTensor()};
}

std::tuple<Tensor, Tensor, Tensor> for_cpu_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                                    const Tensor& v, const Tensor& out, const Tensor& lse,
                                                    double dropout_p, bool is_causal, const MaybeTensor& attn_mask,
                                                    MaybeDouble scale) {
  if (!turned_off() && q.dim() == 4 && k.dim() == 4 && v.dim() == 4) {
    const Tensor dq = empty_rows_first(q), dk = empty_rows_first(k), dv = empty_rows_first(v);
    const Call call{q, k, v, dropout_p, causal(is_causal, Alignment::kTopLeft), scale, attn_mask};
    if (backward(call, dout, out, lse, dq, dk, dv)) return {dq, dk, dv};
  }
  const auto results = g_for_cpu->backward(dout, q, k, v, out, lse, dropout_p, is_causal, attn_mask, scale);
  return {results[0].toTensor(), results[1].toTensor(), results[2].toTensor()};
}

// ---- and on a GPU

constexpr const char *kFlash = "aten::_scaled_dot_product_flash_attention",
                     *kFlashBackward = "aten::_scaled_dot_product_flash_attention_backward";
Override g_flash;

using FlashResult = std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

FlashResult flash_forward(const Tensor& q, const Tensor& k, const Tensor& v, double dropout_p, bool is_causal,
                          bool return_debug_mask, MaybeDouble scale) {
  if (!turned_off() && !return_debug_mask && q.dim() == 4 && v.size(-1) == q.size(-1)) {
    Tensor out = at::empty_like(q), lse;
    if (forward({q, k, v, dropout_p, causal(is_causal, Alignment::kBottomRight), scale, kNone}, out, lse)) {
      const DropoutState dropout(lse, q.scalar_type());
      return {out, lse, {}, {}, q.size(2), k.size(2), dropout.state, dropout.unused, dropout.mask};
    }
  }
  const auto r = g_flash->forward(q, k, v, dropout_p, is_causal, return_debug_mask, scale);
  return {r[0].toTensor(), r[1].toTensor(), r[2].toTensor(), r[3].toTensor(), r[4].toSymInt(),
          r[5].toSymInt(), r[6].toTensor(), r[7].toTensor(), r[8].toTensor()};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                                                  const Tensor& out, const Tensor& lse, const Tensor& cum_seq_q,
                                                  const Tensor& cum_seq_k, c10::SymInt max_q, c10::SymInt max_k,
                                                  double dropout_p, bool is_causal, const Tensor& philox_seed,
                                                  const Tensor& philox_offset, MaybeDouble scale) {
  const Tensor dq = at::empty_like(q), dk = at::empty_like(k), dv = at::empty_like(v);
  const Call call{q, k, v, dropout_p, causal(is_causal, Alignment::kBottomRight), scale, kNone};
  const bool is_packed = cum_seq_q.defined() && cum_seq_q.numel() != 0;
  if (!turned_off() && !is_packed && backward(call, dout, out, lse, dq, dk, dv)) return {dq, dk, dv};
  const auto r = g_flash->backward(dout, q, k, v, out, lse, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
                                   philox_seed, philox_offset, scale);
  return {r[0].toTensor(), r[1].toTensor(), r[2].toTensor()};
}

// ---- PyTorch's memory-efficient attention on a GPU, which has masks

constexpr const char *kEfficient = "aten::_scaled_dot_product_efficient_attention",
                     *kEfficientBackward = "aten::_scaled_dot_product_efficient_attention_backward";
Override g_efficient;

// As PyTorch's has log-sum-exps: in rows of a multiple of 32. Those that there are not count for nothing, and those of
// queries that see no key are finite, as on a CPU. Without a mask each query sees a key, and a kernel less is launched.
Tensor padded(Tensor lse, bool has_mask) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  if (has_mask) lse.nan_to_num_(std::numeric_limits<double>::quiet_NaN(), kInf, 0.);
  const std::int64_t more = (32 - lse.size(2) % 32) % 32;
  return more == 0 ? lse : at::constant_pad_nd(lse, {0, more}, kInf);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_forward(const Tensor& q, const Tensor& k, const Tensor& v,
                                                             const MaybeTensor& attn_bias, bool compute_log_sumexp,
                                                             double dropout_p, bool is_causal, MaybeDouble scale) {
  const bool has_mask = given(attn_bias), has_gradient = has_mask && attn_bias->requires_grad();
  if (!turned_off() && q.dim() == 4 && v.dim() == 4 && !has_gradient) {
    const Tensor out = at::empty({q.size(0), q.size(2), q.size(1), v.size(3)}, q.options()).transpose(1, 2);
    Tensor lse;
    if (forward({q, k, v, dropout_p, causal(is_causal, Alignment::kTopLeft), scale, attn_bias}, out, lse)) {
      lse = compute_log_sumexp ? padded(std::move(lse), has_mask) : empty_as(q, {q.size(0), q.size(1), 0}, at::kFloat);
      // Of dropout. Where q is, as CUDA graphs of compiled code have it.
      const auto state = [&] { return empty_as(q, {}, at::kLong); };
      return {out, lse, state(), state()};
    }
  }
  const auto r = g_efficient->forward(q, k, v, attn_bias, compute_log_sumexp, dropout_p, is_causal, scale);
  return {r[0].toTensor(), r[1].toTensor(), r[2].toTensor(), r[3].toTensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                                              const Tensor& v, const Tensor& attn_bias,
                                                              const Tensor& out, const Tensor& lse,
                                                              const Tensor& philox_seed, const Tensor& philox_offset,
                                                              double dropout_p, std::array<bool, 4> grad_input_mask,
                                                              bool is_causal, MaybeDouble scale) {
  if (!turned_off() && !grad_input_mask[3] && q.dim() == 4 && k.dim() == 4 && v.dim() == 4) {
    const Tensor dq = empty_rows_first(q), dk = empty_rows_first(k), dv = empty_rows_first(v);
    const MaybeTensor mask = attn_bias;
    const Call call{q, k, v, dropout_p, causal(is_causal, Alignment::kTopLeft), scale, mask};
    if (backward(call, dout, out, lse.slice(2, 0, q.size(2)), dq, dk, dv)) return {dq, dk, dv, Tensor()};
  }
  const auto r = g_efficient->backward(dout, q, k, v, attn_bias, out, lse, philox_seed, philox_offset, dropout_p,
                                       grad_input_mask, is_causal, scale);
  return {r[0].toTensor(), r[1].toTensor(), r[2].toTensor(), r[3].toTensor()};
}

// ---- packed sequences: nested tensors and torch.nn.attention.varlen, on either

constexpr const char *kPacked = "aten::_flash_attention_forward", *kPackedBackward = "aten::_flash_attention_backward";
Override g_packed_cpu, g_packed_cuda;

// The arguments on a stack by their names, as releases of PyTorch add some. What is not asked for has to be None.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, const torch::jit::Stack& stack)
      : names_(op.schema().arguments()), first_(stack.size() - names_.size()), stack_(stack), asked_(names_.size()) {}

  const c10::IValue& operator[](std::string_view name) {
    for (std::size_t i = 0; i < names_.size(); ++i) {
      if (names_[i].name() != name) continue;
      asked_[i] = true;
      return stack_[first_ + i];
    }
    TORCH_INTERNAL_ASSERT(false, "no argument ", name);
  }

  Tensor tensor(std::string_view name) {
    const c10::IValue& value = (*this)[name];
    return value.isTensor() ? value.toTensor() : Tensor();
  }

  bool all_asked() const {
    for (std::size_t i = 0; i < names_.size(); ++i)
      if (!asked_[i] && !stack_[first_ + i].isNone()) return false;
    return true;
  }

 private:
  const std::vector<c10::Argument>& names_;
  const std::size_t first_;
  const torch::jit::Stack& stack_;
  std::vector<bool> asked_;
};

// What both directions are given.
struct PackedCall {
  explicit PackedCall(Arguments& a)
      : q(a.tensor("query")),
        k(a.tensor("key")),
        v(a.tensor("value")),
        cu_seqlens_q(a.tensor("cum_seq_q")),
        cu_seqlens_k(a.tensor("cum_seq_k")),
        packed{cu_seqlens_q, cu_seqlens_k, a["max_q"].toInt(), a["max_k"].toInt()},
        is_packed(cu_seqlens_q.defined()),
        call{q,
             k,
             v,
             a["dropout_p"].toDouble(),
             band_of(a),
             a["scale"].toOptional<double>(),
             kNone,
             false,
             is_packed ? &packed : nullptr} {}
  PackedCall(const PackedCall&) = delete;
  PackedCall& operator=(const PackedCall&) = delete;

  // What aten has to refuse, or to read in another way.
  bool ours() const {
    const std::int64_t rank = is_packed ? 3 : 4;
    return cu_seqlens_k.defined() == is_packed && q.dim() == rank && k.dim() == rank && v.dim() == rank &&
           v.size(-1) == q.size(-1);
  }

  const Tensor q, k, v, cu_seqlens_q, cu_seqlens_k;
  const Packed packed;
  const bool is_packed;
  const Call call;

 private:
  // Negative is unlimited.
  static std::optional<std::int64_t> side(const c10::IValue& value) {
    if (value.isNone() || value.toInt() < 0) return std::nullopt;
    return value.toInt();
  }

  static std::optional<Band> band_of(Arguments& a) {
    Band band{side(a["window_size_left"]), side(a["window_size_right"]), Alignment::kBottomRight};
    if (a["is_causal"].toBool()) band.right = 0;
    if (!band.left && !band.right) return std::nullopt;
    return band;
  }
};

const Originals& packed_originals(const Tensor& q) {
  return *(q.is_cuda() ? g_packed_cuda : g_packed_cpu).originals.load();
}

void packed_forward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Arguments arguments(op, *stack);
  const PackedCall p(arguments);
  const bool debug = arguments["return_debug_mask"].toBool();
  Tensor lse;
  if (!debug && arguments.all_asked() && p.ours()) {
    const Tensor out = at::empty_like(p.q);
    if (forward(p.call, out, lse)) {
      const DropoutState dropout(lse, p.q.scalar_type());
      torch::jit::drop(*stack, op.schema().arguments().size());
      torch::jit::push(*stack, out, lse, dropout.state, dropout.unused, dropout.mask);
      return;
    }
  }
  packed_originals(p.q).forward.run(*stack);
}

void packed_backward(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Arguments arguments(op, *stack);
  const PackedCall p(arguments);
  const Tensor dout = arguments.tensor("grad_out"), out = arguments.tensor("out"), lse = arguments.tensor("logsumexp");
  for (const char* without_dropout : {"rng_state", "unused"}) arguments[without_dropout];
  if (arguments.all_asked() && p.ours()) {
    const Tensor dq = at::empty_like(p.q), dk = at::empty_like(p.k), dv = at::empty_like(p.v);
    if (backward(p.call, dout, out, lse, dq, dk, dv)) {
      torch::jit::drop(*stack, op.schema().arguments().size());
      torch::jit::push(*stack, dq, dk, dv);
      return;
    }
  }
  packed_originals(p.q).backward.run(*stack);
}

// ---- from Python

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

template <class Forward, class Backward>
void put(Override& o, c10::DispatchKey key, const char* forward_name, Forward forward, const char* backward_name,
         Backward backward) {
  if (o.library != nullptr) return;
  o.originals.store(new Originals(forward_name, backward_name, key));
  auto library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  Silent silent;  // PyTorch warns of every override
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  library->impl(forward_name, std::move(forward));
  library->impl(backward_name, std::move(backward));
  o.library = std::move(library);
}

PyObject* override_sdpa(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char *operators, *key_name;
  if (!PyArg_ParseTuple(args, "ss", &operators, &key_name)) return nullptr;
  const std::string_view which = operators;
  const c10::DispatchKey key = c10::parseDispatchKey(key_name);
  if (which == "flash") {
    put(g_flash, key, kFlash, TORCH_FN(flash_forward), kFlashBackward, TORCH_FN(flash_backward));
  } else if (which == "efficient") {
    put(g_efficient, key, kEfficient, TORCH_FN(efficient_forward), kEfficientBackward, TORCH_FN(efficient_backward));
  } else if (which == "packed") {
    put(key == c10::DispatchKey::CUDA ? g_packed_cuda : g_packed_cpu, key, kPacked,
        torch::CppFunction::makeFromBoxedFunction<&packed_forward>(), kPackedBackward,
        torch::CppFunction::makeFromBoxedFunction<&packed_backward>());
  } else {
    put(g_for_cpu, key, kForCpu, TORCH_FN(for_cpu_forward), kForCpuBackward, TORCH_FN(for_cpu_backward));
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// A function. Never given back: a call of another thread may be on its way to it.
std::atomic<PyObject*> g_watching{nullptr};

void tell(const Call& c, bool is_backward, bool taken) {
  const pybind11::gil_scoped_acquire gil;
  try {
    pybind11::object band = pybind11::none(), packed = pybind11::none();
    if (c.band) band = pybind11::make_tuple(c.band->left, c.band->right, c.band->alignment == Alignment::kTopLeft);
    if (const Packed* p = c.packed)
      packed = pybind11::make_tuple(p->cu_seqlens_q, p->cu_seqlens_k, p->max_seqlen_q, p->max_seqlen_k);
    const auto rows_first = [&](const Tensor& t) { return c.heads_first && t.dim() == 4 ? t.transpose(1, 2) : t; };
    const MaybeTensor mask = given(c.mask) ? c.mask : std::nullopt;
    pybind11::reinterpret_borrow<pybind11::function>(g_watching.load())(is_backward, taken, rows_first(c.q),
                                                                        rows_first(c.k), rows_first(c.v), mask, band,
                                                                        c.scale, c.dropout_p, packed);
  } catch (pybind11::error_already_set& e) {
    e.discard_as_unraisable("flashsdk: a watched call");
  } catch (const std::exception&) {  // no call fails for its log
  }
}

PyObject* watch_sdpa(PyObject*, PyObject* function) {
  g_watching.store(Py_NewRef(function));
  set_sdpa_watcher(tell);
  Py_RETURN_NONE;
}

PyObject* restore_sdpa(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  for (Override* o : {&g_for_cpu, &g_flash, &g_efficient, &g_packed_cpu, &g_packed_cuda}) o->library.reset();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace

PyMethodDef const kOverrideSdpa{"override_sdpa", override_sdpa, METH_VARARGS, nullptr};
PyMethodDef const kRestoreSdpa{"restore_sdpa", restore_sdpa, METH_NOARGS, nullptr};
PyMethodDef const kWatchSdpa{"watch_sdpa", watch_sdpa, METH_O, nullptr};

}  // namespace flashsdk::torch_sdpa
