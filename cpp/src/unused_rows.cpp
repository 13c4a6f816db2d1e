#include "unused_rows.h"

#include <cstring>
#include <limits>

#include "common/seqlen_info.h"

namespace flashsdk {
namespace {

// Calls f(batch, row) for each unused one.
template <class F>
void for_each_unused(const SequenceRows& rows, F f) {
  for (int b = 0; b < rows.batches(); ++b)
    for (int row = rows.first_unused(b); row < rows.total; ++row) f(b, row);
}

void zero_rows(const TensorParam& t, DType dtype, const SequenceRows& rows, int heads, int dim) {
  const std::int64_t size = size_of(dtype);
  for_each_unused(rows, [&](std::int64_t b, std::int64_t row) {
    char* of_row = static_cast<char*>(t.ptr) + (b * t.batch + row * t.row) * size;
    for (int h = 0; h < heads; ++h) std::memset(of_row + h * t.head * size, 0, static_cast<std::size_t>(dim * size));
  });
}

}  // namespace

void write_unused_rows(const ForwardParams& p) {
  const SequenceRows queries = SequenceRows::of_queries(p);
  zero_rows(p.out, p.dtype, queries, p.num_heads, p.head_dim_v);
  for_each_unused(queries, [&](std::int64_t b, std::int64_t row) {
    for (int h = 0; h < p.num_heads; ++h)
      p.lse.ptr[b * p.lse.batch + h * p.lse.head + row * p.lse.row] = -std::numeric_limits<float>::infinity();
  });
}

void write_unused_rows(const BackwardParams& p) {
  zero_rows(p.dq, p.dtype, SequenceRows::of_queries(p), p.num_heads, p.head_dim);
  zero_rows(p.dk, p.dtype, SequenceRows::of_keys(p), p.num_heads_kv, p.head_dim);
  zero_rows(p.dv, p.dtype, SequenceRows::of_keys(p), p.num_heads_kv, p.head_dim_v);
}

}  // namespace flashsdk
