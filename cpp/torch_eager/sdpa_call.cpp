#include "sdpa_call.h"

#include <atomic>
#include <cmath>
#include <utility>
#include <vector>

#include "core_call.h"
#include "torch_threads.h"

namespace flashsdk::torch_sdpa {
namespace {

torch_ops::Host g_host;
std::atomic<Watcher> g_watcher{nullptr};

// As the eager way has it; values that are still to be negated are not for our kernels.
bool view_of(const Tensor& t, bool heads_first, TensorView& view) {
  if (t.is_neg() || (heads_first && t.dim() != 4)) return false;
  return torch_eager::view_of(t, heads_first, view);
}

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

bool fill(const Packed* packed, AttentionArgs& args) {
  if (packed == nullptr) return true;
  args.max_seqlen_q = packed->max_seqlen_q;
  args.max_seqlen_k = packed->max_seqlen_k;
  return torch_eager::view_of(packed->cu_seqlens_q, false, args.cu_seqlens_q) &&
         torch_eager::view_of(packed->cu_seqlens_k, false, args.cu_seqlens_k);
}

// What is not for our kernels, here and in sdpa.cpp, is told again in integrations/_sdpa_kernels.py: the way without
// this extension. test_torch_sdpa_python.py compares them.
bool fill(const Call& c, AttentionArgs& args) {
  if (c.dropout_p != 0. || (c.band && given(c.mask))) return false;
  if (!view_of(c.q, c.heads_first, args.q) || !view_of(c.k, c.heads_first, args.k) ||
      !view_of(c.v, c.heads_first, args.v) || !view_of_mask(c.mask, args.bias) || !fill(c.packed, args))
    return false;
  if (args.q.numel() == 0 || args.k.numel() == 0 || args.v.numel() == 0) return false;
  if (c.band) args.mask = *c.band;
  if (c.scale) {
    args.softmax_scale = static_cast<float>(*c.scale);
    if (!std::isfinite(*args.softmax_scale)) return false;
  }
  args.deterministic = at::globalContext().deterministicAlgorithms();
  return true;
}

// False where the core refuses.
template <class Args>
bool run(bool (*function)(const Args&, bool, const GpuOptions&, Failure&), const Args& args, const Call& c) {
  struct Scratch {
    const Tensor& like;
    Tensor memory;
  } scratch{c.q, {}};
  GpuOptions gpu;
  if (c.q.is_cuda()) {
    if (!g_host.current_stream(c.q.get_device(), &gpu.stream)) return false;
    gpu.owner = &scratch;
    gpu.workspace = [](void* owner, std::size_t size) {
      auto& s = *static_cast<Scratch*>(owner);
      s.memory = at::empty({static_cast<std::int64_t>(size)}, s.like.options().dtype(at::kByte));
      return s.memory.mutable_data_ptr();
    };
  }
  const torch_ops::TorchThreads threads(*g_host.core);
  Failure failure;
  return function(args, c.packed != nullptr, gpu, failure);
}

Tensor last_contiguous(const Tensor& t) { return t.stride(-1) == 1 ? t : t.contiguous(); }

// On a GPU there is room for dropout's state behind its values.
Tensor empty_lse(at::IntArrayRef shape, const at::TensorOptions& options) {
  if (!options.device().is_cuda()) return at::empty(shape, options);
  constexpr auto kRoom = static_cast<std::int64_t>((DropoutState::kBytes + DropoutState::kAlignment) / sizeof(float));
  Tensor t = at::empty({c10::multiply_integers(shape) + kRoom}, options);
  t.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
  return t;
}

bool run_forward(const Call& c, const Tensor& out, Tensor& lse) {
  ForwardArgs args;
  if (!fill(c, args)) return false;
  std::vector<std::int64_t> rows{args.q.shape[1], args.q.shape[0]};  // packed: (heads, total)
  if (c.packed == nullptr) rows = {args.q.shape[0], args.q.shape[2], args.q.shape[1]};
  lse = empty_lse(rows, c.q.options().dtype(at::kFloat));
  return view_of(out, c.heads_first, args.out) && view_of(lse, false, args.lse) && run(g_host.core->forward, args, c);
}

bool run_backward(const Call& c, const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& dq,
                  const Tensor& dk, const Tensor& dv) {
  BackwardArgs args;
  if (!fill(c, args)) return false;
  const Tensor rows = last_contiguous(dout), sums = last_contiguous(lse);
  return view_of(rows, c.heads_first, args.dout) && view_of(out, c.heads_first, args.out) &&
         view_of(sums, false, args.lse) && view_of(dq, c.heads_first, args.dq) && view_of(dk, c.heads_first, args.dk) &&
         view_of(dv, c.heads_first, args.dv) && run(g_host.core->backward, args, c);
}

bool watched(const Call& c, bool is_backward, bool taken) {
  if (const Watcher watcher = g_watcher) watcher(c, is_backward, taken);
  return taken;
}

}  // namespace

DropoutState::DropoutState(const Tensor& lse, at::ScalarType dtype) {
  const std::size_t end = (lse.nbytes() + kAlignment - 1) / kAlignment * kAlignment;
  const auto made = [&](at::IntArrayRef shape, at::ScalarType type) {
    if (!lse.is_cuda()) return at::empty(shape, lse.options().dtype(type));
    const auto meta = at::scalarTypeToTypeMeta(type);
    c10::Storage memory = lse.storage();
    Tensor t = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(memory), lse.key_set(), meta);
    t.unsafeGetTensorImpl()->set_storage_offset(static_cast<std::int64_t>(end / meta.itemsize()));
    t.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
    return t;
  };
  state = made({2}, at::kUInt64);
  unused = made({}, at::kUInt64);
  mask = made({0}, dtype);
}

bool given(const MaybeTensor& t) { return t && t->defined(); }

bool forward(const Call& c, const Tensor& out, Tensor& lse) { return watched(c, false, run_forward(c, out, lse)); }

bool backward(const Call& c, const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& dq,
              const Tensor& dk, const Tensor& dv) {
  return watched(c, true, run_backward(c, dout, out, lse, dq, dk, dv));
}

void set_sdpa_host(const torch_ops::Host& host) { g_host = host; }

void set_sdpa_watcher(Watcher watcher) { g_watcher = watcher; }

}  // namespace flashsdk::torch_sdpa
