// Layouts of block-sparse masks, and the lists that kernels walk.
#pragma once

#include <cstdint>
#include <vector>

#include "common/params.h"

namespace flashsdk::testing {

// Kind of every layout block of one (batch, head): 0 = skip, 1 = full, 2 = partial.
struct Layout {
  int rows, cols;
  std::vector<int> kind;  // (rows, cols)
  int at(int r, int c) const { return kind[r * cols + c]; }
};

// The CSR lists of several layouts in one buffer, as (layouts, lines + 1) offsets into one index array.
struct Csr {
  std::vector<std::int32_t> offsets, indices;

  Csr(const std::vector<Layout>& layouts, int wanted, bool by_column) {
    for (const Layout& layout : layouts) {
      const int lines = by_column ? layout.cols : layout.rows, other = by_column ? layout.rows : layout.cols;
      for (int line = 0; line <= lines; ++line) {
        offsets.push_back(static_cast<std::int32_t>(indices.size()));
        for (int x = 0; line < lines && x < other; ++x) {
          if ((by_column ? layout.at(x, line) : layout.at(line, x)) == wanted) indices.push_back(x);
        }
      }
    }
  }
  // Layout (batch, head) is number batch·batch_step + head·head_step.
  BlockListParam param(std::int64_t batch_step, std::int64_t head_step, int lines) const {
    return {offsets.data(), indices.data(), batch_step * (lines + 1), head_step * (lines + 1)};
  }
};

// The four lists of several layouts, as a mask holds them.
class MaskLists {
 public:
  explicit MaskLists(const std::vector<Layout>& layouts)
      : row_full_(layouts, 1, false),
        row_partial_(layouts, 2, false),
        col_full_(layouts, 1, true),
        col_partial_(layouts, 2, true),
        rows_(layouts[0].rows),
        cols_(layouts[0].cols) {}

  // The mask must not outlive these lists. Steps as in Csr::param().
  void put_into(MaskParam& mask, std::int64_t batch_step, std::int64_t head_step) const {
    mask.kind = MaskKind::kBlockSparse;
    mask.row_full = row_full_.param(batch_step, head_step, rows_);
    mask.row_partial = row_partial_.param(batch_step, head_step, rows_);
    mask.col_full = col_full_.param(batch_step, head_step, cols_);
    mask.col_partial = col_partial_.param(batch_step, head_step, cols_);
  }

 private:
  Csr row_full_, row_partial_, col_full_, col_partial_;
  int rows_, cols_;
};

}  // namespace flashsdk::testing
