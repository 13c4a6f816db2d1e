#include "operators.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "torch_schemas.h"
#include "torch_threads.h"

// From PyTorch 2.13 on; older ones write to stderr what has happened.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace flashsdk::torch_ops {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

Host g_host;

constexpr const char *kInvalid = "invalid_argument", *kUnsupported = "unsupported";

[[noreturn]] void fail(const std::string& line, const char* code = kInvalid) {
  g_host.raise({code, line});
  throw std::logic_error("flashsdk: raise() returned");
}

void check(AOTITorchError error) {
  if (error == AOTI_TORCH_SUCCESS) return;
  const char* what = torch_exception_get_what_without_backtrace != nullptr
                         ? torch_exception_get_what_without_backtrace()
                         : "flashsdk: libtorch failed; its message is above";
  throw std::runtime_error(what);
}

// ---- tensors

// What messages call a tensor, and the dtypes it may have.
struct Role {
  const char* name;
  const char* dtypes = "float32, float16 or bfloat16";
};
constexpr Role kBias{"bias", "float32, float16, bfloat16 or bool"}, kAlibiSlopes{"alibi_slopes", "float32"};
constexpr Role kLse{"lse", "float32"}, kDlse{"dlse", "float32"}, kBlocks{"blocks", "int32"};
constexpr Role kCuSeqlensQ{"cu_seqlens_q", "int32"}, kCuSeqlensK{"cu_seqlens_k", "int32"};
constexpr Role kSink{"sink", "float32"}, kDsink{"dsink", "float32"}, kBlockTable{"block_table", "int32"};
constexpr const char* kFloatsOrFp8 = "float32, float16, bfloat16 or float8_e4m3fn";
constexpr Role kK{"k", kFloatsOrFp8}, kV{"v", kFloatsOrFp8};
constexpr Role kKDescale{"k_descale", "float32"}, kVDescale{"v_descale", "float32"};
constexpr Role kSequsedQ{"seqused_q", "int32"}, kSequsedK{"seqused_k", "int32"};

std::string name_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return "float64";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    default:
      std::string name = torch::headeronly::toString(dtype);
      if (name.rfind("Float8", 0) == 0) name[0] = 'f';
      return name;
  }
}

TensorView view_of(Role role, const Tensor& t) {
  TensorView view;
  const ScalarType dtype = t.scalar_type();
  switch (dtype) {
    case ScalarType::Float:
      view.dtype = DType::kFloat32;
      break;
    case ScalarType::Half:
      view.dtype = DType::kFloat16;
      break;
    case ScalarType::BFloat16:
      view.dtype = DType::kBFloat16;
      break;
    case ScalarType::Float8_e4m3fn:
      view.dtype = DType::kFloat8E4M3;
      break;
    case ScalarType::Int:
      view.dtype = DType::kInt32;
      break;
    case ScalarType::Bool:
      view.dtype = DType::kBool;
      break;
    case ScalarType::Long:
      view.dtype = DType::kInt64;
      break;
    case ScalarType::UInt64:
      view.dtype = DType::kUInt64;
      break;
    default:
      fail(std::string(role.name) + ": dtype " + name_of(dtype) + "; " + role.dtypes);
  }
  const std::int64_t rank = t.dim();
  if (rank == 0) fail(std::string(role.name) + ": shape (); an array of at least one dimension");
  if (rank > kMaxTensorRank) fail(std::string(role.name) + ": " + std::to_string(rank) + " dimensions; at most 5");
  view.data = t.data_ptr();
  view.device = t.is_cuda() ? Device{DeviceType::kCUDA, t.get_device_index()} : Device{};
  view.rank = static_cast<int>(rank);
  const auto sizes = t.sizes(), strides = t.strides();
  for (int d = 0; d < view.rank; ++d) {
    view.shape[d] = sizes[d];
    view.stride[d] = strides[d];
  }
  return view;
}

TensorView view_if_given(Role role, const MaybeTensor& t) { return t ? view_of(role, *t) : TensorView(); }

