// TMA descriptors of the tensors of a problem. Implemented in sm90/tensor_map.cpp, without a link to the driver.
#pragma once

#include <cuda.h>

#include "common/params.h"

namespace flashsdk::sm90 {

// What a descriptor covers: rows of one sequence (batched), of all (packed, batch = 1) or of a page (batch: of pages).
// Reads beyond give zeros, writes beyond are dropped.
struct TensorExtent {
  int columns, rows, heads, batch;
};

inline TensorExtent query_extent(const ForwardParams& p, int columns) {
  const bool packed = p.packed();
  return {columns, packed ? p.total_q : p.seqlen_q, p.num_heads, packed ? 1 : p.batch};
}
inline TensorExtent key_extent(const ForwardParams& p, int columns) {
  if (p.pages.table != nullptr) return {columns, p.pages.size, p.num_heads_kv, p.pages.count};
  const bool packed = p.packed();
  return {columns, packed ? p.total_k : p.seqlen_k, p.num_heads_kv, packed ? 1 : p.batch};
}

// Null, or why a tensor of 16-bit elements cannot have a descriptor.
FLASHSDK_API const char* tensor_map_refusal(const TensorParam& t, const TensorExtent& extent);

// Coordinates are (column, row, head, batch); a copy moves a box of box_rows x box_columns, whose rows of 128 or 64
// bytes are swizzled as SmemTile (sm90/traits.h) expects. Throws kRuntime when the driver has no such function.
FLASHSDK_API CUtensorMap make_tensor_map(const TensorParam& t, const TensorExtent& extent, DType dtype, int box_rows,
                                         int box_columns);

}  // namespace flashsdk::sm90
