// libflashsdk_jax: attention, its gradients and appending to a cache as calls of XLA, through its FFI.
// flashsdk._jax_call loads it, gives it the core and tells JAX of its handlers, one of each for a CPU and a GPU. It
// knows neither Python nor JAX, and needs XLA's headers alone.
//
// Operands come in the order of flashsdk._jax_call: those that are always there, then what `Given` names. In front of
// its own dimensions each has those of jax.vmap, `outer` of them, of size 1 where it is the same for all. They are
// joined with the batch where strides can say that, and else a call of the core is made for each, as for each sequence
// that drops elements.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core_api.h"
#include "flashsdk/export.h"
#include "xla/ffi/api/ffi.h"

namespace flashsdk::jax {
namespace {

namespace ffi = xla::ffi;

const CoreApi* g_core = nullptr;

enum class Op : std::uint8_t { kForward, kBackward, kAppend };

// ---- what crosses as numbers, as flashsdk._jax_call writes it

// Bits of Numbers::given.
enum Given : std::int64_t {
  kDlse = 1,
  kBias = 2,
  kAlibiSlopes = 4,
  kLengths = 8,  // cu_seqlens_q, cu_seqlens_k: packed sequences
  kLayout = 16,  // the eight arrays of a BlockMask
  kSeed = 32,    // uint32 (batch, 4), packed (4): seed and offset, low halves first
  kScaled = 64,  // no operand: softmax_scale counts
  kBand = 128,   // no operand: left, right and top_left count
  kSink = 256,
  kUsedQ = 512,
  kUsedK = 1024,    // of attention: what is appended always has them
  kTable = 2048,    // keys lie in pages
  kQueries = 4096,  // of what is appended: queries to rotate
  kRotary = 8192,   // rotary_cos, rotary_sin
  kKDescale = 16384,
  kVDescale = 32768,
};

struct Numbers {
  std::int64_t given, outer, max_seqlen_q, max_seqlen_k, left, right, top_left, block_q, block_k, seqlen_q, seqlen_k,
      deterministic, num_splits, rotary_interleaved, q_advances;
};
constexpr std::size_t kNumbers = sizeof(Numbers) / sizeof(std::int64_t);
constexpr std::int64_t kUnlimited = INT32_MAX;

struct Floats {
  float softmax_scale, softcap, dropout_p;
};

// ---- operands

struct Refusal {
  ffi::ErrorCode code;
  std::string line;
};

[[noreturn]] void refuse(ffi::ErrorCode code, std::string line) { throw Refusal{code, std::move(line)}; }

struct Operand {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  std::int64_t size = 0;                    // of an element, in bytes
  std::vector<std::int64_t> shape, stride;  // the outer dimensions, then its own

  // From one element of dimension d to the next, where others may have more elements of it.
  std::int64_t step(std::size_t d) const { return shape[d] == 1 ? 0 : stride[d]; }
};

DType dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F32:
      return DType::kFloat32;
    case ffi::DataType::F16:
      return DType::kFloat16;
    case ffi::DataType::BF16:
      return DType::kBFloat16;
    case ffi::DataType::F8E4M3FN:
      return DType::kFloat8E4M3;
    case ffi::DataType::S32:
    case ffi::DataType::U32:  // seeds: as_words()
      return DType::kInt32;
    case ffi::DataType::PRED:
      return DType::kBool;
    default:
      refuse(ffi::ErrorCode::kInvalidArgument, "dtype: of XLA's " + std::to_string(static_cast<int>(type)) +
                                                   "; float32, float16, bfloat16, float8_e4m3fn, int32 or bool");
  }
}

Operand operand_of(const ffi::AnyBuffer& buffer) {
  Operand x;
  x.data = buffer.untyped_data();
  x.dtype = dtype_of(buffer.element_type());
  x.size = static_cast<std::int64_t>(ffi::ByteWidth(buffer.element_type()));
  const auto dims = buffer.dimensions();
  x.shape.assign(dims.begin(), dims.end());
  x.stride.resize(x.shape.size());
  std::int64_t step = 1;
  for (std::size_t d = x.shape.size(); d-- > 0; step *= x.shape[d]) x.stride[d] = step;
  return x;
}

// kList: the eight arrays of a layout, offsets and indices by turns. Caches are operands that XLA lets us write to.
enum Role {
  kQ,
  kK,
  kV,
  kOut,
  kLse,
  kDout,
  kDlseOf,
  kDq,
  kDk,
  kDv,
  kSeedOf,
  kUsedQOf,
  kUsedKOf,
  kTableOf,
  kKCache,
  kVCache,
  kTurnedQ,
  kBiasOf,
  kSlopes,
  kKDescaleOf,
  kVDescaleOf,
  kList,
  kSinkOf = kList + 8,
  kDsink,
  kCos,
  kSin,
  kCuQ,
  kCuK,
  kRoles
};

