// flashsdk._torch_native: attention of eager PyTorch from Python's arguments to the core and back, with its gradient as
// a node of autograd, in C++ throughout. Built for one release of PyTorch, whose C++ interface changes with each.
//
// Every function returns None where a call is not for it: other types than the usual ones, somebody who looks on, or an
// argument that the core refuses. Then flashsdk.torch goes its way in Python, which has the messages.
#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/dlpack.h>
#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "_gil.h"
#include "_torch_sdpa.h"
#include "core_api.h"
#include "operators.h"
#include "torch_threads.h"

namespace flashsdk::python {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// What other modules own, found once.
const CoreApi* g_core = nullptr;
const DLPackExchangeAPI* g_exchange = nullptr;
PyObject *g_dense = nullptr, *g_band = nullptr;  // the classes

constexpr std::int64_t kUnlimited = std::numeric_limits<std::int32_t>::max();  // of a band; as encode_mask has it

// A call besides q, k and v.
struct Problem {
  at::Tensor cu_seqlens_q, cu_seqlens_k, bias, alibi_slopes;
  at::Tensor seed;  // of dropout, int64: the bits of an unsigned number

  bool packed = false, heads_first = false;  // heads first: q is (batch, num_heads, seqlen_q, head_dim)
  std::int64_t max_seqlen_q = 0, max_seqlen_k = 0;
  bool band = false, top_left = false;
  std::int64_t left = kUnlimited, right = kUnlimited;
  bool scaled = false;  // by softmax_scale, else by head_dim^-1/2
  double softmax_scale = 0., softcap = 0., dropout_p = 0.;
  bool deterministic = false;
  std::string backend;

