#include "validate.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "check.h"
#include "table/cpu.h"
#include "table/sm80.h"
#include "validate_mask.h"

namespace flashsdk {
namespace {

constexpr auto kRead = MemoryMap::Access::kRead;
constexpr auto kWrite = MemoryMap::Access::kWrite;
constexpr const char* kOfQ = ", the dtype of q";
constexpr const char* kWhereQ = ", where q is";

bool is_fp8(const TensorView& t) { return t.given() && t.dtype == DType::kFloat8E4M3; }
bool is_packed(const AttentionArgs& args) { return args.cu_seqlens_q.given() || args.cu_seqlens_k.given(); }

void check_float_dtype(const char* name, const TensorView& t, bool or_bool) {
  if (t.dtype == DType::kFloat32 || t.dtype == DType::kFloat16 || t.dtype == DType::kBFloat16) return;
  if (or_bool && t.dtype == DType::kBool) return;
  fail(name, std::string("dtype ") + to_string(t.dtype),
       or_bool ? "float32, float16, bfloat16 or bool" : "float32, float16 or bfloat16");
}

// That of k and v, which a forward may have in 8 bits beside a q of 16.
DType dtype_of_keys(const AttentionArgs& args) {
  if (!is_fp8(args.k)) return args.q.dtype;
  if (args.q.dtype == DType::kFloat32)
    fail("k", "dtype float8_e4m3fn", "float32, the dtype of q; beside float8_e4m3fn q is float16 or bfloat16");
  return DType::kFloat8E4M3;
}

// ---- shapes

// sm80 has the widest heads, and what it appends to a cache has any.
table::HeadDims widest_on_gpu(Operation operation) {
  return operation == Operation::kForward    ? table::widest(table::kSm80Forward)
         : operation == Operation::kBackward ? table::widest(table::kSm80Backward)
                                             : table::HeadDims(table::widest(table::kCpuHeadDims));
}

void check_width(const char* name, const char* dim, std::int64_t width, int gpu, Operation operation, Device device) {
  constexpr int kCpu = table::widest(table::kCpuHeadDims);
  if (device.type == DeviceType::kCPU || width <= gpu || width > kCpu)
    return check_extent(name, dim, width, 1, device.type == DeviceType::kCPU ? kCpu : gpu);
  fail(name, dim + (' ' + std::to_string(width)),
       "1 to " + std::to_string(gpu) + (operation == Operation::kBackward ? " in the backward" : "") +
           " on a GPU, to " + std::to_string(kCpu) + " on a CPU",
       ErrorCode::kUnsupported);
}

// Those of pages: k and v have no batch, and as many keys as the table has room for.
void read_pages(const AttentionArgs& args, ForwardParams& p) {
  if (!args.seqused_k.given()) fail("block_table", "given", "none without seqused_k, the lengths");
  check_extent("k", "num_pages", args.k.shape[0], 0, kMaxRows);
  check_extent("k", "page_size", args.k.shape[1], 1, kMaxRows);
  check_shape("block_table", args.block_table, {{"batch", args.q.shape[0]}, {"max_pages"}});
  check_extent("block_table", "max_pages", args.block_table.shape[1], 0, kMaxRows);
  check_extent("block_table", "max_pages * page_size", args.block_table.shape[1] * args.k.shape[1], 0, kMaxRows);
  p.pages.count = static_cast<int>(args.k.shape[0]);
  p.pages.size = static_cast<int>(args.k.shape[1]);
  p.seqlen_k = p.total_k = static_cast<int>(args.block_table.shape[1]) * p.pages.size;
}

// The extents that q, k and v say; the tensors are checked against them afterwards.
void read_sizes(const AttentionArgs& args, bool packed, Operation operation, ForwardParams& p) {
  check_given("q", args.q);
  check_given("k", args.k);
  check_given("v", args.v);
  const bool paged = args.block_table.given();
  if (paged && packed) fail("block_table", "given", "none, as sequences are packed");
  if (packed) {
    check_shape("q", args.q, {{"total_q"}, {"num_heads"}, {"head_dim"}});
    check_shape("k", args.k, {{"total_k"}, {"num_heads_kv"}, {"head_dim"}});
    check_shape("v", args.v, {{"total_k"}, {"num_heads_kv"}, {"head_dim_v"}});
  } else {
    const Dim batch = paged ? Dim{"num_pages"} : Dim{"batch"}, row = paged ? Dim{"page_size"} : Dim{"seqlen_k"};
    check_shape("q", args.q, {{"batch"}, {"seqlen_q"}, {"num_heads"}, {"head_dim"}});
    check_shape("k", args.k, {batch, row, {"num_heads_kv"}, {"head_dim"}});
    check_shape("v", args.v, {batch, row, {"num_heads_kv"}, {"head_dim_v"}});
  }

  const int row = packed ? 0 : 1;
  const std::int64_t num_heads = args.q.shape[row + 1], num_heads_kv = args.k.shape[row + 1];
  check_extent("q", packed ? "total_q" : "seqlen_q", args.q.shape[row], 0, kMaxRows);
  check_extent("k", packed ? "total_k" : "seqlen_k", args.k.shape[row], 0, kMaxRows);
  check_extent("q", "num_heads", num_heads, 1, kMaxRows);
  check_extent("k", "num_heads_kv", num_heads_kv, 1, kMaxRows);
  check_head_dim("q", args.q.shape[row + 2], operation, args.q.device);
  check_head_dim_v("v", args.v.shape[row + 2], operation, args.q.device);
  if (num_heads % num_heads_kv != 0)
    fail("k", "num_heads_kv " + std::to_string(num_heads_kv),
         "a divisor of num_heads, which is " + std::to_string(num_heads));
  p.num_heads = static_cast<int>(num_heads);
  p.num_heads_kv = static_cast<int>(num_heads_kv);
  p.head_dim = static_cast<int>(args.q.shape[row + 2]);
  p.head_dim_v = static_cast<int>(args.v.shape[row + 2]);

  if (packed) {
    check_given("cu_seqlens_q", args.cu_seqlens_q);
    check_given("cu_seqlens_k", args.cu_seqlens_k);
    check_shape("cu_seqlens_q", args.cu_seqlens_q, {{"batch + 1"}});
    check_extent("cu_seqlens_q", "batch + 1", args.cu_seqlens_q.shape[0], 1, kMaxRows);
    check_shape("cu_seqlens_k", args.cu_seqlens_k, {{"batch + 1", args.cu_seqlens_q.shape[0]}});
    check_extent("max_seqlen_q", "", args.max_seqlen_q, 0, kMaxRows);
    check_extent("max_seqlen_k", "", args.max_seqlen_k, 0, kMaxRows);
    p.batch = static_cast<int>(args.cu_seqlens_q.shape[0] - 1);
    p.total_q = static_cast<int>(args.q.shape[0]);
    p.total_k = static_cast<int>(args.k.shape[0]);
    p.seqlen_q = static_cast<int>(args.max_seqlen_q);
    p.seqlen_k = static_cast<int>(args.max_seqlen_k);
  } else {
    constexpr const char* kAllowed = "0, as cu_seqlens_q and cu_seqlens_k are not given";
    if (args.max_seqlen_q != 0) fail("max_seqlen_q", std::to_string(args.max_seqlen_q), kAllowed);
    if (args.max_seqlen_k != 0) fail("max_seqlen_k", std::to_string(args.max_seqlen_k), kAllowed);
    check_extent("q", "batch", args.q.shape[0], 0, kMaxRows);
    p.batch = static_cast<int>(args.q.shape[0]);
    p.seqlen_q = p.total_q = static_cast<int>(args.q.shape[1]);
    p.seqlen_k = p.total_k = static_cast<int>(args.k.shape[1]);
    if (paged) read_pages(args, p);
  }
  // Heads of the whole batch are numbered in 32 bits (dropout).
  check_extent("q", "batch * num_heads", std::int64_t{p.batch} * num_heads, 0, kMaxRows);
}

enum class Side : std::uint8_t { kQuery, kKey };  // rows and heads as q has them, or as k and v
enum class Width : std::uint8_t { kQk, kV };      // head_dim or head_dim_v

// The tensors of one problem whose sizes are known.
class Tensors {
 public:
  Tensors(const ForwardParams& p, bool packed, MemoryMap& memory) : p_(p), packed_(packed), memory_(memory) {}

