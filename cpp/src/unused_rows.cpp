#include "unused_rows.h"

#include <cstring>
#include <limits>

namespace flashsdk {
namespace {

// Where the rows of one side, queries or keys, end. Both null: all rows are used.
struct Ends {
  const std::int32_t *cu_seqlens, *seqused;
  int batch, total;
};
Ends ends_of_queries(const ForwardParams& p) { return {p.cu_seqlens_q, p.seqused_q, p.batch, p.total_q}; }
Ends ends_of_keys(const ForwardParams& p) { return {p.cu_seqlens_k, p.seqused_k, p.batch, p.total_k}; }

// Calls f(batch, row) for each unused one; packed tensors are one batch.
template <class F>
void for_each_unused(const Ends& ends, F f) {
  if (ends.cu_seqlens != nullptr)
    for (int row = ends.cu_seqlens[ends.batch]; row < ends.total; ++row) f(0, row);
  if (ends.seqused != nullptr)
    for (int b = 0; b < ends.batch; ++b)
      for (int row = ends.seqused[b]; row < ends.total; ++row) f(b, row);
}

void zero_rows(const TensorParam& t, DType dtype, const Ends& ends, int heads, int dim) {
  const std::int64_t size = size_of(dtype);
  for_each_unused(ends, [&](std::int64_t b, std::int64_t row) {
    char* of_row = static_cast<char*>(t.ptr) + (b * t.batch + row * t.row) * size;
    for (int h = 0; h < heads; ++h) std::memset(of_row + h * t.head * size, 0, static_cast<std::size_t>(dim * size));
  });
}

}  // namespace

void write_unused_rows(const ForwardParams& p) {
  const Ends ends = ends_of_queries(p);
  zero_rows(p.out, p.dtype, ends, p.num_heads, p.head_dim_v);
  for_each_unused(ends, [&](std::int64_t b, std::int64_t row) {
    for (int h = 0; h < p.num_heads; ++h)
      p.lse.ptr[b * p.lse.batch + h * p.lse.head + row * p.lse.row] = -std::numeric_limits<float>::infinity();
  });
}

void write_unused_rows(const BackwardParams& p) {
  zero_rows(p.dq, p.dtype, ends_of_queries(p), p.num_heads, p.head_dim);
  zero_rows(p.dk, p.dtype, ends_of_keys(p), p.num_heads_kv, p.head_dim);
  zero_rows(p.dv, p.dtype, ends_of_keys(p), p.num_heads_kv, p.head_dim_v);
}

}  // namespace flashsdk