  // Gives all but the tensors to `visit`, always in the same order.
  template <class Self, class Visit>
  static void visit_numbers(Self& p, Visit visit) {
    visit(p.packed), visit(p.heads_first), visit(p.max_seqlen_q), visit(p.max_seqlen_k);
    visit(p.band), visit(p.top_left), visit(p.left), visit(p.right);
    visit(p.scaled), visit(p.softmax_scale), visit(p.softcap), visit(p.dropout_p);
    visit(p.deterministic), visit(p.backend);
  }
};

// ---- who looks on

// Modes, tracers and the transforms of torch.func have keys of their own in what a thread includes.
bool unwatched() {
  return (c10::impl::tls_local_dispatch_key_set().included_ - c10::default_included_set).empty() &&
         !at::impl::torch_function_mode_enabled();
}

// Whether memory shows the values and autograd is all that wants to know: no subclass, no wrapper of a transform, no
// view yet to be negated, none on meta.
bool plain(const at::Tensor& t) {
  using K = c10::DispatchKey;
  constexpr c10::DispatchKeySet kPlain(
      {K::CPU, K::AutogradCPU, K::AutocastCPU, K::CUDA, K::AutogradCUDA, K::AutocastCUDA, K::ADInplaceOrView});
  return (t.key_set().raw_repr() & ~kPlain.raw_repr()) == 0 && !t._fw_grad(0).defined();
}

bool plain_or_none(const at::Tensor& t) { return !t.defined() || plain(t); }

template <class... Tensors>
bool recorded(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && ((tensors.defined() && tensors.requires_grad()) || ...);
}

// ---- tensors for the core

bool view_of(const at::Tensor& t, bool heads_first, TensorView& view) {
  switch (t.scalar_type()) {
    case at::kFloat:
      view.dtype = DType::kFloat32;
      break;
    case at::kHalf:
      view.dtype = DType::kFloat16;
      break;
    case at::kBFloat16:
      view.dtype = DType::kBFloat16;
      break;
    case at::kInt:
      view.dtype = DType::kInt32;
      break;
    case at::kBool:
      view.dtype = DType::kBool;
      break;
    default:
      return false;
  }
  const auto sizes = t.sizes(), strides = t.strides();
  if (sizes.size() == 0 || sizes.size() > kMaxTensorRank) return false;
  view.data = const_cast<void*>(t.const_data_ptr());
  if (view.data == nullptr && t.numel() != 0) return false;  // its memory was taken away
  view.device = t.is_cuda() ? Device{DeviceType::kCUDA, t.get_device()} : Device{};
  view.rank = static_cast<int>(sizes.size());
  for (int d = 0; d < view.rank; ++d) {
    const int from = heads_first && (d == 1 || d == 2) ? 3 - d : d;
    view.shape[d] = sizes[from];
    view.stride[d] = strides[from];
  }
  return true;
}

// None is not given.
bool view_if_given(const at::Tensor& t, TensorView& view) { return !t.defined() || view_of(t, false, view); }

[[noreturn]] void raise(const Failure& failure);

// What forward and backward share but the seed; false for what the core would not take. A float that float32 cannot
// hold has a message of its own.
bool fill(const Problem& p, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, AttentionArgs& args) {
  const bool h = p.heads_first;
  if (!view_of(q, h, args.q) || !view_of(k, h, args.k) || !view_of(v, h, args.v) ||
      !view_if_given(p.cu_seqlens_q, args.cu_seqlens_q) || !view_if_given(p.cu_seqlens_k, args.cu_seqlens_k) ||
      !view_if_given(p.bias, args.bias) || !view_if_given(p.alibi_slopes, args.alibi_slopes))
    return false;
  args.max_seqlen_q = p.max_seqlen_q;
  args.max_seqlen_k = p.max_seqlen_k;
  if (p.band) {
    Band band;
    if (p.left != kUnlimited) band.left = p.left;
    if (p.right != kUnlimited) band.right = p.right;
    if (p.top_left) band.alignment = Alignment::kTopLeft;
    args.mask = band;
  }
  if (p.scaled) {
    args.softmax_scale = static_cast<float>(p.softmax_scale);
    if (!std::isfinite(*args.softmax_scale)) return false;
  }
  args.softcap = static_cast<float>(p.softcap);
  args.dropout_p = static_cast<float>(p.dropout_p);
  if ((args.softcap == 0.f && p.softcap != 0.) || !std::isfinite(args.softcap)) return false;
  if (!(p.dropout_p >= 0. && p.dropout_p < 1.)) return false;
  if (args.dropout_p == 1.f) args.dropout_p = std::nextafter(1.f, 0.f);
  args.deterministic = p.deterministic;
  args.backend = p.backend;
  return true;
}

bool fill_seed(const Problem& p, AttentionArgs& args) {
  if (p.dropout_p == 0.) return true;
  const at::Tensor& seed = p.seed;  // hooks for saved tensors may have given back any
  if (!seed.defined() || !seed.is_cpu() || seed.scalar_type() != at::kLong || seed.numel() != 1) return false;
  args.seed = static_cast<std::uint64_t>(*seed.const_data_ptr<std::int64_t>());
  return true;
}

// Of dropout that was given no seed: drawn from the CPU's generator on whatever device q is, so that nothing is waited
// for. The way in Python draws as well: only once nothing but the core can refuse.
void draw_seed(Problem& p) {
  if (p.dropout_p == 0. || p.seed.defined()) return;
  const auto options = at::TensorOptions().dtype(at::kLong).device(at::kCPU);
  p.seed = at::randint(std::numeric_limits<std::int64_t>::max(), {1}, options);
}

// The stream on which PyTorch works now. It says with Python's errors why it does not know, which needs the GIL.
bool current_stream(int device, void** stream) {
  if (g_exchange == nullptr) return false;
  const pybind11::gil_scoped_acquire gil;
  if (g_exchange->current_work_stream(kDLCUDA, device, stream) == 0) return true;
  PyErr_Clear();
  return false;
}

bool stream_of(const at::Tensor& q, void** stream) { return !q.is_cuda() || current_stream(q.get_device(), stream); }

// Runs a call on a stream of q's device.
template <class Args>
bool run(bool (*function)(const Args&, bool, const GpuOptions&, Failure&), const Args& args, bool packed,
         const at::Tensor& q, void* stream) {
  struct Scratch {
    const at::Tensor& like;
    at::Tensor memory;
  } scratch{q, {}};
  GpuOptions gpu;
  if (q.is_cuda()) {
    gpu.stream = stream;
    gpu.owner = &scratch;
    gpu.workspace = [](void* owner, std::size_t size) {
      auto& s = *static_cast<Scratch*>(owner);
      s.memory = at::empty({static_cast<std::int64_t>(size)}, s.like.options().dtype(at::kByte));
      return s.memory.mutable_data_ptr();
    };
  }
  const torch_ops::TorchThreads threads(*g_core);
  Failure failure;  // its line is said by the way in Python, which fails alike
  return function(args, packed, gpu, failure);
}

at::Tensor with_last_contiguous(const at::Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

bool forward(Problem& p, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, at::Tensor& out,
             at::Tensor& lse) {
  RECORD_FUNCTION(p.packed ? "flashsdk::mha_varlen_fwd" : "flashsdk::mha_fwd", std::vector<c10::IValue>({q, k, v}));
  ForwardArgs args;
  void* stream = nullptr;
  if (!fill(p, q, k, v, args) || !stream_of(q, &stream)) return false;
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto size = q.sizes();
  const auto lse_options = q.options().dtype(at::kFloat);
  const std::int64_t dim_v = v.size(-1);
  if (p.packed) {
    out = at::empty({size[0], size[1], dim_v}, q.options());
    lse = at::empty({size[1], size[0]}, lse_options);
  } else if (p.heads_first) {  // in memory (batch, seqlen_q, num_heads, head_dim_v)
    out = at::empty_strided({size[0], size[1], size[2], dim_v}, {size[2] * size[1] * dim_v, dim_v, size[1] * dim_v, 1},
                            q.options());
    lse = at::empty({size[0], size[1], size[2]}, lse_options);
  } else {
    out = at::empty({size[0], size[1], size[2], dim_v}, q.options());
    lse = at::empty({size[0], size[2], size[1]}, lse_options);
  }
  if (!view_of(out, p.heads_first, args.out) || !view_of(lse, false, args.lse)) return false;
  draw_seed(p);
  if (!fill_seed(p, args)) return false;
  const WithoutGil released;
  return run(g_core->forward, args, p.packed, q, stream);
}

// ---- the gradient

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
    auto& held = problem_;
    held.cu_seqlens_q = held.cu_seqlens_k = held.bias = held.alibi_slopes = held.seed = at::Tensor();
    Saved x{q, k, v, out, lse, p.cu_seqlens_q, p.cu_seqlens_k, p.bias, p.alibi_slopes, p.seed};
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
  static constexpr int kOut = 3, kLse = 4, kSaved = 10;  // q, k, v, out, lse and the tensors of Problem
  using Saved = std::array<at::Tensor, kSaved>;

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
    const auto& [q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, bias, alibi_slopes, seed] = x;
    Problem p = numbers;
    p.cu_seqlens_q = cu_seqlens_q;
    p.cu_seqlens_k = cu_seqlens_k;
    p.bias = bias;
    p.alibi_slopes = alibi_slopes;
    p.seed = p.dropout_p != 0. ? on_cpu(seed) : seed;
    at::Tensor dout = grads[0].defined() ? grads[0] : at::zeros_like(out);  // zeros: only lse is used
    const at::Tensor dlse = grads.size() > 1 ? grads[1] : at::Tensor();
    bool ordinary = unwatched() && plain(dout) && plain_or_none(dlse) && !recorded(dout, dlse, q, k, v, out, lse);
    for (const at::Tensor& t : x) ordinary = ordinary && plain_or_none(t);
    variable_list results(3);
    if (ordinary && run_backward(p, dout, dlse, x, results)) return results;
    return dispatch(p, dout, dlse, x);
  }

