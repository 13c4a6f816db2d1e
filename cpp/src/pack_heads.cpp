#include "pack_heads.h"

#include <type_traits>

#include "common/mask_policy.h"

namespace flashsdk {
namespace {

// Slopes, dropout's pattern and lists of blocks belong to a head; packed sequences and used queries may have any
// length. A bias and sinks have strides, and go with their head.
bool heads_can_be_rows(const ForwardParams& p) {
  return p.num_heads > p.num_heads_kv && p.seqlen_q == 1 && !p.ragged_queries() &&
         p.mask.kind != MaskKind::kBlockSparse && p.score.alibi_slopes == nullptr && p.score.dropout.threshold == 0;
}

// Head h becomes row h % rows of head h / rows.
template <class Strided>
void heads_become_rows(Strided& t, int rows) {
  t.row = t.head;
  t.head *= rows;
}

void heads_become_rows(ForwardParams& p) {
  const int rows = p.heads_per_group();
  heads_become_rows(p.q, rows);
  heads_become_rows(p.out, rows);
  heads_become_rows(p.lse, rows);
  heads_become_rows(p.score.bias, rows);
  p.sink.row = p.sink.head;
  p.sink.head *= rows;
  p.num_heads = p.num_heads_kv;
  p.seqlen_q = rows;
}

template <class Pointer>
Pointer* advanced(Pointer* pointer, std::int64_t elements, DType dtype) {
  using Byte = std::conditional_t<std::is_const_v<Pointer>, const char, char>;
  return static_cast<Byte*>(pointer) + elements * size_of(dtype);
}

// A band moves from row to row, but the keys of one query are an interval: the rows of a group see all of it. False
// where it is empty, for not every kernel takes a tensor without rows, and where each sequence has another interval.
bool cut_keys_to_band(ForwardParams& p) {
  if (p.seqused_k != nullptr) return false;
  const KeyRange keys = BandPolicy(p.mask, SeqlenInfo(p, 0), 0, 0).keys_of(0);
  if (keys.begin >= keys.end) return false;
  BiasParam& bias = p.score.bias;
  p.k.ptr = advanced(p.k.ptr, keys.begin * p.k.row, p.dtype_kv);
  p.v.ptr = advanced(p.v.ptr, keys.begin * p.v.row, p.dtype_kv);
  if (bias.ptr != nullptr) bias.ptr = advanced(bias.ptr, keys.begin * bias.col, bias.dtype);
  p.seqlen_k = keys.end - keys.begin;
  p.mask = {};
  return true;
}

}  // namespace

ForwardParams pack_query_heads(ForwardParams p) {
  if (!heads_can_be_rows(p)) return p;
  if (p.mask.kind == MaskKind::kBand && !cut_keys_to_band(p)) return p;
  heads_become_rows(p);
  return p;
}

BackwardParams pack_query_heads(BackwardParams p) {
  // Keys outside of a band have gradients too: zeros, which somebody has to write. A sink's is a sum over a head.
  if (!heads_can_be_rows(p) || p.mask.kind != MaskKind::kDense || p.sink.ptr != nullptr) return p;
  const int rows = p.heads_per_group();
  heads_become_rows(p.dout, rows);
  heads_become_rows(p.dq, rows);
  heads_become_rows(p.dlse, rows);
  heads_become_rows(static_cast<ForwardParams&>(p));
  return p;
}

}  // namespace flashsdk
