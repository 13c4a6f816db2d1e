// What appending to a cache is told, and how a head is rotated (RoFormer, arXiv 2104.09864): on CPUs and GPUs alike.
#pragma once

#include <cstdint>

#include "common/params.h"
#include "common/seqlen_info.h"

namespace flashsdk {

// Cosines and sines (positions, pairs), float32 or of the dtype of k: pair n is turned by the angle of its position.
struct RotaryParam {
  const void *cos = nullptr, *sin = nullptr;
  std::int64_t cos_row = 0, sin_row = 0;
  bool float32 = true;
  bool interleaved = false;  // pairs are neighbours, (0, 1), …; else (0, pairs), …
  int pairs = 0;             // 0: nothing is turned

  FLASHSDK_HD int first(int n) const { return interleaved ? 2 * n : n; }
  FLASHSDK_HD int second(int n) const { return interleaved ? 2 * n + 1 : n + pairs; }
};

struct AppendParams {
  DType dtype = DType::kFloat32;        // of k, v, q and q_out
  DType dtype_cache = DType::kFloat32;  // dtype, or kFloat8E4M3
  Device device;
  int batch = 0, added = 0;  // sequences, and new keys of each
  int queries = 0;           // of each that are rotated
  int num_heads = 0, num_heads_kv = 0, head_dim = 0, head_dim_v = 0;
  TensorParam k, v, k_cache, v_cache, q, q_out;
  DescaleParam k_descale, v_descale;   // what a cache of 8 bits is divided by
  const std::int32_t* used = nullptr;  // (batch), before
  PageParam pages;
  RotaryParam rotary;
  bool q_advances = true;

  FLASHSDK_HD int position_of_query(int batch, int i) const { return used[batch] + (q_advances ? i : 0); }
  // Where the keys of head 0 of a sequence lie, in k_cache or v_cache.
  template <class T>
  FLASHSDK_HD KeyRows<T> cache(const TensorParam& t, int batch) const {
    auto* const first = static_cast<T*>(t.ptr);
    if (pages.table == nullptr) return {first + batch * t.batch, t.row};
    return {first, t.row, t.batch, pages.table + batch * pages.batch, pages.size};
  }
};

// One row of head 0.
template <class T>
FLASHSDK_HD T* row_of(const TensorParam& t, int batch, int row) {
  return static_cast<T*>(t.ptr) + batch * t.batch + row * t.row;
}

}  // namespace flashsdk