  // What a hook gave back for the seed. Of one on meta the operator would make gradients without a value.
  static at::Tensor on_cpu(const at::Tensor& seed) {
    if (!seed.defined() || seed.device().is_meta())
      raise({"invalid_argument", "seed: another tensor; int64, one element, on cpu"});
    return seed.device().is_cpu() ? seed : seed.to(at::kCPU);
  }

  // Uninitialised memory for the gradient of x. Heads first it has the order of x in memory, which is what views of a
  // projection are made of, and what accumulation into a leaf takes without a copy.
  static at::Tensor gradient_of(const at::Tensor& x, bool heads_first) {
    if (heads_first) {
      at::Tensor like = at::empty_like(x, at::MemoryFormat::Preserve);
      if (like.stride(-1) == 1 || like.size(-1) == 1) return like;
    }
    return at::empty(x.sizes(), x.options());
  }

  static bool run_backward(const Problem& p, at::Tensor& dout, const at::Tensor& dlse, const Saved& x,
                           variable_list& gradients) {
    const auto& [q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, bias, alibi_slopes, seed] = x;
    RECORD_FUNCTION(p.packed ? "flashsdk::mha_varlen_bwd" : "flashsdk::mha_bwd", std::vector<c10::IValue>({dout, q}));
    BackwardArgs args;
    void* stream = nullptr;
    if (!fill(p, q, k, v, args) || !fill_seed(p, args) || !stream_of(q, &stream)) return false;
    const at::AutoDispatchBelowADInplaceOrView below;
    const bool h = p.heads_first;
    // Autograd's gradients are often expanded or transposed: that of out.sum() has strides 0.
    const at::Tensor rows = with_last_contiguous(dout);
    const at::Tensor row_sums = dlse.defined() ? with_last_contiguous(dlse) : dlse;
    gradients = {gradient_of(q, h), gradient_of(k, h), gradient_of(v, h)};
    if (!view_of(rows, h, args.dout) || !view_of(out, h, args.out) || !view_of(lse, false, args.lse) ||
        !view_if_given(row_sums, args.dlse) || !view_of(gradients[0], h, args.dq) ||
        !view_of(gradients[1], h, args.dk) || !view_of(gradients[2], h, args.dv))
      return false;
    return run(g_core->backward, args, p.packed, q, stream);
  }