  // (batch, rows, heads, dim), packed (rows, heads, dim), of q's dtype or the one that k and v have. One that is not
  // given, which only a question about a call may leave out, is row-major, as most callers make them.
  TensorParam rows(const char* name, const TensorView& t, Side side, Width width, MemoryMap::Access access) {
    if (!t.given()) return row_major(side, width);
    const bool q = side == Side::kQuery;
    const Dim heads = q ? Dim{"num_heads", p_.num_heads} : Dim{"num_heads_kv", p_.num_heads_kv};
    const Dim dim = width == Width::kQk ? Dim{"head_dim", p_.head_dim} : Dim{"head_dim_v", p_.head_dim_v};
    if (packed_) {
      check_shape(name, t, {q ? Dim{"total_q", p_.total_q} : Dim{"total_k", p_.total_k}, heads, dim});
    } else {
      const bool pages = !q && p_.pages.size > 0;
      const Dim batch = pages ? Dim{"num_pages", p_.pages.count} : Dim{"batch", p_.batch};
      const Dim keys = pages ? Dim{"page_size", p_.pages.size} : Dim{"seqlen_k", p_.seqlen_k};
      check_shape(name, t, {batch, q ? Dim{"seqlen_q", p_.seqlen_q} : keys, heads, dim});
    }
    const DType dtype = q ? p_.dtype : p_.dtype_kv;
    check_dtype(name, t, dtype, dtype == p_.dtype ? kOfQ : ", the dtype of k");
    finish(name, t, access);
    const int row = packed_ ? 0 : 1;
    return {t.data, packed_ ? 0 : stride_of(t, 0), stride_of(t, row), stride_of(t, row + 1)};
  }

