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

}  // namespace flashsdk::testing