  // The operator, for those who look on, for gradients that are recorded themselves, and for what the core refuses.
  static variable_list dispatch(const Problem& p, const at::Tensor& dout, const at::Tensor& dlse, const Saved& x) {
    const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(p.packed ? "flashsdk::mha_varlen_bwd" : "flashsdk::mha_bwd", "");
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
      else if (name == "cu_seqlens_q")
        stack.emplace_back(p.cu_seqlens_q);
      else if (name == "cu_seqlens_k")
        stack.emplace_back(p.cu_seqlens_k);
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
    variable_list gradients;
    for (const c10::IValue& gradient : stack) gradients.push_back(rows_first(gradient.toTensor()));
    return gradients;
  }

  static std::vector<std::int64_t> encoded(const Problem& p) {
    if (!p.band) return {};
    return {p.left, p.right, p.top_left};
  }

  Problem problem_;          // without its tensors
  bool transposed_ = false;  // q, k, v and out were saved (batch, seqlen, num_heads, head_dim), unlike the call's
  bool lse_is_output_ = false;
  std::array<SavedVariable, kSaved> saved_;
};

// ---- from Python's arguments: each reader is false for what it does not know

bool read_tensor(PyObject* given, at::Tensor& t) {
  if (!THPVariable_CheckExact(given)) return false;
  t = THPVariable_Unpack(given);
  return plain(t);
}

// One whose gradient is not to be lost.
bool read_constant(PyObject* given, at::Tensor& t) {
  return given == Py_None || (read_tensor(given, t) && !recorded(t));
}

bool read_number(PyObject* given, double& x) {
  if (PyFloat_CheckExact(given)) {
    x = PyFloat_AS_DOUBLE(given);
    return true;
  }
  if (!PyLong_CheckExact(given)) return false;
  x = PyLong_AsDouble(given);
  if (x != -1. || PyErr_Occurred() == nullptr) return true;
  PyErr_Clear();
  return false;
}

bool read_scale(PyObject* given, Problem& p) {
  p.scaled = given != Py_None;
  return !p.scaled || read_number(given, p.softmax_scale);
}

bool read_integer(PyObject* given, std::int64_t& x) {
  if (!PyLong_CheckExact(given)) return false;
  int overflow;
  x = PyLong_AsLongLongAndOverflow(given, &overflow);
  return overflow == 0;
}

bool read_flag(PyObject* given, bool& x) {
  x = given == Py_True;
  return x || given == Py_False;
}

bool read_limit(PyObject* band, PyObject* name, std::int64_t& limit) {
  const auto given = pybind11::reinterpret_steal<pybind11::object>(PyObject_GetAttr(band, name));
  if (!given) throw python_error();
  return given.is_none() || read_integer(given.ptr(), limit);
}

bool read_mask(PyObject* given, Problem& p) {
  static PyObject* const left = PyUnicode_InternFromString("left");
  static PyObject* const right = PyUnicode_InternFromString("right");
  static PyObject* const alignment = PyUnicode_InternFromString("alignment");
  if (given == Py_None || reinterpret_cast<PyObject*>(Py_TYPE(given)) == g_dense) return true;
  if (reinterpret_cast<PyObject*>(Py_TYPE(given)) != g_band) return false;
  p.band = true;
  if (!read_limit(given, left, p.left) || !read_limit(given, right, p.right)) return false;
  const auto side = pybind11::reinterpret_steal<pybind11::object>(PyObject_GetAttr(given, alignment));
  if (!side) throw python_error();
  p.top_left = PyUnicode_CompareWithASCIIString(side.ptr(), "top_left") == 0;
  return true;
}

