#include "packed_tail.h"

#include <cstring>
#include <limits>

namespace flashsdk {
namespace {

void zero_rows(const TensorParam& t, DType dtype, int begin, int end, int heads, int dim) {
  const std::int64_t size = size_of(dtype);
  for (std::int64_t row = begin; row < end; ++row)
    for (int h = 0; h < heads; ++h)
      std::memset(static_cast<char*>(t.ptr) + (row * t.row + h * t.head) * size, 0,
                  static_cast<std::size_t>(dim * size));
}

}  // namespace

void write_packed_tail(const ForwardParams& p) {
  if (p.cu_seqlens_q == nullptr) return;
  const int begin = p.cu_seqlens_q[p.batch];
  zero_rows(p.out, p.dtype, begin, p.total_q, p.num_heads, p.head_dim_v);
  for (int h = 0; h < p.num_heads; ++h)
    for (std::int64_t row = begin; row < p.total_q; ++row)
      p.lse.ptr[h * p.lse.head + row * p.lse.row] = -std::numeric_limits<float>::infinity();
}

void write_packed_tail(const BackwardParams& p) {
  if (p.cu_seqlens_q == nullptr) return;
  zero_rows(p.dq, p.dtype, p.cu_seqlens_q[p.batch], p.total_q, p.num_heads, p.head_dim);
  zero_rows(p.dk, p.dtype, p.cu_seqlens_k[p.batch], p.total_k, p.num_heads_kv, p.head_dim);
  zero_rows(p.dv, p.dtype, p.cu_seqlens_k[p.batch], p.total_k, p.num_heads_kv, p.head_dim_v);
}

}  // namespace flashsdk
