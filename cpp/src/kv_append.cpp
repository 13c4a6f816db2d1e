// New keys and values behind the used ones of a cache, with rotary position embedding (RoFormer, arXiv 2104.09864).
#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>

#include "check.h"
#include "common/seqlen_info.h"
#include "cpu/dtype.h"
#include "flashsdk/attention.h"
#include "processors.h"
#include "thread_pool.h"
#include "validate.h"

namespace flashsdk {
namespace {

constexpr auto kRead = MemoryMap::Access::kRead;
constexpr auto kWrite = MemoryMap::Access::kWrite;
constexpr std::int64_t kRowsOfThread = 512;  // below, another thread costs more than it saves

// A (batch, row, head, element) tensor.
template <class T>
T* row_of(const TensorView& t, std::int64_t batch, std::int64_t row) {
  return static_cast<T*>(t.data) + batch * stride_of(t, 0) + row * stride_of(t, 1);
}

struct Rotary {
  const void *cos_data = nullptr, *sin_data = nullptr;  // float32, or of the dtype of k
  std::int64_t cos_stride = 0, sin_stride = 0;
  bool float32 = true, interleaved = false;
  int pairs = 0;  // 0: nothing is turned
};

template <class T>
float value_at(const void* data, std::int64_t at, bool float32) {
  return float32 ? static_cast<const float*>(data)[at] : cpu::to_float(static_cast<const T*>(data)[at]);
}

// Of one head at a position; `from` and `to` are other memory.
template <class T>
void rotate(const Rotary& r, std::int64_t position, const T* from, int dim, T* to) {
  const int first_step = r.interleaved ? 2 : 1, second = r.interleaved ? 1 : r.pairs;
  for (int n = 0; n < r.pairs; ++n) {
    const float cos = value_at<T>(r.cos_data, position * r.cos_stride + n, r.float32);
    const float sin = value_at<T>(r.sin_data, position * r.sin_stride + n, r.float32);
    const int i = first_step * n, j = i + second;
    const float x = cpu::to_float(from[i]), y = cpu::to_float(from[j]);
    to[i] = cpu::from_float<T>(x * cos - y * sin);
    to[j] = cpu::from_float<T>(y * cos + x * sin);
  }
  std::memcpy(to + 2 * r.pairs, from + 2 * r.pairs, sizeof(T) * (dim - 2 * r.pairs));
}

void check_tensor(const char* name, const TensorView& t, const TensorView& like, std::initializer_list<Dim> dims,
                  MemoryMap& memory, MemoryMap::Access access) {
  check_given(name, t);
  check_shape(name, t, dims);
  check_dtype(name, t, like.dtype, ", the dtype of k");
  check_device(name, t, like.device, ", where k is");
  check_last_dim_contiguous(name, t);
  memory.add(name, t, access);
}

void check_lengths(const char* name, const TensorView& t, std::initializer_list<Dim> dims, MemoryMap& memory) {
  check_given(name, t);
  check_dtype(name, t, DType::kInt32, "");
  check_shape(name, t, dims);
  check_device(name, t, Device{}, ", where k is");
  check_last_dim_contiguous(name, t);
  memory.add(name, t, kRead);
}

Rotary check_rotary(const KvAppendArgs& a, MemoryMap& memory) {
  Rotary r;
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
  r.cos_data = a.rotary_cos.data;
  r.sin_data = a.rotary_sin.data;
  r.cos_stride = stride_of(a.rotary_cos, 0);
  r.sin_stride = stride_of(a.rotary_sin, 0);
  r.float32 = a.rotary_cos.dtype == DType::kFloat32;
  r.interleaved = a.rotary_interleaved;
  r.pairs = static_cast<int>(a.rotary_cos.shape[1]);
  return r;
}

struct Cache {
  bool paged;
  const std::int32_t *used, *table;
  std::int64_t table_stride, page_size;
};

// Lengths, pages and positions themselves.
void check_values(const KvAppendArgs& a, const Cache& cache, const Rotary& rotary) {
  const std::int64_t added = a.k.shape[1], pages = a.k_cache.shape[0];
  const std::int64_t room = a.k_cache.shape[1] * (cache.paged ? a.block_table.shape[1] : 1);
  const std::int64_t last = std::max(added, a.q.given() ? (a.q_advances ? a.q.shape[1] : 1) : 0);
  if (added > room)
    fail("k", "seqlen_new " + std::to_string(added), "0 to " + std::to_string(room) + ", the cache's keys");
  for (std::int64_t b = 0; b < a.k.shape[0]; ++b) {
    const std::int64_t used = cache.used[b];
    if (used < 0 || used + added > room)
      fail("seqused_k", std::to_string(used) + " of sequence " + std::to_string(b),
           "0 to " + std::to_string(room - added) + ", as the cache has room for " + std::to_string(room) + " keys");
    if (rotary.pairs > 0 && used + last > a.rotary_cos.shape[0])
      fail("rotary_cos", std::to_string(a.rotary_cos.shape[0]) + " positions",
           "at least " + std::to_string(used + last) + ", as sequence " + std::to_string(b) + " goes so far");
    for (std::int64_t n = used / cache.page_size; cache.paged && n * cache.page_size < used + added; ++n)
      if (const std::int32_t page = cache.table[b * cache.table_stride + n]; page < 0 || page >= pages)
        fail("block_table", std::to_string(page) + " at [" + std::to_string(b) + ", " + std::to_string(n) + "]",
             "a page of k_cache, of which there are " + std::to_string(pages));
  }
}

template <class T>
void append_rows(const KvAppendArgs& a, const Cache& cache, const Rotary& rotary) {
  const std::int64_t batch = a.k.shape[0], added = a.k.shape[1], queries = a.q.given() ? a.q.shape[1] : 0;
  const int heads_kv = static_cast<int>(a.k.shape[2]), dim = static_cast<int>(a.k.shape[3]);
  const auto rows_of = [&](const TensorView& t, std::int64_t b) {
    if (!cache.paged) return KeyRows<T>(row_of<T>(t, b, 0), stride_of(t, 1));
    return KeyRows<T>(row_of<T>(t, 0, 0), stride_of(t, 1), stride_of(t, 0), cache.table + b * cache.table_stride,
                      static_cast<int>(cache.page_size));
  };
  const auto add_key = [&](std::int64_t b, std::int64_t j) {
    const int key = cache.used[b] + static_cast<int>(j);
    T *of_k = rows_of(a.k_cache, b).at(key), *of_v = rows_of(a.v_cache, b).at(key);
    for (int h = 0; h < heads_kv; ++h) {
      rotate(rotary, key, row_of<const T>(a.k, b, j) + h * stride_of(a.k, 2), dim, of_k + h * stride_of(a.k_cache, 2));
      std::memcpy(of_v + h * stride_of(a.v_cache, 2), row_of<const T>(a.v, b, j) + h * stride_of(a.v, 2),
                  sizeof(T) * a.v.shape[3]);
    }
  };
  const auto turn_query = [&](std::int64_t b, std::int64_t i) {
    const std::int64_t position = cache.used[b] + (a.q_advances ? i : 0);
    for (std::int64_t h = 0; h < a.q.shape[2]; ++h)
      rotate(rotary, position, row_of<const T>(a.q, b, i) + h * stride_of(a.q, 2), dim,
             row_of<T>(a.q_out, b, i) + h * stride_of(a.q_out, 2));
  };
  const std::int64_t rows = batch * (added + queries);
  std::atomic<std::int64_t> next{0};
  auto work = [&](int) {
    for (std::int64_t n; (n = next.fetch_add(1, std::memory_order_relaxed)) < rows;) {
      const std::int64_t b = n / (added + queries), row = n % (added + queries);
      row < added ? add_key(b, row) : turn_query(b, row - added);
    }
  };
  const std::int64_t useful = 1 + rows * (heads_kv + (queries > 0 ? a.q.shape[2] : 0)) / kRowsOfThread;
  parallel_runner(static_cast<int>(std::min<std::int64_t>(num_threads(), useful)))(work);
}

}  // namespace

void kv_append(const KvAppendArgs& a) {
  check_given("k", a.k);
  if (a.k.device.type != DeviceType::kCPU)
    fail("k", "on " + to_string(a.k.device), "cpu, as no GPU kernel appends so far", ErrorCode::kUnsupported);
  if (a.k.dtype != DType::kFloat32 && a.k.dtype != DType::kFloat16 && a.k.dtype != DType::kBFloat16)
    fail("k", std::string("dtype ") + to_string(a.k.dtype), "float32, float16 or bfloat16");
  MemoryMap memory;
  const bool paged = a.block_table.given();
  check_tensor("k", a.k, a.k, {{"batch"}, {"seqlen_new"}, {"num_heads_kv"}, {"head_dim"}}, memory, kRead);
  const std::int64_t batch = a.k.shape[0], heads_kv = a.k.shape[2], dim = a.k.shape[3];
  check_extent("k", "head_dim", dim, 1, kMaxHeadDim);
  check_extent("k", "num_heads_kv", heads_kv, 1, kMaxRows);
  check_tensor("v", a.v, a.k,
               {{"batch", batch}, {"seqlen_new", a.k.shape[1]}, {"num_heads_kv", heads_kv}, {"head_dim_v"}}, memory,
               kRead);
  const Dim first = paged ? Dim{"num_pages"} : Dim{"batch", batch}, row = paged ? Dim{"page_size"} : Dim{"seqlen_k"};
  check_tensor("k_cache", a.k_cache, a.k, {first, row, {"num_heads_kv", heads_kv}, {"head_dim", dim}}, memory, kWrite);
  check_extent("k_cache", row.name, a.k_cache.shape[1], paged ? 1 : 0, kMaxRows);
  check_tensor("v_cache", a.v_cache, a.k,
               {{first.name, a.k_cache.shape[0]},
                {row.name, a.k_cache.shape[1]},
                {"num_heads_kv", heads_kv},
                {"head_dim_v", a.v.shape[3]}},
               memory, kWrite);
  check_lengths("seqused_k", a.seqused_k, {{"batch", batch}}, memory);
  if (paged) {
    check_lengths("block_table", a.block_table, {{"batch", batch}, {"max_pages"}}, memory);
    check_extent("block_table", "max_pages", a.block_table.shape[1], 0, kMaxRows);  // as a call that reads the cache
    check_extent("block_table", "max_pages * page_size", a.block_table.shape[1] * a.k_cache.shape[1], 0, kMaxRows);
  }
  if (a.q.given()) {
    check_tensor("q", a.q, a.k, {{"batch", batch}, {"seqlen_q"}, {"num_heads"}, {"head_dim", dim}}, memory, kRead);
    check_tensor("q_out", a.q_out, a.k,
                 {{"batch", batch}, {"seqlen_q", a.q.shape[1]}, {"num_heads", a.q.shape[2]}, {"head_dim", dim}}, memory,
                 kWrite);
  }
  const Rotary rotary = check_rotary(a, memory);
  memory.check_overlap();
  const Cache cache{paged, static_cast<const std::int32_t*>(a.seqused_k.data),
                    paged ? static_cast<const std::int32_t*>(a.block_table.data) : nullptr,
                    paged ? stride_of(a.block_table, 0) : 0, std::max<std::int64_t>(a.k_cache.shape[1], 1)};
  check_values(a, cache, rotary);
  switch (a.k.dtype) {
    case DType::kFloat32:
      return append_rows<float>(a, cache, rotary);
    case DType::kBFloat16:
      return append_rows<cpu::Bf16>(a, cache, rotary);
    default:
      return append_rows<cpu::Fp16>(a, cache, rotary);
  }
}

}  // namespace flashsdk
