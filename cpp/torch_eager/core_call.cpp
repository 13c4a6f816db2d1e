#include "core_call.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/randint.h>
#include <ATen/record_function.h>
#include <pybind11/pybind11.h>

#include <limits>
#include <utility>

#include "gil.h"
#include "module.h"
#include "operator_call.h"
#include "torch_threads.h"

namespace flashsdk::torch_eager {

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
    case at::kLong:
      view.dtype = DType::kInt64;
      break;
    case at::kUInt64:
      view.dtype = DType::kUInt64;
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

namespace {

// None is not given.
bool view_if_given(const at::Tensor& t, TensorView& view) { return !t.defined() || view_of(t, false, view); }

// What forward and backward share but the seed; false for what the core would not take.
bool fill(const Problem& p, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, AttentionArgs& args) {
  const bool h = p.heads_first;
  if (!view_of(q, h, args.q) || !view_of(k, h, args.k) || !view_of(v, h, args.v) ||
      !view_if_given(p.cu_seqlens_q, args.cu_seqlens_q) || !view_if_given(p.cu_seqlens_k, args.cu_seqlens_k) ||
      !view_if_given(p.bias, args.bias) || !view_if_given(p.alibi_slopes, args.alibi_slopes) ||
      !view_if_given(p.sink, args.sink) || !view_if_given(p.seqused_q, args.seqused_q) ||
      !view_if_given(p.seqused_k, args.seqused_k))
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
  if (p.scaled) args.softmax_scale = p.softmax_scale;
  args.softcap = p.softcap;
  args.dropout_p = p.dropout_p;
  args.deterministic = p.deterministic;
  args.backend = p.backend;
  return true;
}

// Of what hooks for saved tensors may have given back.
bool fill_seed(const Problem& p, AttentionArgs& args) {
  if (p.dropout_p == 0.) return true;
  const at::Tensor& seed = p.seed;
  if (!seed.defined()) return false;
  if (seed.numel() != 1) return view_of(seed, false, args.seed_tensor);
  if (!seed.is_cpu() || seed.scalar_type() != at::kLong) return false;
  args.seed = static_cast<std::uint64_t>(*seed.const_data_ptr<std::int64_t>());
  return true;
}

// By the generator of q's device, as PyTorch's own dropout: on a GPU nothing is waited for, and a CUDA graph that was
// captured draws anew.
at::Tensor drawn_seed(const at::Tensor& q) {
  return at::randint(std::numeric_limits<std::int64_t>::max(), {2}, q.options().dtype(at::kLong));
}

bool stream_of(const at::Tensor& q, void** stream) { return !q.is_cuda() || current_stream(q.get_device(), stream); }

// Runs a call on a stream of q's device. Into `drawn`, where it is given, goes a seed for it.
template <class Args>
bool run(bool (*function)(const Args&, bool, const GpuOptions&, Failure&), const Args& args, bool packed,
         const at::Tensor& q, void* stream, at::Tensor* drawn = nullptr) {
  struct Owner {
    const at::Tensor& like;
    at::Tensor scratch;
    at::Tensor* drawn;
  } owner{q, {}, drawn};
  GpuOptions gpu;
  gpu.owner = &owner;
  if (q.is_cuda()) {
    gpu.stream = stream;
    gpu.workspace = [](void* given, std::size_t size) {
      auto& o = *static_cast<Owner*>(given);
      o.scratch = at::empty({static_cast<std::int64_t>(size)}, o.like.options().dtype(at::kByte));
      return o.scratch.mutable_data_ptr();
    };
  }
  if (drawn != nullptr)
    gpu.seed = [](void* given) {
      auto& o = *static_cast<Owner*>(given);
      *o.drawn = drawn_seed(o.like);
      return static_cast<const std::uint64_t*>(o.drawn->const_data_ptr());
    };
  const torch_ops::TorchThreads threads(*g_core);
  Failure failure;  // its line is said by the way in Python, which fails alike
  return function(args, packed, gpu, failure);
}

// Uninitialised memory for the gradient of x. Heads first it has the order of x in memory, which is what views of a
// projection are made of, and what accumulation into a leaf takes without a copy.
at::Tensor gradient_of(const at::Tensor& x, bool heads_first) {
  if (heads_first) {
    at::Tensor like = at::empty_like(x, at::MemoryFormat::Preserve);
    if (like.stride(-1) == 1 || like.size(-1) == 1) return like;
  }
  return at::empty(x.sizes(), x.options());
}

}  // namespace

bool current_stream(int device, void** stream) {
  if (g_exchange == nullptr) return false;
  const pybind11::gil_scoped_acquire gil;
  if (g_exchange->current_work_stream(kDLCUDA, device, stream) == 0) return true;
  PyErr_Clear();
  return false;
}

at::Tensor with_last_contiguous(const at::Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); }

bool forward(Problem& p, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, at::Tensor& out,
             at::Tensor& lse) {
  RECORD_FUNCTION(forward_operator(p), std::vector<c10::IValue>({q, k, v}));
  ForwardArgs args;
  void* stream = nullptr;
  if (!fill(p, q, k, v, args) || !view_if_given(p.block_table, args.block_table) || !stream_of(q, &stream))
    return false;
  args.num_splits = static_cast<int>(p.num_splits);
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
  const bool draws = p.dropout_p != 0. && !p.seed.defined();
  if (!draws && !fill_seed(p, args)) return false;
  const python::WithoutGil released;
  return run(g_core->forward, args, p.packed, q, stream, draws ? &p.seed : nullptr);
}

bool backward(const Problem& p, const at::Tensor& dout, const at::Tensor& dlse, const Saved& x,
              std::vector<at::Tensor>& gradients) {
  const at::Tensor &q = x[0], &k = x[1], &v = x[2], &out = x[kOut], &lse = x[kLse];
  RECORD_FUNCTION(backward_operator(p), std::vector<c10::IValue>({dout, q}));
  BackwardArgs args;
  void* stream = nullptr;
  if (!fill(p, q, k, v, args) || !fill_seed(p, args) || !stream_of(q, &stream)) return false;
  const at::AutoDispatchBelowADInplaceOrView below;
  const bool h = p.heads_first;
  // Autograd's gradients are often expanded or transposed: that of out.sum() has strides 0.
  const at::Tensor rows = with_last_contiguous(dout);
  const at::Tensor row_sums = dlse.defined() ? with_last_contiguous(dlse) : dlse;
  gradients = {gradient_of(q, h), gradient_of(k, h), gradient_of(v, h)};
  if (p.sink.defined()) gradients.push_back(gradient_of(p.sink, false));
  if (!view_of(rows, h, args.dout) || !view_of(out, h, args.out) || !view_of(lse, false, args.lse) ||
      !view_if_given(row_sums, args.dlse) || !view_of(gradients[0], h, args.dq) || !view_of(gradients[1], h, args.dk) ||
      !view_of(gradients[2], h, args.dv) || (p.sink.defined() && !view_of(gradients[3], false, args.dsink)))
    return false;
  return run(g_core->backward, args, p.packed, q, stream);
}

}  // namespace flashsdk::torch_eager