// Uninitialised, row-major, where `like` is.
Tensor empty(const Tensor& like, const std::vector<std::int64_t>& shape, ScalarType dtype) {
  std::vector<std::int64_t> strides(shape.size());
  std::int64_t step = 1;
  for (std::size_t d = shape.size(); d-- > 0; step *= std::max<std::int64_t>(shape[d], 1)) strides[d] = step;
  std::int32_t device_type;
  check(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle;
  check(g_host.empty_strided(static_cast<std::int64_t>(shape.size()), shape.data(), strides.data(),
                             torch::stable::detail::to<std::int32_t>(torch::stable::detail::from(dtype)), device_type,
                             like.get_device_index(), &handle));
  return Tensor(handle);
}

Tensor row_major_like(const Tensor& t) {
  const auto sizes = t.sizes();
  return empty(t, {sizes.begin(), sizes.end()}, t.scalar_type());
}

Tensor with_last_contiguous(const Tensor& t) {
  if (t.dim() == 0 || t.stride(t.dim() - 1) == 1) return t;
  Tensor copy = row_major_like(t);
  torch::stable::copy_(copy, t);
  return copy;
}

// ---- masks, as encode_mask of flashsdk._torch_ops writes them

constexpr std::int64_t kUnlimited = std::numeric_limits<std::int32_t>::max();

// The next lists of a layout from the flat tensor that holds all of them.
class FlatLists {
 public:
  FlatLists(const std::vector<std::int64_t>& code, std::size_t at, const TensorView& flat)
      : code_(code), at_(at), flat_(flat), left_(flat.numel()) {}

  BlockLists next() {
    const std::int64_t batch = code_[at_], heads = code_[at_ + 1], ends = code_[at_ + 2], listed = code_[at_ + 3];
    at_ += 4;
    return {take({batch, heads, ends}), take({listed})};
  }

 private:
  TensorView take(const std::vector<std::int64_t>& shape) {
    TensorView part = flat_;
    part.rank = static_cast<int>(shape.size());
    std::int64_t size = 1;
    for (int d = part.rank - 1; d >= 0; --d) {
      part.shape[d] = shape[d];
      part.stride[d] = size;
      const bool fits = shape[d] >= 0 && !__builtin_mul_overflow(size, shape[d], &size) && size <= left_;
      if (!fits) fail("blocks: " + std::to_string(left_) + " elements at a list; as many as mask tells");
    }
    flat_.data = static_cast<std::int32_t*>(flat_.data) + size;
    left_ -= size;
    return part;
  }

  const std::vector<std::int64_t>& code_;
  std::size_t at_;
  TensorView flat_;
  std::int64_t left_;
};

Mask mask_of(const std::vector<std::int64_t>& code, const MaybeTensor& blocks) {
  constexpr std::size_t kBand = 3, kLayout = kBand + 4 + 4 * 4;
  if (!code.empty() && code.size() != kBand && code.size() != kLayout)
    fail("mask: " + std::to_string(code.size()) + " integers; those of encode_mask");
  if (blocks && code.size() != kLayout) fail("blocks: given; none, as mask is no layout");
  if (!blocks && code.size() == kLayout) fail("blocks: not given; the lists of the layout that mask is");
  if (code.empty()) return Dense{};
  Band band;
  if (code[0] != kUnlimited) band.left = code[0];
  if (code[1] != kUnlimited) band.right = code[1];
  if (code[2] != 0) band.alignment = Alignment::kTopLeft;
  if (!blocks) return band;
  const TensorView flat = view_of(kBlocks, *blocks);
  if (flat.dtype != DType::kInt32 || flat.rank != 1 || flat.stride[0] != 1)
    fail("blocks: another tensor; int32, flat and contiguous");
  FlatLists lists(code, 7, flat);
  BlockMask mask;
  mask.block_q = static_cast<int>(code[3]);
  mask.block_k = static_cast<int>(code[4]);
  mask.seqlen_q = code[5];
  mask.seqlen_k = code[6];
  mask.row_partial = lists.next();
  mask.row_full = lists.next();
  mask.col_partial = lists.next();
  mask.col_full = lists.next();
  if (mask.row_partial.indices.shape[0] > 0) mask.band = band;
  return mask;
}

// ---- calls

// What all take behind their tensors, in the order of the schemas.
struct Options {
  const MaybeTensor &bias, &alibi_slopes, &seed, &blocks;
  const std::vector<std::int64_t>& mask;
  std::optional<double> softmax_scale;
  double softcap, dropout_p;
  bool deterministic;
  const std::string& backend;
};

void fill(const Tensor& q, const Tensor& k, const Tensor& v, const Options& o, AttentionArgs& args) {
  args.q = view_of({"q"}, q);
  args.k = view_of(kK, k);
  args.v = view_of(kV, v);
  args.mask = mask_of(o.mask, o.blocks);
  args.softmax_scale = o.softmax_scale;
  args.softcap = o.softcap;
  args.dropout_p = o.dropout_p;
  args.bias = view_if_given(kBias, o.bias);
  args.alibi_slopes = view_if_given(kAlibiSlopes, o.alibi_slopes);
  if (o.seed) {
    if (o.seed->numel() != 1) {
      args.seed_tensor = view_of({"seed", "int64 or uint64"}, *o.seed);
    } else {
      if (!o.seed->is_cpu() || o.seed->scalar_type() != ScalarType::Long)
        fail("seed: one element of another kind; int64, on cpu, or seed and offset where q is");
      args.seed = static_cast<std::uint64_t>(*static_cast<const std::int64_t*>(o.seed->data_ptr()));
    }
  }
  args.deterministic = o.deterministic;
  args.backend = o.backend;
}

// Of packed sequences: there are some where cu_seqlens_q is.
struct Lengths {
  MaybeTensor cu_seqlens_q, cu_seqlens_k;
  std::int64_t max_seqlen_q = 0, max_seqlen_k = 0;

  bool packed() const { return cu_seqlens_q.has_value(); }
};

void fill(const Lengths& lengths, AttentionArgs& args) {
  args.cu_seqlens_q = view_if_given(kCuSeqlensQ, lengths.cu_seqlens_q);
  args.cu_seqlens_k = view_if_given(kCuSeqlensK, lengths.cu_seqlens_k);
  args.max_seqlen_q = lengths.max_seqlen_q;
  args.max_seqlen_k = lengths.max_seqlen_k;
}

// What attention_fwd and attention_bwd take besides, in the order of the schemas.
struct More {
  MaybeTensor sink, seqused_q, seqused_k, block_table, k_descale, v_descale;
  std::int64_t num_splits = 0;  // 0: as many as pays
};

void fill(const More& more, AttentionArgs& args) {
  args.sink = view_if_given(kSink, more.sink);
  args.seqused_q = view_if_given(kSequsedQ, more.seqused_q);
  args.seqused_k = view_if_given(kSequsedK, more.seqused_k);
  args.block_table = view_if_given(kBlockTable, more.block_table);
  args.k_descale = view_if_given(kKDescale, more.k_descale);
  args.v_descale = view_if_given(kVDescale, more.v_descale);
}

int splits_of(const More& more) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  if (more.num_splits < 0 || more.num_splits > kMost)
    fail("num_splits: " + std::to_string(more.num_splits) + "; an integer from 1 to " + std::to_string(kMost) +
         ", or None");
  return static_cast<int>(more.num_splits);
}