  // float32 (batch, num_heads, seqlen_q), packed (num_heads, total_q).
  RowParam per_query(const char* name, const TensorView& t, MemoryMap::Access access) {
    if (packed_) {
      check_shape(name, t, {{"num_heads", p_.num_heads}, {"total_q", p_.total_q}});
    } else {
      check_shape(name, t, {{"batch", p_.batch}, {"num_heads", p_.num_heads}, {"seqlen_q", p_.seqlen_q}});
    }
    check_dtype(name, t, DType::kFloat32, "");
    finish(name, t, access);
    const int head = packed_ ? 0 : 1;
    return {static_cast<float*>(t.data), packed_ ? 0 : stride_of(t, 0), stride_of(t, head), 1};
  }

  BiasParam bias(const TensorView& t) {
    check_float_dtype("bias", t, true);
    check_shape("bias", t,
                {{"batch", p_.batch, true},
                 {"num_heads", p_.num_heads, true},
                 {packed_ ? "max_seqlen_q" : "seqlen_q", p_.seqlen_q, true},
                 {packed_ ? "max_seqlen_k" : "seqlen_k", p_.seqlen_k, true}});
    check_device("bias", t, p_.device, kWhereQ);
    if (stride_of(t, 3) != 0) check_last_dim_contiguous("bias", t);  // stride 0 broadcasts
    memory_.add("bias", t, kRead);
    return {t.data, t.dtype, stride_of(t, 0), stride_of(t, 1), stride_of(t, 2), stride_of(t, 3)};
  }

  void alibi_slopes(const TensorView& t, ScoreParam& score) {
    check_dtype("alibi_slopes", t, DType::kFloat32, "");
    if (t.rank == 1) {
      check_shape("alibi_slopes", t, {{"num_heads", p_.num_heads}});
    } else {
      check_shape("alibi_slopes", t, {{"batch", p_.batch}, {"num_heads", p_.num_heads}});
      score.alibi_batch = stride_of(t, 0);
    }
    finish("alibi_slopes", t, kRead);
    score.alibi_slopes = static_cast<const float*>(t.data);
  }

  // What k or v is multiplied with, float32 (batch, num_heads_kv).
  DescaleParam descale(const char* name, const TensorView& t) {
    if (!t.given()) return {};
    if (p_.dtype_kv != DType::kFloat8E4M3)
      fail(name, "given", std::string("none, as k is ") + to_string(p_.dtype_kv) + " and no float8_e4m3fn");
    check_dtype(name, t, DType::kFloat32, "");
    check_shape(name, t, {{"batch", p_.batch, true}, {"num_heads_kv", p_.num_heads_kv, true}});
    check_device(name, t, p_.device, kWhereQ);
    memory_.add(name, t, kRead);
    return {static_cast<const float*>(t.data), stride_of(t, 0), stride_of(t, 1)};
  }

  // float32 (num_heads), contiguous.
  float* per_head(const char* name, const TensorView& t, MemoryMap::Access access) {
    check_dtype(name, t, DType::kFloat32, "");
    check_shape(name, t, {{"num_heads", p_.num_heads}});
    finish(name, t, access);
    return static_cast<float*>(t.data);
  }

