// New keys and values behind the used ones of a cache, with rotary position embedding (RoFormer, arXiv 2104.09864).
#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <type_traits>

#include "check.h"
#include "common/append.h"
#include "common/fp8.h"
#include "cpu/dtype.h"
#if FLASHSDK_HAVE_CUDA
#include "cuda/cache/kv_append.h"
#include "cuda/host/device.h"
#endif
#include "flashsdk/attention.h"
#include "processors.h"
#include "thread_pool.h"
#include "validate.h"

namespace flashsdk {
namespace {

constexpr auto kRead = MemoryMap::Access::kRead;
constexpr auto kWrite = MemoryMap::Access::kWrite;
constexpr std::int64_t kRowsOfThread = 512;  // below, another thread costs more than it saves

template <class T>
float value_at(const void* data, std::int64_t at, bool float32) {
  return float32 ? static_cast<const float*>(data)[at] : cpu::to_float(static_cast<const T*>(data)[at]);
}

// An element as it lies in a cache or in q_out.
template <class To, class T>
To stored(T x, float descale) {
  if constexpr (std::is_same_v<To, cpu::Fp8>)
    return To{fp8_from_float(cpu::to_float(x) / descale)};
  else
    return cpu::from_float<To>(cpu::to_float(x));
}

template <class T, class To>
void copy(const T* from, int count, float descale, To* to) {
  if constexpr (std::is_same_v<To, T>)
    std::memcpy(to, from, sizeof(T) * count);
  else
    for (int c = 0; c < count; ++c) to[c] = stored<To>(from[c], descale);
}

// Of one head at a position; `from` and `to` are other memory. No product is fused with a sum, neither here nor in
// kv_append.cu, as CMakeLists.txt and CudaKernels.cmake ask: the bits are the same everywhere.
template <class T, class To>
void rotate(const RotaryParam& r, std::int64_t position, const T* from, int dim, float descale, To* to) {
  for (int n = 0; n < r.pairs; ++n) {
    const float cos = value_at<T>(r.cos, position * r.cos_row + n, r.float32);
    const float sin = value_at<T>(r.sin, position * r.sin_row + n, r.float32);
    const float x = cpu::to_float(from[r.first(n)]), y = cpu::to_float(from[r.second(n)]);
    to[r.first(n)] = stored<To>(x * cos - y * sin, descale);
    to[r.second(n)] = stored<To>(y * cos + x * sin, descale);
  }
  copy(from + 2 * r.pairs, dim - 2 * r.pairs, descale, to + 2 * r.pairs);
}

// What tensors share with k, or with k_cache.
struct Alike {
  DType dtype;
  const char* whose;
  Device device;
};

void check_tensor(const char* name, const TensorView& t, const Alike& like, std::initializer_list<Dim> dims,
                  MemoryMap& memory, MemoryMap::Access access) {
  check_given(name, t);
  check_shape(name, t, dims);
  check_dtype(name, t, like.dtype, like.whose);
  check_device(name, t, like.device, ", where k is");
  check_last_dim_contiguous(name, t);
  memory.add(name, t, access);
}

void check_lengths(const char* name, const TensorView& t, std::initializer_list<Dim> dims, Device device,
                   MemoryMap& memory) {
  check_given(name, t);
  check_dtype(name, t, DType::kInt32, "");
  check_shape(name, t, dims);
  check_device(name, t, device, ", where k is");
  check_last_dim_contiguous(name, t);
  memory.add(name, t, kRead);
}

// That of k, or 8 bits where k has 16.
Alike alike_of_caches(const KvAppendArgs& a) {
  check_given("k_cache", a.k_cache);
  if (a.k_cache.dtype == DType::kFloat8E4M3) {
    if (a.k.dtype == DType::kFloat32)
      fail("k_cache", "dtype float8_e4m3fn", "float32, the dtype of k; in float8_e4m3fn k is float16 or bfloat16");
    return {DType::kFloat8E4M3, ", the dtype of k_cache", a.k.device};
  }
  const char* whose = a.k.dtype == DType::kFloat32 ? ", the dtype of k" : ", the dtype of k, or float8_e4m3fn";
  check_dtype("k_cache", a.k_cache, a.k.dtype, whose);
  return {a.k.dtype, ", the dtype of k_cache", a.k.device};
}

DescaleParam check_descale(const char* name, const TensorView& t, const KvAppendArgs& a, MemoryMap& memory) {
  if (!t.given()) return {};
  if (a.k_cache.dtype != DType::kFloat8E4M3)
    fail(name, "given", std::string("none, as k_cache is ") + to_string(a.k_cache.dtype) + " and no float8_e4m3fn");
  check_dtype(name, t, DType::kFloat32, "");
  check_shape(name, t, {{"batch", a.k.shape[0], true}, {"num_heads_kv", a.k.shape[2], true}});
  check_device(name, t, a.k.device, ", where k is");
  memory.add(name, t, kRead);
  return {static_cast<const float*>(t.data), stride_of(t, 0), stride_of(t, 1)};
}

RotaryParam check_rotary(const KvAppendArgs& a, MemoryMap& memory) {
  RotaryParam r;
  if (!a.rotary_cos.given() && !a.rotary_sin.given()) return r;
  check_given("rotary_cos", a.rotary_cos);
  check_given("rotary_sin", a.rotary_sin);
  check_shape("rotary_cos", a.rotary_cos, {{"positions"}, {"rotary_dim / 2"}});
  if (a.rotary_cos.shape[1] > a.k.shape[3] / 2)
    fail("rotary_cos", shape_of(a.rotary_cos),
         "(positions, rotary_dim / 2) of a rotary_dim up to head_dim, " + std::to_string(a.k.shape[3]));
  check_shape("rotary_sin", a.rotary_sin,
              {{"positions", a.rotary_cos.shape[0]}, {"rotary_dim / 2", a.rotary_cos.shape[1]}});
  if (a.rotary_cos.dtype != DType::kFloat32) check_dtype("rotary_cos", a.rotary_cos, a.k.dtype, ", the dtype of k");
  check_dtype("rotary_sin", a.rotary_sin, a.rotary_cos.dtype, ", the dtype of rotary_cos");
  for (auto [name, t] : {std::pair{"rotary_cos", &a.rotary_cos}, std::pair{"rotary_sin", &a.rotary_sin}}) {
    check_device(name, *t, a.k.device, ", where k is");
    check_last_dim_contiguous(name, *t);
    memory.add(name, *t, kRead);
  }
  r.cos = a.rotary_cos.data;
  r.sin = a.rotary_sin.data;
  r.cos_row = stride_of(a.rotary_cos, 0);
  r.sin_row = stride_of(a.rotary_sin, 0);
  r.float32 = a.rotary_cos.dtype == DType::kFloat32;
  r.interleaved = a.rotary_interleaved;
  r.pairs = static_cast<int>(a.rotary_cos.shape[1]);
  return r;
}

TensorParam param_of(const TensorView& t) { return {t.data, stride_of(t, 0), stride_of(t, 1), stride_of(t, 2)}; }

// Lengths, pages and positions themselves: on a CPU, where they can be read.
void check_values(const KvAppendArgs& a, const AppendParams& p) {
  const bool paged = p.pages.table != nullptr;
  const std::int64_t room = a.k_cache.shape[1] * (paged ? a.block_table.shape[1] : 1);
  const std::int64_t last = std::max(p.added, p.queries > 0 ? (p.q_advances ? p.queries : 1) : 0);
  for (int b = 0; b < p.batch; ++b) {
    const std::int64_t used = p.used[b];
    if (used < 0 || used + p.added > room)
      fail("seqused_k", std::to_string(used) + " of sequence " + std::to_string(b),
           "0 to " + std::to_string(room - p.added) + ", as the cache has room for " + std::to_string(room) + " keys");
    if (p.rotary.pairs > 0 && used + last > a.rotary_cos.shape[0])
      fail("rotary_cos", std::to_string(a.rotary_cos.shape[0]) + " positions",
           "at least " + std::to_string(used + last) + ", as sequence " + std::to_string(b) + " goes so far");
    for (std::int64_t n = paged ? used / p.pages.size : 0; paged && n * p.pages.size < used + p.added; ++n)
      if (const std::int32_t page = p.pages.table[b * p.pages.batch + n]; page < 0 || page >= p.pages.count)
        fail("block_table", std::to_string(page) + " at [" + std::to_string(b) + ", " + std::to_string(n) + "]",
             "a page of k_cache, of which there are " + std::to_string(p.pages.count));
  }
}

// Of tensors of T, and caches of Cache.
template <class T, class Cache>
void append_rows(const AppendParams& p) {
  const auto add_key = [&](int b, int j) {
    const int key = p.used[b] + j;
    Cache *of_k = p.cache<Cache>(p.k_cache, b).at(key), *of_v = p.cache<Cache>(p.v_cache, b).at(key);
    for (int h = 0; h < p.num_heads_kv; ++h) {
      rotate(p.rotary, key, row_of<const T>(p.k, b, j) + h * p.k.head, p.head_dim, p.k_descale.of(b, h),
             of_k + h * p.k_cache.head);
      copy(row_of<const T>(p.v, b, j) + h * p.v.head, p.head_dim_v, p.v_descale.of(b, h), of_v + h * p.v_cache.head);
    }
  };
  const auto turn_query = [&](int b, int i) {
    for (int h = 0; h < p.num_heads; ++h)
      rotate(p.rotary, p.position_of_query(b, i), row_of<const T>(p.q, b, i) + h * p.q.head, p.head_dim, 1.f,
             row_of<T>(p.q_out, b, i) + h * p.q_out.head);
  };
  const std::int64_t each = std::int64_t{p.added} + p.queries, rows = p.batch * each;
  std::atomic<std::int64_t> next{0};
  auto work = [&](int) {
    for (std::int64_t n; (n = next.fetch_add(1, std::memory_order_relaxed)) < rows;) {
      const int b = static_cast<int>(n / each), row = static_cast<int>(n % each);
      row < p.added ? add_key(b, row) : turn_query(b, row - p.added);
    }
  };
  const std::int64_t useful = 1 + rows * (p.num_heads_kv + (p.queries > 0 ? p.num_heads : 0)) / kRowsOfThread;
  parallel_runner(static_cast<int>(std::min<std::int64_t>(num_threads(), useful)))(work);
}

AppendParams validate(const KvAppendArgs& a) {
  check_given("k", a.k);
  const Device device = a.k.device;
  check_kernels_for("k", device);
  if (a.k.dtype != DType::kFloat32 && a.k.dtype != DType::kFloat16 && a.k.dtype != DType::kBFloat16)
    fail("k", std::string("dtype ") + to_string(a.k.dtype), "float32, float16 or bfloat16");
  MemoryMap memory;
  const bool paged = a.block_table.given();
  const Alike like_k{a.k.dtype, ", the dtype of k", device};
  check_tensor("k", a.k, like_k, {{"batch"}, {"seqlen_new"}, {"num_heads_kv"}, {"head_dim"}}, memory, kRead);
  const std::int64_t batch = a.k.shape[0], heads_kv = a.k.shape[2], dim = a.k.shape[3];
  check_head_dim("k", dim, Operation::kAppend, device);
  check_extent("k", "num_heads_kv", heads_kv, 1, kMaxRows);
  check_extent("k", "batch", batch, 0, kMaxRows);
  check_tensor("v", a.v, like_k,
               {{"batch", batch}, {"seqlen_new", a.k.shape[1]}, {"num_heads_kv", heads_kv}, {"head_dim_v"}}, memory,
               kRead);
  const Alike like_caches = alike_of_caches(a);
  const Dim first = paged ? Dim{"num_pages"} : Dim{"batch", batch}, row = paged ? Dim{"page_size"} : Dim{"seqlen_k"};
  check_tensor("k_cache", a.k_cache, like_caches, {first, row, {"num_heads_kv", heads_kv}, {"head_dim", dim}}, memory,
               kWrite);
  check_extent("k_cache", row.name, a.k_cache.shape[1], paged ? 1 : 0, kMaxRows);
  check_tensor("v_cache", a.v_cache, like_caches,
               {{first.name, a.k_cache.shape[0]},
                {row.name, a.k_cache.shape[1]},
                {"num_heads_kv", heads_kv},
                {"head_dim_v", a.v.shape[3]}},
               memory, kWrite);
  check_lengths("seqused_k", a.seqused_k, {{"batch", batch}}, device, memory);
  if (paged) {
    check_lengths("block_table", a.block_table, {{"batch", batch}, {"max_pages"}}, device, memory);
    check_extent("block_table", "max_pages", a.block_table.shape[1], 0, kMaxRows);  // as a call that reads the cache
    check_extent("block_table", "max_pages * page_size", a.block_table.shape[1] * a.k_cache.shape[1], 0, kMaxRows);
  }
  if (a.q.given()) {
    check_tensor("q", a.q, like_k, {{"batch", batch}, {"seqlen_q"}, {"num_heads"}, {"head_dim", dim}}, memory, kRead);
    check_tensor("q_out", a.q_out, like_k,
                 {{"batch", batch}, {"seqlen_q", a.q.shape[1]}, {"num_heads", a.q.shape[2]}, {"head_dim", dim}}, memory,
                 kWrite);
    check_extent("q", "seqlen_q", a.q.shape[1], 0, kMaxRows);
    check_extent("q", "num_heads", a.q.shape[2], 1, kMaxRows);
  }
  AppendParams p;
  p.rotary = check_rotary(a, memory);
  p.k_descale = check_descale("k_descale", a.k_descale, a, memory);
  p.v_descale = check_descale("v_descale", a.v_descale, a, memory);
  memory.check_overlap();
  const std::int64_t room = a.k_cache.shape[1] * (paged ? a.block_table.shape[1] : 1);
  if (a.k.shape[1] > room)
    fail("k", "seqlen_new " + std::to_string(a.k.shape[1]), "0 to " + std::to_string(room) + ", the cache's keys");
  p.dtype = a.k.dtype;
  p.dtype_cache = like_caches.dtype;
  p.device = device;
  p.batch = static_cast<int>(batch);
  p.added = static_cast<int>(a.k.shape[1]);
  p.num_heads_kv = static_cast<int>(heads_kv);
  p.head_dim = static_cast<int>(dim);
  p.head_dim_v = static_cast<int>(a.v.shape[3]);
  p.k = param_of(a.k);
  p.v = param_of(a.v);
  p.k_cache = param_of(a.k_cache);
  p.v_cache = param_of(a.v_cache);
  if (a.q.given()) {
    p.queries = static_cast<int>(a.q.shape[1]);
    p.num_heads = static_cast<int>(a.q.shape[2]);
    p.q = param_of(a.q);
    p.q_out = param_of(a.q_out);
  }
  p.used = static_cast<const std::int32_t*>(a.seqused_k.data);
  if (paged)
    p.pages = {static_cast<const std::int32_t*>(a.block_table.data), stride_of(a.block_table, 0),
               static_cast<int>(a.k_cache.shape[1]), static_cast<int>(a.k_cache.shape[0])};
  p.q_advances = a.q_advances;
  if (device.type == DeviceType::kCPU) check_values(a, p);
  return p;
}

void append_on_cpu(const AppendParams& p) {
  const bool fp8 = p.dtype_cache == DType::kFloat8E4M3;
  switch (p.dtype) {
    case DType::kFloat32:
      return append_rows<float, float>(p);
    case DType::kBFloat16:
      return fp8 ? append_rows<cpu::Bf16, cpu::Fp8>(p) : append_rows<cpu::Bf16, cpu::Bf16>(p);
    default:
      return fp8 ? append_rows<cpu::Fp16, cpu::Fp8>(p) : append_rows<cpu::Fp16, cpu::Fp16>(p);
  }
}

}  // namespace

void kv_append(const KvAppendArgs& args, const LaunchOptions& options) {
  const AppendParams p = validate(args);
  if (p.device.type == DeviceType::kCPU) {
    if (options.stream != nullptr) fail("stream", "given", "none, as k is on cpu");
    return append_on_cpu(p);
  }
#if FLASHSDK_HAVE_CUDA
  cuda::check_stream(options.stream, p.device.index);
  cuda::launch_kv_append(p, options.stream);
#endif
}

}  // namespace flashsdk
