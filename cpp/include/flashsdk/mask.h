// Which keys a query sees. A mask is a description; the kernels' mask policies (cpp/kernels/common) act on it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "flashsdk/tensor.h"

namespace flashsdk {

// Every query sees every key.
struct Dense {};

// Where the diagonal of a band lies when seqlen_q != seqlen_k.
enum class Alignment : std::uint8_t {
  kBottomRight,  // the last query is on the diagonal with the last key
  kTopLeft,      // the first query is on the diagonal with the first key
};

// Query i sees key j iff -left <= j - (i + shift) <= right, shift = seqlen_k - seqlen_q (0 for kTopLeft).
// No value means unlimited; any integer is allowed, negative ones too.
struct Band {
  std::optional<std::int64_t> left;
  std::optional<std::int64_t> right;
  Alignment alignment = Alignment::kBottomRight;
};

inline Band Causal(Alignment alignment = Alignment::kBottomRight) { return {std::nullopt, 0, alignment}; }
inline Band SlidingWindow(std::optional<std::int64_t> left, std::optional<std::int64_t> right,
                          Alignment alignment = Alignment::kBottomRight) {
  return {left, right, alignment};
}

// Lists of blocks in compressed sparse row form. Line r of batch b, head h is
// indices[offsets[b, h, r] … offsets[b, h, r + 1]), ascending.
struct BlockLists {
  TensorView offsets;  // int32 (batch | 1, num_heads | 1, lines + 1), contiguous
  TensorView indices;  // int32 (blocks)
};

// Visits the listed block_q x block_k blocks of the score matrix and skips all others. Block (r, c) holds queries
// [r·block_q, (r+1)·block_q) and keys [c·block_k, (c+1)·block_k), cut at the sequence ends. Full blocks are visible
// throughout, partial ones where `band` allows. Rows serve the forward and dq, columns (the transpose) dk and dv.
// Block sizes are multiples of 16. With packed sequences the layout is applied to each of them from its first row.
struct BlockMask {
  int block_q = 0;
  int block_k = 0;
  BlockLists row_partial, row_full;  // lines are block rows, indices block columns
  BlockLists col_partial, col_full;  // lines are block columns, indices block rows
  std::optional<Band> band;          // applied inside partial blocks; without one they are visible throughout

  // The lengths the layout was made for, which tell full blocks from partial ones. Those of the call, max_seqlen for
  // packed sequences, must be the same; 0 means any with as many blocks.
  std::int64_t seqlen_q = 0, seqlen_k = 0;
};

// A BlockMask on the host whose lists have been read and are right, of rows and columns: calls take it without reading
// them again, but for other lengths. It holds the addresses of the lists, not their memory: these must live while it is
// in use, and stay as they are.
class FLASHSDK_API CheckedBlockMask {
 public:
  // Throws Error, one line, for what a forward or a backward would refuse.
  explicit CheckedBlockMask(const BlockMask& mask);
  const BlockMask& mask() const noexcept { return mask_; }

 private:
  BlockMask mask_;
};

using Mask = std::variant<Dense, Band, BlockMask, CheckedBlockMask>;

// Owns the lists of a BlockMask on the host and builds the transpose.
class FLASHSDK_API BlockMaskStorage {
 public:
  // blocks: row-major (batch | 1, num_heads | 1, rows, cols), 0 = skip, 1 = full, 2 = partial.
  static BlockMaskStorage from_dense(const std::uint8_t* blocks, int batch, int num_heads, int rows, int cols,
                                     int block_q, int block_k, std::optional<Band> band = std::nullopt);
  ~BlockMaskStorage();
  BlockMaskStorage(BlockMaskStorage&&) noexcept;
  BlockMaskStorage& operator=(BlockMaskStorage&&) noexcept;

  BlockMask view() const;  // valid while this object lives
  double density() const;  // visited blocks / all blocks

 private:
  BlockMaskStorage();
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace flashsdk
