// A backward of many short sequences works on a part of them at a time, in the same workspace.
//
// A tile of dq_accum belongs to one sequence and head, so 20000 sequences of one query would take 128 times what their
// dq takes. Sequences share nothing, so a part of the batch is a problem of its own: pointers move, kernels stay.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/packed_tiles.h"
#include "common/params.h"
#include "cuda/tile_scheduler.h"

namespace flashsdk::cuda {

// Sequences of a part: as many as keep the workspace at kFactor times the tiles that all queries would fill if they
// were one sequence, or give each worker kTilesEach tiles.
inline int sequences_at_once(const ForwardParams& p, int tile_rows, Workers workers) {
  constexpr std::int64_t kFactor = 4, kTilesEach = 8;
  if (p.batch <= 1) return p.batch;
  const bool packed = p.cu_seqlens_q != nullptr;
  const std::int64_t rows = packed ? p.total_q : std::int64_t{p.batch} * p.seqlen_q;
  const std::int64_t filled = (rows + tile_rows - 1) / tile_rows;
  const std::int64_t enough = (kTilesEach * workers.count + p.num_heads - 1) / p.num_heads;
  const std::int64_t most = std::max(kFactor * filled, enough);  // tiles of a head
  // Places of packed sequences are counted from the first row of all (common/packed_tiles.h).
  const std::int64_t found =
      packed ? most - first_packed_tile(p.total_q, tile_rows, 0) : most / std::max(1, ceil_div(p.seqlen_q, tile_rows));
  return static_cast<int>(std::min<std::int64_t>(p.batch, std::max<std::int64_t>(1, found)));
}

// Sequences [first, first + count) alone.
inline BackwardParams part_of(const BackwardParams& p, int first, int count) {
  BackwardParams part = p;
  part.batch = count;
  if (first == 0) return part;
  const auto move = [&](auto* pointer, std::int64_t bytes) {
    using Pointer = decltype(pointer);
    return pointer == nullptr
               ? pointer
               : reinterpret_cast<Pointer>(reinterpret_cast<std::uintptr_t>(pointer) + std::int64_t{first} * bytes);
  };
  for (TensorParam* t : {&part.q, &part.k, &part.v, &part.out, &part.dout, &part.dq, &part.dk, &part.dv})
    t->ptr = move(t->ptr, t->batch * std::int64_t{2});  // of 16 bits
  for (RowParam* r : {&part.lse, &part.dlse}) r->ptr = move(r->ptr, r->batch * std::int64_t{sizeof(float)});
  part.cu_seqlens_q = move(p.cu_seqlens_q, sizeof(std::int32_t));
  part.cu_seqlens_k = move(p.cu_seqlens_k, sizeof(std::int32_t));
  for (BlockListParam* list :
       {&part.mask.row_partial, &part.mask.row_full, &part.mask.col_partial, &part.mask.col_full})
    list->offsets = move(list->offsets, list->batch * std::int64_t{sizeof(std::int32_t)});
  BiasParam& bias = part.score.bias;
  bias.ptr = move(bias.ptr, bias.batch * std::int64_t{size_of(bias.dtype)});
  part.score.alibi_slopes = move(p.score.alibi_slopes, p.score.alibi_batch * std::int64_t{sizeof(float)});
  part.first_head = p.first_head + first * p.num_heads;
  return part;
}

// f(part) for each part of the batch, one after another; at least once.
template <class F>
void for_each_part(const BackwardParams& p, int tile_rows, Workers workers, F&& f) {
  const int count = sequences_at_once(p, tile_rows, workers);
  int first = 0;
  do {
    f(part_of(p, first, std::min(count, p.batch - first)));
    first += count;
  } while (first < p.batch);
}

}  // namespace flashsdk::cuda