template <class Args>
void run(bool (*function)(const Args&, bool, const GpuOptions&, Failure&), const Args& args, bool packed,
         const Tensor& q) {
  struct Scratch {
    const Tensor& like;
    MaybeTensor memory;
  } scratch{q, {}};
  GpuOptions gpu;
  if (args.q.device.type == DeviceType::kCUDA) {
    if (!g_host.current_stream(args.q.device.index, &gpu.stream))
      fail("q: on cuda:" + std::to_string(args.q.device.index) + "; cpu, as there is no CUDA stream here",
           kUnsupported);
    gpu.owner = &scratch;
    gpu.workspace = [](void* owner, std::size_t size) {
      auto& s = *static_cast<Scratch*>(owner);
      s.memory = empty(s.like, {static_cast<std::int64_t>(size)}, ScalarType::Byte);
      return s.memory->data_ptr();
    };
  }
  const TorchThreads threads(*g_host.core);
  Failure failure;
  if (!function(args, packed, gpu, failure)) fail(failure.message, failure.code);
}

using ForwardResult = std::tuple<Tensor, Tensor>;
using BackwardResult = std::tuple<Tensor, Tensor, Tensor>;
using AttentionBackwardResult = std::tuple<Tensor, Tensor, Tensor, Tensor>;

ForwardResult forward(const Tensor& q, const Tensor& k, const Tensor& v, const Lengths& lengths, const Options& o,
                      const More& more = {}) {
  ForwardArgs args;
  fill(q, k, v, o, args);
  fill(lengths, args);
  fill(more, args);
  args.num_splits = splits_of(more);
  const int rank = lengths.packed() ? 3 : 4;
  Tensor out, lse;
  // With other ranks there are no shapes for them: the core says so before it asks for outputs.
  if (args.q.rank == rank && args.v.rank == rank) {
    const auto size = q.sizes();
    std::vector<std::int64_t> out_shape(size.begin(), size.end()), lse_shape;
    out_shape.back() = args.v.shape[rank - 1];
    if (rank == 4) lse_shape.push_back(size[0]);
    lse_shape.push_back(size[rank - 2]);
    lse_shape.push_back(size[rank - 3]);
    out = empty(q, out_shape, q.scalar_type());
    lse = empty(q, lse_shape, ScalarType::Float);
    args.out = view_of({"out"}, out);
    args.lse = view_of(kLse, lse);
  }
  run(g_host.core->forward, args, lengths.packed(), q);
  return {std::move(out), std::move(lse)};
}