bool read_backend(PyObject* given, std::string& backend) {
  if (given == Py_None) return true;
  Py_ssize_t size = 0;
  const char* text = PyUnicode_Check(given) ? PyUnicode_AsUTF8AndSize(given, &size) : nullptr;
  if (text == nullptr) PyErr_Clear();
  backend.assign(text == nullptr ? "" : text, static_cast<std::size_t>(size));
  return !backend.empty();
}

bool read_deterministic(PyObject* given, bool& deterministic) {
  if (given != Py_None) return read_flag(given, deterministic);
  deterministic = at::globalContext().deterministicAlgorithms();
  return true;
}

// (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
bool read_lengths(PyObject* const* given, Problem& p) {
  p.packed = true;
  return read_tensor(given[0], p.cu_seqlens_q) && read_tensor(given[1], p.cu_seqlens_k) &&
         read_integer(given[2], p.max_seqlen_q) && read_integer(given[3], p.max_seqlen_k);
}

bool read_qkv(PyObject* const* given, int rank, std::array<at::Tensor, 3>& qkv) {
  for (int i = 0; i < 3; ++i)
    if (!read_tensor(given[i], qkv[i]) || qkv[i].dim() != rank) return false;
  return true;
}

// ---- what all functions do

enum class Return : std::uint8_t { kOut, kOutAndLse, kWithProbs };

// What torch.autocast does for scaled_dot_product_attention.
void autocast(std::array<at::Tensor, 3>& qkv) {
  const auto device = qkv[0].device().type();
  if (!at::autocast::is_autocast_enabled(device)) return;
  const auto dtype = at::autocast::get_autocast_dtype(device);
  for (at::Tensor& x : qkv)
    if (x.is_floating_point() && x.scalar_type() != at::kDouble) x = x.to(dtype);
}

bool read_seed(PyObject* given, Problem& p) {
  if (given == Py_None) return true;
  if (!PyLong_CheckExact(given)) return false;
  const std::uint64_t seed = PyLong_AsUnsignedLongLong(given);
  if (seed == static_cast<std::uint64_t>(-1) && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    return false;
  }
  if (p.dropout_p == 0.) return true;
  const auto options = at::TensorOptions().dtype(at::kLong).device(at::kCPU);
  p.seed = at::full({1}, static_cast<std::int64_t>(seed), options);
  return true;
}

pybind11::object wrapped(at::Tensor x) {
  auto result = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(std::move(x)));
  if (!result) throw python_error();
  return result;
}

// nullptr, and no error set, where the call is not for this way.
PyObject* attend(Problem& p, std::array<at::Tensor, 3>& qkv, Return wanted) {
  autocast(qkv);
  const auto& [q, k, v] = qkv;
  at::Tensor out, lse;
  if (!forward(p, q, k, v, out, lse)) return nullptr;
  if (recorded(q, k, v)) {
    const auto node = make_node<AttentionBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(q, k, v));
    torch::autograd::set_history(out, node);
    const bool lse_is_output = wanted != Return::kOut;
    if (lse_is_output) torch::autograd::set_history(lse, node);
    node->save(p, q, k, v, out, lse, lse_is_output);
  }
  if (wanted == Return::kOut) return wrapped(std::move(out)).release().ptr();
  const int count = wanted == Return::kWithProbs ? 3 : 2;
  auto result = pybind11::reinterpret_steal<pybind11::object>(PyTuple_New(count));
  if (!result) throw python_error();
  if (count == 3) PyTuple_SET_ITEM(result.ptr(), 2, wrapped(at::empty({0}, out.options())).release().ptr());
  PyTuple_SET_ITEM(result.ptr(), 0, wrapped(std::move(out)).release().ptr());
  PyTuple_SET_ITEM(result.ptr(), 1, wrapped(std::move(lse)).release().ptr());
  return result.release().ptr();
}

[[noreturn]] void fail_count(const char* name, const char* expected, Py_ssize_t count) {
  throw torch::TypeError(std::string(name) + "() takes " + expected + " arguments; " + std::to_string(count) +
                         " were given");
}

using Function = PyObject* (*)(PyObject* const* given, Py_ssize_t count);

