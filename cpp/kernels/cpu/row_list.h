// Rows of K or V that are read where they lie, and asked for before.
#pragma once

#include "common/seqlen_info.h"
#include "cpu/simd.h"

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

// Asks memory for rows that will be read soon, evenly over the steps of what is computed meanwhile. Without, memory
// waits while processors compute: rows are pages apart where heads interleave, and what is next they do not guess.
class RowsAhead {
 public:
  void start(const char* const* row, int rows, int row_bytes, int steps) {
    row_ = row;
    row_bytes_ = row_bytes;
    lines_ = rows * ceil_div(row_bytes, kLine);
    steps_ = steps;
    at_ = due_ = 0;
  }
  // At most as often as there are steps.
  FLASHSDK_HD void step() {
    for (due_ += lines_; due_ >= steps_; due_ -= steps_) {
      __builtin_prefetch(*row_ + at_, 0, 2);
      at_ += kLine;
      if (at_ >= row_bytes_) at_ = 0, ++row_;
    }
  }

 private:
  static constexpr int kLine = 64;
  const char* const* row_ = nullptr;
  int row_bytes_ = 0, lines_ = 0, steps_ = 1, at_ = 0, due_ = 0;
};

// Where the rows of up to kMost keys begin: a stride apart, or each in a page of its own. They are read and asked for
// in blocks of kBlock rows.
template <int kMost, int kBlock>
class RowList {
 public:
  template <class E>
  void set(const KeyRows<const E>& rows, KeyRange keys, int columns) {
    count_ = max_of(0, keys.end - keys.begin);
    row_bytes_ = columns * static_cast<int>(sizeof(E));
    for (int r = 0; r < count_;) {
      const E* row = rows.at(keys.begin + r);
      const int run_end = min_of(r + rows.run(keys.begin + r), count_);
      for (; r < run_end; ++r, row += rows.stride()) row_[r] = reinterpret_cast<const char*>(row);
    }
  }
  int count() const { return count_; }
  int blocks() const { return ceil_div(count_, kBlock); }
  KeyRange block(int index) const { return {index * kBlock, min_of((index + 1) * kBlock, count_)}; }
  template <class E>
  FLASHSDK_HD const E* at(int r) const {
    return reinterpret_cast<const E*>(row_[r]);
  }

  // While block `index` is read, in so many steps, asks for what comes two blocks later, of these rows or the next:
  // with AVX-512 64 rows, of which caches keep all. Of a whole tile they do not: rows a power of two apart have few
  // places there.
  void ask_ahead(const RowList& next, int index, int steps, RowsAhead& ahead) const {
    constexpr int kBlocksAhead = 2;
    const int later = index + min_of(kBlocksAhead, blocks());
    later < blocks() ? ask(later, steps, ahead) : next.ask(later - blocks(), steps, ahead);
  }

 private:
  void ask(int index, int steps, RowsAhead& ahead) const {
    const KeyRange rows = block(index);
    ahead.start(row_ + rows.begin, max_of(0, rows.end - rows.begin), row_bytes_, steps);
  }

  int count_ = 0, row_bytes_ = 0;
  const char* row_[kMost];
};

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