// dsink has no element where there is no sink.
AttentionBackwardResult backward(const Tensor& dout, const MaybeTensor& dlse, const Tensor& q, const Tensor& k,
                                 const Tensor& v, const Tensor& out, const Tensor& lse, const Lengths& lengths,
                                 const Options& o, const More& more = {}) {
  BackwardArgs args;
  fill(q, k, v, o, args);
  fill(lengths, args);
  fill(more, args);
  // Autograd's gradients are often expanded or transposed: that of out.sum() has strides 0.
  const Tensor rows = with_last_contiguous(dout);
  const MaybeTensor row_sums = dlse ? MaybeTensor(with_last_contiguous(*dlse)) : std::nullopt;
  Tensor dq = row_major_like(q), dk = row_major_like(k), dv = row_major_like(v);
  args.dout = view_of({"dout"}, rows);
  args.out = view_of({"out"}, out);
  args.lse = view_of(kLse, lse);
  args.dlse = view_if_given(kDlse, row_sums);
  args.dq = view_of({"dq"}, dq);
  args.dk = view_of({"dk"}, dk);
  args.dv = view_of({"dv"}, dv);
  Tensor dsink = more.sink ? row_major_like(*more.sink) : empty(lse, {0}, ScalarType::Float);
  if (more.sink) args.dsink = view_of(kDsink, dsink);
  run(g_host.core->backward, args, lengths.packed(), q);
  return {std::move(dq), std::move(dk), std::move(dv), std::move(dsink)};
}

BackwardResult without_dsink(AttentionBackwardResult gradients) {
  auto& [dq, dk, dv, dsink] = gradients;
  return {std::move(dq), std::move(dk), std::move(dv)};
}

// ---- the operators; boxing takes their arguments apart by type and checks the number of them

ForwardResult mha_fwd(Tensor q, Tensor k, Tensor v, MaybeTensor bias, MaybeTensor alibi_slopes, MaybeTensor seed,
                      MaybeTensor blocks, std::vector<std::int64_t> mask, std::optional<double> softmax_scale,
                      double softcap, double dropout_p, bool deterministic, std::string backend) {
  return forward(q, k, v, {},
                 {bias, alibi_slopes, seed, blocks, mask, softmax_scale, softcap, dropout_p, deterministic, backend});
}

BackwardResult mha_bwd(Tensor dout, MaybeTensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
                       MaybeTensor bias, MaybeTensor alibi_slopes, MaybeTensor seed, MaybeTensor blocks,
                       std::vector<std::int64_t> mask, std::optional<double> softmax_scale, double softcap,
                       double dropout_p, bool deterministic, std::string backend) {
  return without_dsink(
      backward(dout, dlse, q, k, v, out, lse, {},
               {bias, alibi_slopes, seed, blocks, mask, softmax_scale, softcap, dropout_p, deterministic, backend}));
}

ForwardResult mha_varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
                             std::int64_t max_seqlen_q, std::int64_t max_seqlen_k, MaybeTensor bias,
                             MaybeTensor alibi_slopes, MaybeTensor seed, MaybeTensor blocks,
                             std::vector<std::int64_t> mask, std::optional<double> softmax_scale, double softcap,
                             double dropout_p, bool deterministic, std::string backend) {
  const Lengths lengths{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k};
  return forward(q, k, v, lengths,
                 {bias, alibi_slopes, seed, blocks, mask, softmax_scale, softcap, dropout_p, deterministic, backend});
}