using Operands = std::array<std::optional<Operand>, kRoles>;

// Whether its first dimension is the batch. Indices of a layout, and pages, belong to all sequences.
bool has_batch(int role, const Operands& operands) {
  if (operands[kTableOf]) {
    const bool appends = operands[kKCache].has_value();
    if (role == (appends ? kKCache : kK) || role == (appends ? kVCache : kV)) return false;
  }
  return role < kList || (role < kSinkOf && (role - kList) % 2 == 0);
}

// ---- the dimensions of jax.vmap

// Joins the innermost outer dimension with the batch, if every operand's strides can say so.
bool join_with_batch(Operands& operands, std::size_t outer, std::int64_t size) {
  if (operands[kCuQ]) return false;
  const std::size_t at = outer - 1;
  const std::int64_t batch = operands[operands[kQ] ? kQ : kK]->shape[outer];
  for (int role = 0; role < kRoles && size != 1; ++role) {
    const auto& x = operands[static_cast<std::size_t>(role)];
    if (!x) continue;
    const bool batched = has_batch(role, operands);
    const std::int64_t a = x->step(at), b = batched ? x->step(outer) : 0;
    // Offsets lie row by row and belong to their own indices: only what all share stays right.
    const bool shared = a == 0 && b == 0, steps = batch == 1 || a == batch * b;
    if (!(batched && role < kList ? steps : shared)) return false;
  }
  for (int role = 0; role < kRoles; ++role) {
    auto& x = operands[static_cast<std::size_t>(role)];
    if (!x) continue;
    const std::int64_t a = x->step(at);
    if (has_batch(role, operands) && size != 1) {
      const std::int64_t step = batch == 1 ? a : x->step(outer);
      // The same for all: some may stay of size 1.
      x->shape[outer] = role >= kBiasOf && step == 0 ? 1 : size * batch;
      x->stride[outer] = step;
    }
    x->shape.erase(x->shape.begin() + static_cast<std::ptrdiff_t>(at));
    x->stride.erase(x->stride.begin() + static_cast<std::ptrdiff_t>(at));
  }
  return true;
}

// ---- calls of the core

struct Gpu {
  void* stream;
  ffi::ScratchAllocator* scratch;
  std::int32_t device;
  void* memory = nullptr;  // of an earlier call on this stream, which comes before the next one
  std::size_t size = 0;
};

// XLA promises 16 bytes of alignment, and refuses to promise more.
void* workspace(void* owner, std::size_t size) {
  constexpr std::size_t kGiven = 16, kWanted = 256;
  auto& gpu = *static_cast<Gpu*>(owner);
  if (size > gpu.size) {
    const auto memory = gpu.scratch->Allocate(size + kWanted - kGiven, kGiven);
    if (!memory)
      refuse(ffi::ErrorCode::kResourceExhausted,
             "workspace: no memory for " + std::to_string(size) + " bytes; less is free");
    const auto address = reinterpret_cast<std::uintptr_t>(*memory);
    gpu.memory = static_cast<char*>(*memory) + (kWanted - address % kWanted) % kWanted;
    gpu.size = size;
  }
  return gpu.memory;
}

// Operand `x` of the call at `index` of the outer dimensions.
TensorView view_of(const std::optional<Operand>& x, const std::vector<std::int64_t>& index, Device device) {
  TensorView view;
  if (!x) return view;
  const std::size_t outer = index.size();
  std::int64_t offset = 0;
  for (std::size_t d = 0; d < outer; ++d) offset += index[d] * x->step(d);
  view.data = static_cast<char*>(x->data) + offset * x->size;
  view.dtype = x->dtype;
  view.device = device;
  view.rank = static_cast<int>(x->shape.size() - outer);
  if (view.rank > kMaxTensorRank) refuse(ffi::ErrorCode::kInternal, "operands: of another flashsdk; this one's");
  for (int d = 0; d < view.rank; ++d) {
    view.shape[d] = x->shape[outer + static_cast<std::size_t>(d)];
    view.stride[d] = x->stride[outer + static_cast<std::size_t>(d)];
  }
  return view;
}

