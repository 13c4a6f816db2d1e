// A backward of many short sequences works on a part of them at a time, in the same workspace.
//
// A tile of dq_accum belongs to one sequence and head, so 20000 sequences of one query would take 128 times what their
// dq takes. Sequences share nothing, so a part of the batch is a problem of its own: pointers move, kernels stay.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/packed_tiles.h"
#include "common/params.h"
#include "cuda/schedule/tile_scheduler.h"

namespace flashsdk::cuda {

// Sequences of a part: as many as keep the workspace at kFactor times the query tiles that all rows would fill if they
// were one sequence, or give each worker kTilesEach tiles of keys. Parts are of about the same size, as a small last
// one would leave most workers idle.
inline int sequences_at_once(const ForwardParams& p, Tile tile, Workers workers) {
  constexpr std::int64_t kFactor = 4, kTilesEach = 2;
  const bool packed = p.packed();
  if (p.batch <= 1 || (!packed && p.seqlen_q == 0)) return p.batch;
  if (p.mask.user != nullptr) return p.batch;  // what an application's policy keeps for each sequence can't be moved
  const std::int64_t rows = packed ? p.total_q : std::int64_t{p.batch} * p.seqlen_q;
  const std::int64_t filled = (rows + tile.m - 1) / tile.m;  // query tiles of a head
  const std::int64_t each = packed ? 1 : ceil_div(p.seqlen_q, tile.m);
  const std::int64_t key_tiles = std::int64_t{p.num_heads_kv} * std::max(1, ceil_div(p.seqlen_k, tile.n));
  const std::int64_t enough = (kTilesEach * workers.count + key_tiles - 1) / key_tiles;  // sequences
  // Places of packed sequences are counted from the first row of all (common/packed_tiles.h).
  const std::int64_t before = packed ? first_packed_tile(p.total_q, tile.m, 0) : 0;
  const std::int64_t most = std::max((kFactor * filled - before) / each, enough);
  const int at_once = static_cast<int>(std::clamp<std::int64_t>(most, 1, p.batch));
  return ceil_div(p.batch, ceil_div(p.batch, at_once));
}

// The problem whose workspace serves every part.
inline ForwardParams largest_part(const ForwardParams& p, Tile tile, Workers workers) {
  ForwardParams part = p;
  part.batch = sequences_at_once(p, tile, workers);
  return part;
}

// Sequences [first, first + count) alone.
inline BackwardParams part_of(const BackwardParams& p, int first, int count) {
  BackwardParams part = p;
  part.batch = count;
  if (first == 0) return part;
  const auto advanced = [&](auto* pointer, std::int64_t bytes) {
    using Pointer = decltype(pointer);
    return pointer == nullptr
               ? pointer
               : reinterpret_cast<Pointer>(reinterpret_cast<std::uintptr_t>(pointer) + std::int64_t{first} * bytes);
  };
  for (TensorParam* t : {&part.q, &part.k, &part.v, &part.out, &part.dout, &part.dq, &part.dk, &part.dv})
    t->ptr = advanced(t->ptr, t->batch * std::int64_t{size_of(p.dtype)});
  for (RowParam* r : {&part.lse, &part.dlse}) r->ptr = advanced(r->ptr, r->batch * std::int64_t{sizeof(float)});
  part.cu_seqlens_q = advanced(p.cu_seqlens_q, sizeof(std::int32_t));
  part.cu_seqlens_k = advanced(p.cu_seqlens_k, sizeof(std::int32_t));
  part.seqused_q = advanced(p.seqused_q, sizeof(std::int32_t));
  part.seqused_k = advanced(p.seqused_k, sizeof(std::int32_t));
  for (BlockListParam* list :
       {&part.mask.row_partial, &part.mask.row_full, &part.mask.col_partial, &part.mask.col_full})
    list->offsets = advanced(list->offsets, list->batch * std::int64_t{sizeof(std::int32_t)});
  BiasParam& bias = part.score.bias;
  bias.ptr = advanced(bias.ptr, bias.batch * std::int64_t{size_of(bias.dtype)});
  part.score.alibi_slopes = advanced(p.score.alibi_slopes, p.score.alibi_batch * std::int64_t{sizeof(float)});
  DropoutParam& dropout = part.score.dropout;
  dropout.state = advanced(dropout.state, dropout.state_batch * std::int64_t{sizeof(std::uint64_t)});
  dropout.first_head += first * dropout.heads_each;
  return part;
}

// f(part) for each part of the batch, one after another; at least once.
template <class F>
void for_each_part(const BackwardParams& p, Tile tile, Workers workers, F&& f) {
  const int count = sequences_at_once(p, tile, workers);
  int first = 0;
  do {
    f(part_of(p, first, std::min(count, p.batch - first)));
    first += count;
  } while (first < p.batch);
}

}  // namespace flashsdk::cuda