// A function of the module: None where `function` gives nullptr, PyTorch's exceptions as they are.
template <Function function>
PyObject* guarded(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  PyObject* const result = unwatched() ? function(given, count) : nullptr;
  if (result != nullptr || PyErr_Occurred() != nullptr) return result;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// (q, k, v, mask, bias, alibi_slopes, softmax_scale, softcap, dropout_p, seed, return_lse, deterministic, backend), and
// the four of packed sequences behind them.
PyObject* attention(PyObject* const* given, Py_ssize_t count) {
  if (count != 13 && count != 17) fail_count("attention", "13 or 17", count);
  Problem p;
  std::array<at::Tensor, 3> qkv;
  bool return_lse;
  if ((count == 17 && !read_lengths(given + 13, p)) || !read_qkv(given, p.packed ? 3 : 4, qkv) ||
      !read_mask(given[3], p) || !read_constant(given[4], p.bias) || !read_constant(given[5], p.alibi_slopes) ||
      !read_scale(given[6], p) || !read_number(given[7], p.softcap) || !read_number(given[8], p.dropout_p) ||
      !read_flag(given[10], return_lse) || !read_deterministic(given[11], p.deterministic) ||
      !read_backend(given[12], p.backend) || !read_seed(given[9], p))
    return nullptr;
  return attend(p, qkv, return_lse ? Return::kOutAndLse : Return::kOut);
}

// (q, k, v, None or the tuple of the four of packed sequences, dropout_p, softmax_scale, causal, window_size, softcap,
// alibi_slopes, deterministic, return_attn_probs)
PyObject* flash_attn(PyObject* const* given, Py_ssize_t count) {
  if (count != 12) fail_count("flash_attn", "12", count);
  Problem p;
  std::array<at::Tensor, 3> qkv;
  bool causal, deterministic, return_probs;
  if (given[3] != Py_None) {
    if (!PyTuple_CheckExact(given[3]) || PyTuple_GET_SIZE(given[3]) != 4)
      throw torch::TypeError("flash_attn(): lengths are a tuple of four, or None");
    if (!read_lengths(PySequence_Fast_ITEMS(given[3]), p)) return nullptr;
  }
  if (!read_qkv(given, p.packed ? 3 : 4, qkv) || !read_number(given[4], p.dropout_p) || !read_scale(given[5], p) ||
      !read_flag(given[6], causal) || !read_number(given[8], p.softcap) || !read_constant(given[9], p.alibi_slopes) ||
      !read_flag(given[10], deterministic) || !read_flag(given[11], return_probs) ||
      (return_probs && p.dropout_p != 0.))
    return nullptr;
  std::int64_t left, right;  // negative is unlimited
  if (!PyTuple_CheckExact(given[7]) || PyTuple_GET_SIZE(given[7]) != 2 ||
      !read_integer(PyTuple_GET_ITEM(given[7], 0), left) || !read_integer(PyTuple_GET_ITEM(given[7], 1), right))
    return nullptr;
  p.band = causal || left >= 0 || right >= 0;
  if (left >= 0) p.left = std::min(left, kUnlimited);
  if (causal) {
    p.right = 0;
  } else if (right >= 0) {
    p.right = std::min(right, kUnlimited);
  }
  if (p.softcap < 0.) p.softcap = 0.;
  read_deterministic(deterministic ? Py_True : Py_None, p.deterministic);
  for (at::Tensor& x : qkv) x = with_last_contiguous(x);
  return attend(p, qkv, return_probs ? Return::kWithProbs : Return::kOut);
}

// (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa), each (batch, heads, seqlen, dim): what is to
// be broadcast otherwise than attention itself does has to be expanded first.
PyObject* scaled_dot_product_attention(PyObject* const* given, Py_ssize_t count) {
  if (count != 8) fail_count("scaled_dot_product_attention", "8", count);
  const auto& backends = at::globalContext();
  if (!backends.userEnabledFlashSDP() && !backends.userEnabledMemEfficientSDP() && !backends.userEnabledCuDNNSDP())
    return nullptr;  // PyTorch's math is asked for
  Problem p;
  p.heads_first = true;
  std::array<at::Tensor, 3> qkv;
  bool is_causal, gqa;
  if (!read_qkv(given, 4, qkv) || !read_constant(given[3], p.bias) || !read_number(given[4], p.dropout_p) ||
      !read_flag(given[5], is_causal) || !read_scale(given[6], p) || !read_flag(given[7], gqa))
    return nullptr;
  const auto& [q, k, v] = qkv;
  const std::int64_t heads = q.size(1), heads_kv = k.size(1);
  if (k.size(0) != q.size(0) || v.size(0) != q.size(0) || v.size(1) != heads_kv || heads == 0 || heads_kv == 0 ||
      (heads != heads_kv && heads_kv != 1 && (!gqa || heads % heads_kv != 0)))
    return nullptr;
  if (is_causal) {
    if (p.bias.defined()) return nullptr;
    p.band = p.top_left = true;
    p.right = 0;
  }
  if (p.bias.defined()) {
    while (p.bias.dim() < 4) p.bias = p.bias.unsqueeze(0);
    if (p.bias.dim() > 4 || p.bias.stride(3) != 1) return nullptr;
  }
  for (at::Tensor& x : qkv) x = with_last_contiguous(x);
  return attend(p, qkv, Return::kOut);
}

template <Function function>
constexpr PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(guarded<function>)), METH_FASTCALL, nullptr};
}