// Pairs of 32 bits as numbers of 64, which JAX has none of by default. XLA aligns its arrays for both.
TensorView as_words(TensorView halves) {
  if (!halves.given()) return halves;
  halves.dtype = DType::kUInt64;
  halves.shape[halves.rank - 1] /= 2;
  for (int d = 0; d < halves.rank - 1; ++d) halves.stride[d] /= 2;
  return halves;
}

Mask mask_of(const Numbers& n, const Operands& operands, const std::vector<std::int64_t>& index, Device device) {
  Band band;
  if (n.left != kUnlimited) band.left = n.left;
  if (n.right != kUnlimited) band.right = n.right;
  if (n.top_left != 0) band.alignment = Alignment::kTopLeft;
  if ((n.given & kLayout) == 0) return (n.given & kBand) != 0 ? Mask(band) : Mask(Dense{});
  const auto list = [&](std::size_t which) {
    return BlockLists{view_of(operands[kList + 2 * which], index, device),
                      view_of(operands[kList + 2 * which + 1], index, device)};
  };
  BlockMask mask;
  mask.block_q = static_cast<int>(n.block_q);
  mask.block_k = static_cast<int>(n.block_k);
  mask.seqlen_q = n.seqlen_q;
  mask.seqlen_k = n.seqlen_k;
  mask.row_partial = list(0);
  mask.row_full = list(1);
  mask.col_partial = list(2);
  mask.col_full = list(3);
  if ((n.given & kBand) != 0) mask.band = band;
  return mask;
}

void fill(const Numbers& n, const Floats& f, std::string_view backend, const Operands& operands,
          const std::vector<std::int64_t>& index, Device device, AttentionArgs& args) {
  const auto view = [&](int role) { return view_of(operands[static_cast<std::size_t>(role)], index, device); };
  args.q = view(kQ);
  args.k = view(kK);
  args.v = view(kV);
  args.mask = mask_of(n, operands, index, device);
  if ((n.given & kScaled) != 0) args.softmax_scale = f.softmax_scale;
  args.softcap = f.softcap;
  args.dropout_p = f.dropout_p;
  args.bias = view(kBiasOf);
  args.alibi_slopes = view(kSlopes);
  if (TensorView& slopes = args.alibi_slopes; slopes.rank == 2 && slopes.shape[0] == 1) {  // the same for all
    slopes.rank = 1;
    slopes.shape[0] = slopes.shape[1];
    slopes.stride[0] = slopes.stride[1];
  }
  args.cu_seqlens_q = view(kCuQ);
  args.cu_seqlens_k = view(kCuK);
  args.max_seqlen_q = n.max_seqlen_q;
  args.max_seqlen_k = n.max_seqlen_k;
  args.deterministic = n.deterministic != 0;
  args.backend = backend;
  args.seed_tensor = as_words(view(kSeedOf));
  args.sink = view(kSinkOf);
  args.seqused_q = view(kUsedQOf);
  args.seqused_k = view(kUsedKOf);
  args.block_table = view(kTableOf);
  args.k_descale = view(kKDescaleOf);
  args.v_descale = view(kVDescaleOf);
  args.num_splits = static_cast<int>(n.num_splits);
}

[[noreturn]] void refuse(Failure failure) {
  const std::string_view code = failure.code;
  refuse(code == "invalid_argument" ? ffi::ErrorCode::kInvalidArgument
         : code == "unsupported"    ? ffi::ErrorCode::kUnimplemented
                                    : ffi::ErrorCode::kInternal,
         std::move(failure.message));
}

template <class Args>
void call(bool (*function)(const Args&, bool, const GpuOptions&, Failure&), const Args& args, bool packed, Gpu* gpu) {
  GpuOptions options;
  if (gpu != nullptr) {
    options.stream = gpu->stream;
    options.workspace = workspace;
    options.owner = gpu;
  }
  Failure failure;
  if (!function(args, packed, options, failure)) refuse(std::move(failure));
}