  void seeds(const TensorView& t, DropoutParam& dropout) {
    if (t.dtype != DType::kInt64 && t.dtype != DType::kUInt64)
      fail("seed", std::string("dtype ") + to_string(t.dtype), "int64 or uint64");
    if (t.rank == 1) {
      check_shape("seed", t, {{"seed and offset", 2}});
    } else {
      check_shape("seed", t, {{"batch", p_.batch}, {"seed and offset", 2}});
      dropout.state_batch = stride_of(t, 0);
      dropout.heads_each = 0;
    }
    finish("seed", t, kRead);
    dropout.state = static_cast<const std::uint64_t*>(t.data);
  }

  const std::int32_t* seqused(const char* name, const TensorView& t, const char* cu_seqlens) {
    if (!t.given()) return nullptr;
    if (packed_) fail(name, "given", std::string("none, as the lengths of packed sequences are in ") + cu_seqlens);
    check_shape(name, t, {{"batch", p_.batch}});
    return lengths(name, t);
  }
  // Of the shape that read_pages() has checked.
  void block_table(const TensorView& t, PageParam& pages) {
    pages.table = lengths("block_table", t);
    pages.batch = stride_of(t, 0);
  }
  const std::int32_t* lengths(const char* name, const TensorView& t) {
    check_dtype(name, t, DType::kInt32, "");
    finish(name, t, kRead);
    return static_cast<const std::int32_t*>(t.data);
  }

 private:
  TensorParam row_major(Side side, Width width) const {
    const bool q = side == Side::kQuery;
    const std::int64_t head = width == Width::kQk ? p_.head_dim : p_.head_dim_v;
    const std::int64_t row = head * (q ? p_.num_heads : p_.num_heads_kv);
    return {nullptr, packed_ ? 0 : row * (q ? p_.seqlen_q : p_.seqlen_k), row, head};
  }

  void finish(const char* name, const TensorView& t, MemoryMap::Access access) {
    check_device(name, t, p_.device, kWhereQ);
    check_last_dim_contiguous(name, t);
    memory_.add(name, t, access);
  }