// ---- the module

pybind11::object attribute(const char* module, const char* name) {
  return pybind11::module_::import(module).attr(name);
}

// flashsdk.Error, as PyTorch hands on what Python raised.
[[noreturn]] void raise(const Failure& failure) {
  const pybind11::gil_scoped_acquire gil;
  const pybind11::object type = attribute("flashsdk._errors", "Error");
  PyErr_SetObject(type.ptr(), type(failure.message, failure.code).ptr());
  python_error error;
  error.persist();
  throw error;
}

// Gives the operators, which Python has defined, kernels for CPU and CUDA; once.
PyObject* register_operators(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  static bool done = false;
  if (!std::exchange(done, true)) {
    torch_ops::register_operators({g_core, current_stream, raise}, /*define=*/false);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// Before anything else: another release has other classes of the same names.
void check_torch() {
  const std::string here = pybind11::cast<std::string>(attribute("torch", "__version__").attr("__str__")());
  if (here != FLASHSDK_TORCH_VERSION)
    throw pybind11::import_error("flashsdk._torch_native is for PyTorch " FLASHSDK_TORCH_VERSION "; here is " + here);
}

void find_others() {
  const auto core = attribute("flashsdk._bindings", "core_api");
  g_core = static_cast<const CoreApi*>(PyCapsule_GetPointer(core.ptr(), "flashsdk.core_api"));
  if (g_core == nullptr) throw pybind11::error_already_set();
  if (g_core->layout != CoreApi::kLayout)
    throw pybind11::import_error("flashsdk._torch_native and flashsdk._bindings are of different builds");
  const auto tensor = attribute("torch", "Tensor");
  if (pybind11::hasattr(tensor, "__dlpack_c_exchange_api__")) {
    const pybind11::object capsule = tensor.attr("__dlpack_c_exchange_api__");
    g_exchange = static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (g_exchange == nullptr) PyErr_Clear();
  }
  g_dense = attribute("flashsdk.masks", "Dense").release().ptr();
  g_band = attribute("flashsdk.masks", "Band").release().ptr();
}

}  // namespace
}  // namespace flashsdk::python

PyMODINIT_FUNC PyInit__torch_native() {
  namespace py = flashsdk::python;
  static PyMethodDef methods[] = {
      py::method<py::attention>("attention"),
      py::method<py::flash_attn>("flash_attn"),
      py::method<py::scaled_dot_product_attention>("scaled_dot_product_attention"),
      {"register_operators", py::register_operators, METH_NOARGS, nullptr},
      py::kOverrideSdpa,
      py::kRestoreSdpa,
      {nullptr, nullptr, 0, nullptr},
  };
  static PyModuleDef definition = {
      PyModuleDef_HEAD_INIT, "flashsdk._torch_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};
  try {
    py::check_torch();
    py::find_others();
    py::set_sdpa_host({py::g_core, py::current_stream, py::raise});
    return PyModule_Create(&definition);
  } catch (pybind11::error_already_set& e) {
    // flashsdk.torch does without, as it does where the module is not there.
    if (e.matches(PyExc_ImportError) || !e.matches(PyExc_Exception)) {
      e.restore();
    } else {
      pybind11::raise_from(e, PyExc_ImportError, "flashsdk._torch_native finds not what it needs");
    }
  } catch (const std::exception& e) {
    PyErr_SetString(PyExc_ImportError, e.what());
  }
  return nullptr;
}