// The call at `index` of the outer dimensions.
void call_at(const std::vector<std::int64_t>& index, Op op, const Operands& operands, Device device, Gpu* gpu,
             const Numbers& n, const Floats& f, std::string_view backend) {
  const auto view = [&](int role) { return view_of(operands[static_cast<std::size_t>(role)], index, device); };
  const bool packed = (n.given & kLengths) != 0;
  switch (op) {
    case Op::kForward: {
      ForwardArgs a;
      fill(n, f, backend, operands, index, device, a);
      a.out = view(kOut), a.lse = view(kLse);
      return call(g_core->forward, a, packed, gpu);
    }
    case Op::kBackward: {
      BackwardArgs a;
      fill(n, f, backend, operands, index, device, a);
      a.out = view(kOut), a.lse = view(kLse), a.dout = view(kDout), a.dlse = view(kDlseOf);
      a.dq = view(kDq), a.dk = view(kDk), a.dv = view(kDv), a.dsink = view(kDsink);
      return call(g_core->backward, a, packed, gpu);
    }
    case Op::kAppend: {
      KvAppendArgs a;
      a.k_cache = view(kKCache), a.v_cache = view(kVCache), a.k = view(kK), a.v = view(kV);
      a.seqused_k = view(kUsedKOf), a.block_table = view(kTableOf);
      a.q = view(kQ), a.q_out = view(kTurnedQ), a.rotary_cos = view(kCos), a.rotary_sin = view(kSin);
      a.rotary_interleaved = n.rotary_interleaved != 0;
      a.q_advances = n.q_advances != 0;
      a.k_descale = view(kKDescaleOf), a.v_descale = view(kVDescaleOf);
      Failure failure;
      if (!g_core->append(a, gpu != nullptr ? gpu->stream : nullptr, failure)) refuse(std::move(failure));
    }
  }
}

// Reads operands and results into their roles, in the order of flashsdk._jax_call.
Operands operands_of(Op op, const Numbers& n, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets) {
  const auto given = [&](Given what) { return (n.given & what) != 0; };
  std::vector<int> in = {kQ, kK, kV}, out = {kOut, kLse};
  if (op == Op::kBackward) {
    in.insert(in.end(), {kOut, kLse, kDout});
    out = {kDq, kDk, kDv};
    if (given(kSink)) out.push_back(kDsink);
  } else if (op == Op::kAppend) {
    in = {kKCache, kVCache, kK, kV, kUsedKOf};
    out = {kKCache, kVCache};  // the same memory
    if (given(kQueries)) out.push_back(kTurnedQ);
  }
  if (given(kDlse)) in.push_back(kDlseOf);
  if (given(kBias)) in.push_back(kBiasOf);
  if (given(kAlibiSlopes)) in.push_back(kSlopes);
  if (given(kLengths)) in.insert(in.end(), {kCuQ, kCuK});
  if (given(kLayout))
    for (int i = 0; i < 8; ++i) in.push_back(kList + i);
  if (given(kSeed)) in.push_back(kSeedOf);
  if (given(kSink)) in.push_back(kSinkOf);
  if (given(kUsedQ)) in.push_back(kUsedQOf);
  if (given(kUsedK)) in.push_back(kUsedKOf);
  if (given(kTable)) in.push_back(kTableOf);
  if (given(kQueries)) in.push_back(kQ);
  if (given(kRotary)) in.insert(in.end(), {kCos, kSin});
  if (given(kKDescale)) in.push_back(kKDescaleOf);
  if (given(kVDescale)) in.push_back(kVDescaleOf);
  if (args.size() != in.size() || rets.size() != out.size())
    refuse(ffi::ErrorCode::kInternal, "operands: " + std::to_string(args.size()) + "; " + std::to_string(in.size()));
  Operands operands;
  for (std::size_t i = 0; i < in.size(); ++i)
    operands[static_cast<std::size_t>(in[i])] = operand_of(args.get<ffi::AnyBuffer>(i).value());
  for (std::size_t i = 0; i < out.size(); ++i)
    operands[static_cast<std::size_t>(out[i])] = operand_of(*rets.get<ffi::AnyBuffer>(i).value());
  for (const auto& x : operands)
    if (x && x->shape.size() < static_cast<std::size_t>(n.outer))
      refuse(ffi::ErrorCode::kInternal, "operands: of another flashsdk; this one's");
  return operands;
}

// All calls that one of XLA's stands for.
void run(Op op, Gpu* gpu, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, const Numbers& n,
         const Floats& f, std::string_view backend) {
  if (g_core == nullptr) refuse(ffi::ErrorCode::kInternal, "flashsdk.jax: not imported; import flashsdk.jax");
  Operands operands = operands_of(op, n, args, rets);
  const Device device = gpu != nullptr ? Device{DeviceType::kCUDA, gpu->device} : Device{};
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(n.outer), 1);
  for (const auto& x : operands)
    for (std::size_t d = 0; x && d < sizes.size(); ++d)
      if (x->shape[d] != 1) sizes[d] = x->shape[d];
  while (!sizes.empty() && join_with_batch(operands, sizes.size(), sizes.back())) sizes.pop_back();
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return;
  std::vector<std::int64_t> index(sizes.size(), 0);
  for (bool more = true; more;) {
    call_at(index, op, operands, device, gpu, n, f, backend);
    more = false;
    for (std::size_t d = sizes.size(); d-- > 0 && !more;) more = ++index[d] < sizes[d] || (index[d] = 0) != 0;
  }
}

