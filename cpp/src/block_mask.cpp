// Layouts on the host: lists of blocks and their transpose, from a dense matrix.
#include <cstdint>
#include <limits>
#include <vector>

#include "check.h"
#include "flashsdk/mask.h"

namespace flashsdk {
namespace {

enum Kind : std::uint8_t { kSkip = 0, kFull = 1, kPartial = 2 };

struct Lists {
  std::vector<std::int32_t> offsets, indices;
  int batch, num_heads, lines;

  BlockLists view() {
    return {TensorView(offsets.data(), DType::kInt32, {batch, num_heads, lines + 1}),
            TensorView(indices.data(), DType::kInt32, {static_cast<std::int64_t>(indices.size())})};
  }
};

struct Matrix {
  const std::uint8_t* blocks;
  int batch, num_heads, rows, cols;
  std::size_t per_head() const { return static_cast<std::size_t>(rows) * static_cast<std::size_t>(cols); }
};

// One kind of block, line by line: rows of the matrix, or columns.
Lists lists_of(const Matrix& m, Kind kind, bool columns) {
  const auto lines = static_cast<std::size_t>(columns ? m.cols : m.rows);
  const auto others = static_cast<std::size_t>(columns ? m.rows : m.cols);
  const std::size_t line_step = columns ? 1 : others, other_step = columns ? lines : 1;
  Lists lists{{}, {}, m.batch, m.num_heads, static_cast<int>(lines)};
  const std::size_t heads = static_cast<std::size_t>(m.batch) * static_cast<std::size_t>(m.num_heads);
  lists.offsets.reserve(heads * (lines + 1));
  for (std::size_t h = 0; h < heads; ++h) {
    const std::uint8_t* head = m.blocks + h * m.per_head();
    for (std::size_t line = 0; line < lines; ++line) {
      lists.offsets.push_back(static_cast<std::int32_t>(lists.indices.size()));
      for (std::size_t other = 0; other < others; ++other)
        if (head[line * line_step + other * other_step] == kind)
          lists.indices.push_back(static_cast<std::int32_t>(other));
    }
    lists.offsets.push_back(static_cast<std::int32_t>(lists.indices.size()));
  }
  return lists;
}

int checked(const char* name, int n, int min) {
  check_extent(name, "", n, min, std::numeric_limits<int>::max() - 1);
  return n;
}

}  // namespace

struct BlockMaskStorage::Impl {
  int block_q, block_k;
  std::optional<Band> band;
  Lists row_partial, row_full, col_partial, col_full;
  double density;
};

BlockMaskStorage::BlockMaskStorage() = default;
BlockMaskStorage::~BlockMaskStorage() = default;
BlockMaskStorage::BlockMaskStorage(BlockMaskStorage&&) noexcept = default;
BlockMaskStorage& BlockMaskStorage::operator=(BlockMaskStorage&&) noexcept = default;

BlockMaskStorage BlockMaskStorage::from_dense(const std::uint8_t* blocks, int batch, int num_heads, int rows, int cols,
                                              int block_q, int block_k, std::optional<Band> band) {
  check_block("block_q", block_q);
  check_block("block_k", block_k);
  const Matrix matrix{blocks, checked("batch", batch, 1), checked("num_heads", num_heads, 1), checked("rows", rows, 0),
                      checked("cols", cols, 0)};
  std::size_t size;
  if (__builtin_mul_overflow(static_cast<std::size_t>(batch) * static_cast<std::size_t>(num_heads), matrix.per_head(),
                             &size) ||
      size > std::numeric_limits<std::int32_t>::max())
    fail("blocks", "more than 2147483647", "at most so many", ErrorCode::kUnsupported);
  if (blocks == nullptr && size > 0) fail("blocks", "a null pointer", std::to_string(size) + " bytes");

  std::size_t visited = 0;
  for (std::size_t n = 0; n < size; ++n) {
    if (blocks[n] > kPartial) fail("blocks", std::to_string(blocks[n]), "0 (skip), 1 (full) or 2 (partial)");
    visited += blocks[n] != kSkip;
  }
  BlockMaskStorage storage;
  storage.impl_ = std::make_unique<Impl>(
      Impl{block_q, block_k, band, lists_of(matrix, kPartial, false), lists_of(matrix, kFull, false),
           lists_of(matrix, kPartial, true), lists_of(matrix, kFull, true),
           size == 0 ? 0. : static_cast<double>(visited) / static_cast<double>(size)});
  return storage;
}

BlockMask BlockMaskStorage::view() const {
  Impl& i = *impl_;
  return {i.block_q,         i.block_k, i.row_partial.view(), i.row_full.view(), i.col_partial.view(),
          i.col_full.view(), i.band};
}

double BlockMaskStorage::density() const { return impl_->density; }

}  // namespace flashsdk
