// BlockMaskStorage: the lists of a layout and their transpose, from a matrix of blocks.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "flashsdk/mask.h"
#include "host_tensor.h"

namespace flashsdk::testing {
namespace {

struct Matrix {
  int batch, num_heads, rows, cols;
  std::vector<std::uint8_t> blocks;
  int at(int b, int h, int r, int c) const { return blocks[((b * num_heads + h) * rows + r) * cols + c]; }
};

Matrix random_matrix(std::mt19937& rng, int batch, int num_heads, int rows, int cols) {
  Matrix m{batch, num_heads, rows, cols, {}};
  m.blocks.resize(static_cast<std::size_t>(batch) * num_heads * rows * cols);
  for (auto& b : m.blocks) b = static_cast<std::uint8_t>(rng() % 3);
  return m;
}

std::vector<int> line_of(const BlockLists& lists, int b, int h, int line) {
  std::vector<int> blocks;
  const auto begin = static_cast<std::int64_t>(load(lists.offsets, {b, h, line}));
  const auto end = static_cast<std::int64_t>(load(lists.offsets, {b, h, line + 1}));
  for (std::int64_t n = begin; n < end; ++n) blocks.push_back(static_cast<int>(load(lists.indices, Index{n})));
  return blocks;
}

// One kind of block, rows and columns, against the matrix; ascending because the matrix is read in order.
void expect_lists(const Matrix& m, const BlockLists& rows, const BlockLists& cols, int kind) {
  for (int b = 0; b < m.batch; ++b) {
    for (int h = 0; h < m.num_heads; ++h) {
      for (int r = 0; r < m.rows; ++r) {
        std::vector<int> expected;
        for (int c = 0; c < m.cols; ++c) {
          if (m.at(b, h, r, c) == kind) expected.push_back(c);
        }
        ASSERT_EQ(line_of(rows, b, h, r), expected) << "row " << r << " of kind " << kind;
      }
      for (int c = 0; c < m.cols; ++c) {
        std::vector<int> expected;
        for (int r = 0; r < m.rows; ++r) {
          if (m.at(b, h, r, c) == kind) expected.push_back(r);
        }
        ASSERT_EQ(line_of(cols, b, h, c), expected) << "column " << c << " of kind " << kind;
      }
    }
  }
}

BlockMaskStorage storage_of(const Matrix& m, std::optional<Band> band = std::nullopt) {
  return BlockMaskStorage::from_dense(m.blocks.data(), m.batch, m.num_heads, m.rows, m.cols, 16, 32, band);
}

TEST(BlockMaskStorage, ListsRowsAndColumnsOfEachKind) {
  std::mt19937 rng(1);
  for (int round = 0; round < 100; ++round) {
    const auto size = [&](int limit) { return static_cast<int>(rng() % limit); };
    const Matrix m = random_matrix(rng, 1 + size(3), 1 + size(3), size(8), size(8));
    const BlockMaskStorage storage = storage_of(m, Causal());
    const BlockMask mask = storage.view();
    EXPECT_EQ(mask.block_q, 16);
    EXPECT_EQ(mask.block_k, 32);
    ASSERT_TRUE(mask.band.has_value());
    EXPECT_EQ(mask.band->right, 0);
    expect_lists(m, mask.row_full, mask.col_full, 1);
    expect_lists(m, mask.row_partial, mask.col_partial, 2);

    double visited = 0;
    for (auto b : m.blocks) visited += b != 0 ? 1 : 0;
    EXPECT_DOUBLE_EQ(storage.density(), m.blocks.empty() ? 0 : visited / m.blocks.size());
  }
}

TEST(BlockMaskStorage, MovingKeepsViewsValid) {
  std::mt19937 rng(2);
  const Matrix m = random_matrix(rng, 1, 2, 4, 5);
  BlockMaskStorage first = storage_of(m);
  const BlockMask mask = first.view();
  BlockMaskStorage second = std::move(first);
  expect_lists(m, mask.row_full, mask.col_full, 1);
  BlockMaskStorage third = storage_of(random_matrix(rng, 1, 1, 1, 1));
  third = std::move(second);
  expect_lists(m, mask.row_partial, mask.col_partial, 2);
  EXPECT_EQ(third.view().row_full.offsets.data, mask.row_full.offsets.data);
}

TEST(BlockMaskStorage, RefusesWhatIsNoLayout) {
  const std::vector<std::uint8_t> blocks{0, 1, 2, 3};
  auto message = [&](const std::uint8_t* data, int batch, int rows, int block_q, int block_k) {
    try {
      BlockMaskStorage::from_dense(data, batch, 1, rows, 2, block_q, block_k);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_EQ(message(blocks.data(), 1, 1, 16, 16), "");
  EXPECT_EQ(message(blocks.data(), 1, 2, 16, 16), "blocks: 3; 0 (skip), 1 (full) or 2 (partial)");
  EXPECT_EQ(message(blocks.data(), 1, 1, 17, 16), "block_q: 17; a positive multiple of 16, at most 16777216");
  EXPECT_EQ(message(blocks.data(), 1, 1, 16, -16), "block_k: -16; a positive multiple of 16, at most 16777216");
  EXPECT_EQ(message(blocks.data(), 0, 1, 16, 16), "batch: 0; 1 to 2147483646");
  EXPECT_EQ(message(blocks.data(), 1, -1, 16, 16), "rows: -1; 0 to 2147483646");
  EXPECT_EQ(message(nullptr, 1, 1, 16, 16), "blocks: a null pointer; 2 bytes");
}

}  // namespace
}  // namespace flashsdk::testing