ffi::Error guarded(Op op, Gpu* gpu, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                   ffi::Span<const std::int64_t> integers, ffi::Span<const float> floats, std::string_view backend) {
  if (integers.size() != kNumbers || floats.size() != 3)
    return {ffi::ErrorCode::kInternal, "flashsdk.jax: of another build than libflashsdk_jax; the same"};
  Numbers n;
  std::memcpy(&n, integers.begin(), sizeof(n));
  try {
    run(op, gpu, args, rets, n, {floats[0], floats[1], floats[2]}, backend);
    return ffi::Error::Success();
  } catch (Refusal& refusal) {
    return {refusal.code, std::move(refusal.line)};
  } catch (const std::exception& e) {
    return {ffi::ErrorCode::kInternal, e.what()};
  }
}

template <Op kOp>
ffi::Error on_cpu(ffi::RemainingArgs args, ffi::RemainingRets rets, ffi::Span<const std::int64_t> integers,
                  ffi::Span<const float> floats, std::string_view backend) {
  return guarded(kOp, nullptr, args, rets, integers, floats, backend);
}

// XLA's stream and XLA's memory, which is given back in the stream's order: nothing is waited for.
template <Op kOp>
ffi::Error on_gpu(void* stream, ffi::ScratchAllocator scratch, std::int32_t device, ffi::RemainingArgs args,
                  ffi::RemainingRets rets, ffi::Span<const std::int64_t> integers, ffi::Span<const float> floats,
                  std::string_view backend) {
  Gpu gpu{stream, &scratch, device};
  return guarded(kOp, &gpu, args, rets, integers, floats, backend);
}

auto with_attributes(auto binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<ffi::Span<const std::int64_t>>("integers")
      .template Attr<ffi::Span<const float>>("floats")
      .template Attr<std::string_view>("backend");
}

auto cpu_binding() { return with_attributes(ffi::Ffi::Bind()); }

auto gpu_binding() {
  return with_attributes(
      ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>().Ctx<ffi::ScratchAllocator>().Ctx<ffi::DeviceOrdinal>());
}

}  // namespace
}  // namespace flashsdk::jax

#define FLASHSDK_HANDLER(name, function, binding)                              \
  extern "C" FLASHSDK_API XLA_FFI_Error* name(XLA_FFI_CallFrame* call_frame) { \
    static auto* const handler = (binding).To(function).release();             \
    return handler->Call(call_frame);                                          \
  }

FLASHSDK_HANDLER(flashsdk_jax_fwd_cpu, flashsdk::jax::on_cpu<flashsdk::jax::Op::kForward>, flashsdk::jax::cpu_binding())
FLASHSDK_HANDLER(flashsdk_jax_bwd_cpu, flashsdk::jax::on_cpu<flashsdk::jax::Op::kBackward>,
                 flashsdk::jax::cpu_binding())
FLASHSDK_HANDLER(flashsdk_jax_append_cpu, flashsdk::jax::on_cpu<flashsdk::jax::Op::kAppend>,
                 flashsdk::jax::cpu_binding())
FLASHSDK_HANDLER(flashsdk_jax_fwd_cuda, flashsdk::jax::on_gpu<flashsdk::jax::Op::kForward>,
                 flashsdk::jax::gpu_binding())
FLASHSDK_HANDLER(flashsdk_jax_bwd_cuda, flashsdk::jax::on_gpu<flashsdk::jax::Op::kBackward>,
                 flashsdk::jax::gpu_binding())
FLASHSDK_HANDLER(flashsdk_jax_append_cuda, flashsdk::jax::on_gpu<flashsdk::jax::Op::kAppend>,
                 flashsdk::jax::gpu_binding())

// The core is that of flashsdk._bindings: a second one would have threads of its own. 0 if it is of another build.
extern "C" FLASHSDK_API int flashsdk_jax_use_core(const void* core) {
  const auto* api = static_cast<const flashsdk::CoreApi*>(core);
  if (api == nullptr || api->layout != flashsdk::CoreApi::kLayout) return 0;
  flashsdk::jax::g_core = api;
  return 1;
}

// The minor version of XLA's FFI that this was built with: an XLA takes it and older ones.
extern "C" FLASHSDK_API int flashsdk_jax_ffi_version() { return XLA_FFI_API_MINOR; }
