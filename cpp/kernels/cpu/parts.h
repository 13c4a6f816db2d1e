// Parts of long sums. One query over all its keys, or the gradient of a few keys over all queries, is one job however
// long it is. So where a sequence has few rows of results, what they sum over is cut into parts, a job each. What the
// parts are depends on the sequence alone, and they are joined in ascending order: results are the same for any number
// of threads, and in any batch.
#pragma once

#include "cpu/jobs.h"

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

// What a part sums over, at least. Beginning and joining it costs about what 50 more would.
inline constexpr int kPartLength = 2048;
// Sequences with more rows of results are jobs enough without parts.
inline constexpr int kMostPartRows = 512;

// Into how many parts `rows` rows of results over `length` others are cut.
FLASHSDK_HD int num_parts(int rows, std::int64_t length) {
  return rows > kMostPartRows || length < 2 * kPartLength ? 1 : static_cast<int>(length / kPartLength);
}

// Tiles [begin, end) of a line.
struct TileRange {
  int begin, end;
};
// Part `index` of `parts`, whose lengths differ by a tile at most.
FLASHSDK_HD TileRange part_of(TileRange tiles, int index, int parts) {
  const std::int64_t count = tiles.end - tiles.begin;
  return {tiles.begin + static_cast<int>(count * index / parts),
          tiles.begin + static_cast<int>(count * (index + 1) / parts)};
}

// Results of the parts of one line of tiles are joined in ascending order. Jobs are claimed in that order too, so the
// earliest part running never waits, and as parts are equally long the others rarely do.
class PartOrder {
 public:
  explicit FLASHSDK_HD PartOrder(std::int32_t* joined) : joined_(joined) {}

  void wait_for_turn(int part) const {
    wait_until([&] { return __atomic_load_n(joined_, __ATOMIC_ACQUIRE) == part; });
  }
  FLASHSDK_HD void pass(int part) const { __atomic_store_n(joined_, part + 1, __ATOMIC_RELEASE); }

 private:
  std::int32_t* joined_;  // parts so far; 0 at the start
};

// The workspace of what has been joined so far: rows of results in fp32, and whose turn it is. Empty where no sequence
// can be long enough.
class PartBuffers {
 public:
  // Of sequences with at most `rows` rows of results over `length` others, of which packed ones have total_length.
  FLASHSDK_HD PartBuffers(const ForwardParams& p, int heads, int tile_rows, int rows, std::int64_t length,
                          std::int64_t total_length, int row_floats)
      : heads_(heads),
        rows_(min_of(rows, kMostPartRows)),
        lines_(ceil_div(rows_, tile_rows)),
        row_floats_(row_floats),
        batch_(p.batch),
        slots_(p.batch) {
    const bool packed = p.packed();
    // Of sequences with lengths of their own, some may have fewer rows.
    most_parts_ = num_parts(p.ragged() ? rows_ : rows, length);
    if (most_parts_ == 1) slots_ = lines_ = 0;
    const std::int64_t long_enough = total_length / (2 * kPartLength);
    if (!packed || long_enough >= slots_) return;
    slots_ = long_enough;
    by_offset_ = true;
  }

  int most_parts() const { return most_parts_; }
  // The first lines of a head, which may be cut.
  int lines() const { return lines_; }
  std::size_t bytes() const { return joined_offset() + aligned(joined_bytes()); }
  void place(char* memory) {
    base_ = memory;
    if (lines_ > 0) std::memset(base_ + joined_offset(), 0, joined_bytes());
  }

  PartOrder order(int batch, int head, int line) const {
    return PartOrder(reinterpret_cast<std::int32_t*>(base_ + joined_offset()) +
                     (std::int64_t{batch} * heads_ + head) * lines_ + line);
  }
  // The first row of a sequence that is cut. `offset` is where it begins along what is summed over: no two sequences
  // that are cut begin within the length of two parts.
  float* rows(int batch, std::int64_t offset, int head) const {
    const std::int64_t slot = by_offset_ ? offset / (2 * kPartLength) : batch;
    return reinterpret_cast<float*>(base_) + (slot * heads_ + head) * rows_ * row_floats_;
  }

 private:
  static std::size_t aligned(std::size_t bytes) { return (bytes + 63) / 64 * 64; }
  std::size_t joined_offset() const {
    return lines_ == 0 ? 0 : aligned(slots_ * heads_ * rows_ * row_floats_ * sizeof(float));
  }
  std::size_t joined_bytes() const { return std::int64_t{batch_} * heads_ * lines_ * sizeof(std::int32_t); }

  int heads_, rows_, lines_, row_floats_, batch_, most_parts_ = 1;
  bool by_offset_ = false;
  std::int64_t slots_;
  char* base_ = nullptr;
};

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