  const ForwardParams& p_;
  const bool packed_;
  MemoryMap& memory_;
};

// ---- values

struct Lengths {
  const char *name, *total_name, *max_name;
};

// Returns the longest length. Reads the values: CPU only.
int check_lengths(const Lengths& of, const std::int32_t* cu, int batch, int total, int max_seqlen) {
  if (cu[0] != 0) fail(of.name, "begins with " + std::to_string(cu[0]), "0");
  int longest = 0;
  for (int b = 0; b < batch; ++b) {
    if (cu[b + 1] < cu[b]) fail(of.name, std::to_string(cu[b]) + " before " + std::to_string(cu[b + 1]), "ascending");
    longest = std::max(longest, cu[b + 1] - cu[b]);
  }
  if (cu[batch] > total)
    fail(of.name, "ends with " + std::to_string(cu[batch]),
         "at most " + std::string(of.total_name) + ' ' + std::to_string(total));
  if (longest > max_seqlen)
    fail(of.max_name, std::to_string(max_seqlen), "at least the longest sequence, " + std::to_string(longest));
  return longest;
}

// Returns the longest length, at most `seqlen`. Reads the values: CPU only.
int check_used(const char* name, const std::int32_t* used, int batch, const char* seqlen_name, int seqlen) {
  int longest = 0;
  for (int b = 0; b < batch; ++b) {
    if (used[b] < 0 || used[b] > seqlen)
      fail(name, std::to_string(used[b]) + " of sequence " + std::to_string(b),
           "0 to " + std::string(seqlen_name) + ", which is " + std::to_string(seqlen));
    longest = std::max(longest, used[b]);
  }
  return longest;
}

// Reads the values of what the sequences use: CPU only.
void check_pages(const PageParam& pages, const std::int32_t* used, int batch) {
  for (int b = 0; b < batch; ++b)
    for (int n = 0; n < ceil_div(used[b], pages.size); ++n) {
      const std::int32_t page = pages.table[b * pages.batch + n];
      if (page < 0 || page >= pages.count)
        fail("block_table", std::to_string(page) + " at [" + std::to_string(b) + ", " + std::to_string(n) + "]",
             pages.count == 0 ? "no page, as k has none"
                              : "0 to " + std::to_string(pages.count - 1) + ", the pages of k");
    }
}

// Callers have doubles, which kernels have not.
float narrowed(const char* name, double x) {
  const auto result = static_cast<float>(x);
  if (std::isinf(result) && std::isfinite(x)) fail(name, number(x), "a number that float32 can hold");
  return result;
}

ScoreParam read_scores(const AttentionArgs& args, int head_dim) {
  ScoreParam score;
  score.softmax_scale = args.softmax_scale ? narrowed("softmax_scale", *args.softmax_scale)
                                           : 1.f / std::sqrt(static_cast<float>(head_dim));
  if (!std::isfinite(score.softmax_scale)) fail("softmax_scale", number(score.softmax_scale), "a finite number");
  score.softcap = narrowed("softcap", args.softcap);
  if (!(std::isfinite(score.softcap) && args.softcap >= 0.))
    fail("softcap", number(args.softcap), "a finite number >= 0");
  // 0 would turn it off.
  if (score.softcap == 0.f && args.softcap > 0.)
    fail("softcap", number(args.softcap), "0, or a number that float32 can hold");
  if (!(args.dropout_p >= 0. && args.dropout_p < 1.)) fail("dropout_p", number(args.dropout_p), "0 <= dropout_p < 1");
  // To the nearest 1/256, to even in the middle; never all of it.
  score.dropout.threshold = std::min(static_cast<int>(std::nearbyint(args.dropout_p * 256.)), 255);
  score.dropout.seed = args.seed;
  score.dropout.offset = args.offset;
  return score;
}

// All that forward and backward share.
void validate_common(const AttentionArgs& args, bool packed, bool columns, ForwardParams& p, MemoryMap& memory) {
  check_given("q", args.q);
  p.device = args.q.device;
  check_kernels_for("q", args.q.device);
  forced_backend(args);
  check_float_dtype("q", args.q, false);
  p.dtype = args.q.dtype;
  check_given("k", args.k);
  p.dtype_kv = dtype_of_keys(args);
  p.deterministic = args.deterministic;
  if (args.num_splits < 0) fail("num_splits", std::to_string(args.num_splits), "0 or more");
  p.num_splits = args.num_splits;
  read_sizes(args, packed, columns ? Operation::kBackward : Operation::kForward, p);

  Tensors tensors(p, packed, memory);
  p.q = tensors.rows("q", args.q, Side::kQuery, Width::kQk, kRead);
  p.k = tensors.rows("k", args.k, Side::kKey, Width::kQk, kRead);
  p.v = tensors.rows("v", args.v, Side::kKey, Width::kV, kRead);
  if (packed) {
    p.cu_seqlens_q = tensors.lengths("cu_seqlens_q", args.cu_seqlens_q);
    p.cu_seqlens_k = tensors.lengths("cu_seqlens_k", args.cu_seqlens_k);
  }
  p.seqused_q = tensors.seqused("seqused_q", args.seqused_q, "cu_seqlens_q");
  p.seqused_k = tensors.seqused("seqused_k", args.seqused_k, "cu_seqlens_k");
  if (args.block_table.given()) tensors.block_table(args.block_table, p.pages);
  p.score = read_scores(args, p.head_dim);
  p.score.dropout.heads_each = p.num_heads;
  if (args.bias.given()) p.score.bias = tensors.bias(args.bias);
  if (args.alibi_slopes.given()) tensors.alibi_slopes(args.alibi_slopes, p.score);
  if (args.sink.given()) p.sink.ptr = tensors.per_head("sink", args.sink, kRead);
  p.k_descale = tensors.descale("k_descale", args.k_descale);
  p.v_descale = tensors.descale("v_descale", args.v_descale);
  if (args.seed_tensor.given()) tensors.seeds(args.seed_tensor, p.score.dropout);
  validate_mask(args.mask, columns, p, memory);
}

// The lengths themselves, last: a kernel's loops need no more than the longest.
void check_length_values(ForwardParams& p) {
  if (p.device.type != DeviceType::kCPU) return;
  if (p.packed()) {
    p.seqlen_q =
        check_lengths({"cu_seqlens_q", "total_q", "max_seqlen_q"}, p.cu_seqlens_q, p.batch, p.total_q, p.seqlen_q);
    p.seqlen_k =
        check_lengths({"cu_seqlens_k", "total_k", "max_seqlen_k"}, p.cu_seqlens_k, p.batch, p.total_k, p.seqlen_k);
  }
  if (p.seqused_q != nullptr) p.seqlen_q = check_used("seqused_q", p.seqused_q, p.batch, "seqlen_q", p.seqlen_q);
  if (p.seqused_k != nullptr) p.seqlen_k = check_used("seqused_k", p.seqused_k, p.batch, "seqlen_k", p.seqlen_k);
  if (p.pages.table != nullptr) check_pages(p.pages, p.seqused_k, p.batch);
}

}  // namespace

void check_kernels_for(const char* name, Device device) {
  if (device.type == DeviceType::kCPU) return;
  if (device.type != DeviceType::kCUDA) fail(name, "on device type " + to_string(device), "cpu or cuda");
#if !FLASHSDK_HAVE_CUDA
  fail(name, "on " + to_string(device), "cpu, as this build has no CUDA kernels (build flashsdk with FLASHSDK_CUDA=ON)",
       ErrorCode::kUnsupported);
#endif
}

void check_head_dim(const char* name, std::int64_t head_dim, Operation operation, Device device) {
  check_width(name, "head_dim", head_dim, widest_on_gpu(operation).qk, operation, device);
}
void check_head_dim_v(const char* name, std::int64_t head_dim_v, Operation operation, Device device) {
  check_width(name, "head_dim_v", head_dim_v, widest_on_gpu(operation).v, operation, device);
}

std::optional<Backend> forced_backend(const AttentionArgs& args) {
  if (args.backend.empty()) return std::nullopt;
  const bool on_cpu = args.q.device.type == DeviceType::kCPU;
  Backend backend;
  if (args.backend == "cpu") {
    backend = Backend::kCpu;
  } else if (args.backend == "sm80") {
    backend = Backend::kSm80;
  } else if (args.backend == "sm90") {
    backend = Backend::kSm90;
  } else {
    fail("backend", shown(args.backend), R"("cpu", "sm80", "sm90" or none)");
  }
  if (on_cpu != (backend == Backend::kCpu))
    fail("backend", args.backend,
         on_cpu ? "cpu, as q is on cpu" : "sm80 or sm90, as q is on " + to_string(args.q.device));
  return backend;
}

ForwardParams validate(const ForwardArgs& args, Completeness completeness) {
  ForwardParams p;
  MemoryMap memory;
  const bool packed = is_packed(args), launch = completeness == Completeness::kLaunch;
  validate_common(args, packed, /*columns=*/false, p, memory);
  Tensors tensors(p, packed, memory);
  if (launch) {
    check_given("out", args.out);
    check_given("lse", args.lse);
  }
  p.out = tensors.rows("out", args.out, Side::kQuery, Width::kV, kWrite);
  if (args.lse.given()) p.lse = tensors.per_query("lse", args.lse, kWrite);
  memory.check_overlap();
  check_length_values(p);
  return p;
}

BackwardParams validate(const BackwardArgs& args, Completeness completeness) {
  BackwardParams p;
  MemoryMap memory;
  const bool packed = is_packed(args), launch = completeness == Completeness::kLaunch;
  if (args.block_table.given())
    fail("block_table", "given", "none, as pages have no backward", ErrorCode::kUnsupported);
  for (const auto& [name, t] : {std::pair{"k", &args.k}, std::pair{"v", &args.v}})
    if (is_fp8(*t))
      fail(name, "dtype float8_e4m3fn", "the dtype of q, as float8_e4m3fn has no backward", ErrorCode::kUnsupported);
  validate_common(args, packed, /*columns=*/true, p, memory);
  Tensors tensors(p, packed, memory);
  auto rows = [&](const char* name, const TensorView& t, Side side, Width width, MemoryMap::Access access) {
    if (launch) check_given(name, t);
    return tensors.rows(name, t, side, width, access);
  };
  p.dout = rows("dout", args.dout, Side::kQuery, Width::kV, kRead);
  p.out = rows("out", args.out, Side::kQuery, Width::kV, kRead);
  if (launch) check_given("lse", args.lse);
  if (args.lse.given()) p.lse = tensors.per_query("lse", args.lse, kRead);
  if (args.dlse.given()) p.dlse = tensors.per_query("dlse", args.dlse, kRead);
  p.dq = rows("dq", args.dq, Side::kQuery, Width::kQk, kWrite);
  p.dk = rows("dk", args.dk, Side::kKey, Width::kQk, kWrite);
  p.dv = rows("dv", args.dv, Side::kKey, Width::kV, kWrite);
  if (args.dsink.given() && !args.sink.given()) fail("dsink", "given", "none, as there is no sink");
  if (args.sink.given() && launch) check_given("dsink", args.dsink);
  if (args.dsink.given()) p.dsink = tensors.per_head("dsink", args.dsink, kWrite);
  memory.check_overlap();
  check_length_values(p);
  return p;
}

}  // namespace flashsdk