BackwardResult mha_varlen_bwd(Tensor dout, MaybeTensor dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
                              Tensor cu_seqlens_q, Tensor cu_seqlens_k, std::int64_t max_seqlen_q,
                              std::int64_t max_seqlen_k, MaybeTensor bias, MaybeTensor alibi_slopes, MaybeTensor seed,
                              MaybeTensor blocks, std::vector<std::int64_t> mask, std::optional<double> softmax_scale,
                              double softcap, double dropout_p, bool deterministic, std::string backend) {
  const Lengths lengths{cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k};
  return without_dsink(
      backward(dout, dlse, q, k, v, out, lse, lengths,
               {bias, alibi_slopes, seed, blocks, mask, softmax_scale, softcap, dropout_p, deterministic, backend}));
}

ForwardResult attention_fwd(Tensor q, Tensor k, Tensor v, MaybeTensor sink, MaybeTensor seqused_q,
                            MaybeTensor seqused_k, MaybeTensor block_table, MaybeTensor k_descale,
                            MaybeTensor v_descale, std::int64_t num_splits, MaybeTensor cu_seqlens_q,
                            MaybeTensor cu_seqlens_k, std::int64_t max_seqlen_q, std::int64_t max_seqlen_k,
                            MaybeTensor bias, MaybeTensor alibi_slopes, MaybeTensor seed, MaybeTensor blocks,
                            std::vector<std::int64_t> mask, std::optional<double> softmax_scale, double softcap,
                            double dropout_p, bool deterministic, std::string backend) {
  return forward(q, k, v, {cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k},
                 {bias, alibi_slopes, seed, blocks, mask, softmax_scale, softcap, dropout_p, deterministic, backend},
                 {sink, seqused_q, seqused_k, block_table, k_descale, v_descale, num_splits});
}

AttentionBackwardResult attention_bwd(Tensor dout, MaybeTensor dlse, Tensor q, Tensor k, Tensor v, Tensor out,
                                      Tensor lse, MaybeTensor sink, MaybeTensor seqused_q, MaybeTensor seqused_k,
                                      MaybeTensor block_table, MaybeTensor k_descale, MaybeTensor v_descale,
                                      std::int64_t num_splits, MaybeTensor cu_seqlens_q, MaybeTensor cu_seqlens_k,
                                      std::int64_t max_seqlen_q, std::int64_t max_seqlen_k, MaybeTensor bias,
                                      MaybeTensor alibi_slopes, MaybeTensor seed, MaybeTensor blocks,
                                      std::vector<std::int64_t> mask, std::optional<double> softmax_scale,
                                      double softcap, double dropout_p, bool deterministic, std::string backend) {
  return backward(dout, dlse, q, k, v, out, lse, {cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k},
                  {bias, alibi_slopes, seed, blocks, mask, softmax_scale, softcap, dropout_p, deterministic, backend},
                  {sink, seqused_q, seqused_k, block_table, k_descale, v_descale, num_splits});
}

// False where somebody has. A fragment, as a namespace has one library that defines it all, which is Python's to make.
bool define_operators() {
  TorchLibraryHandle library;
  check(aoti_torch_library_init_fragment("flashsdk", __FILE__, __LINE__, &library));
  bool defined = false;
  for (const char* schema : kSchemas) {
    const AOTITorchError error = aoti_torch_library_def(library, schema);
    if (error != AOTI_TORCH_SUCCESS && !defined) return false;
    check(error);
    defined = true;
  }
  return true;
}

}  // namespace

void register_operators(const Host& host, bool define) {
  using torch::stable::detail::StableLibrary;
  g_host = host;
  // Never destroyed: that would take the operators away from whoever runs at exit.
  if (define && !define_operators()) return;
  for (const char* key : {"CPU", "CUDA"}) {
    auto* library = new StableLibrary(StableLibrary::Kind::IMPL, "flashsdk", key, __FILE__, __LINE__);
    library->impl("mha_fwd", TORCH_BOX(&mha_fwd));
    library->impl("mha_bwd", TORCH_BOX(&mha_bwd));
    library->impl("mha_varlen_fwd", TORCH_BOX(&mha_varlen_fwd));
    library->impl("mha_varlen_bwd", TORCH_BOX(&mha_varlen_bwd));
    library->impl("attention_fwd", TORCH_BOX(&attention_fwd));
    library->impl("attention_bwd", TORCH_BOX(&attention_bwd));
  }
}

}  // namespace flashsdk::torch_ops
