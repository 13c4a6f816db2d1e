// The tiles that one line of the score matrix visits, in ascending order, each known to be full or partial.
//
// A walk is either at most three runs (partial, full, partial), as a band gives, or two sorted CSR lists (partial,
// full) merged on the fly. What is skipped is decided here alone. In sm80 every thread builds the walk; in sm90 one
// warp does, and tells the others (sm90/messages.h).
#pragma once

#include <cstdint>

#include "common/host_device.h"

namespace flashsdk {

struct Tile {
  int m, n;  // queries x keys
};

struct TileRef {
  int index;     // tile number along the walked direction
  bool partial;  // ask allowed(i, j) inside
};

class TileWalk {
 public:
  // Tiles [begin, end), those in [full_begin, full_end) full. begin <= full_begin <= full_end <= end.
  static FLASHSDK_HD TileWalk runs(int begin, int full_begin, int full_end, int end) {
    TileWalk w;
    w.position_ = begin;
    w.full_begin_ = full_begin;
    w.full_end_ = full_end;
    w.end_ = end;
    return w;
  }

  // Layout blocks of two CSR lines, each cut into `split` tiles; tiles at `end` and beyond do not exist.
  static FLASHSDK_HD TileWalk lists(const std::int32_t* partial, int num_partial, const std::int32_t* full,
                                    int num_full, int split, int end) {
    TileWalk w;
    w.partial_ = partial;
    w.partial_end_ = partial + num_partial;
    w.full_ = full;
    w.full_list_end_ = full + num_full;
    w.next_partial_ = num_partial > 0 ? *partial : kNone;
    w.next_full_ = num_full > 0 ? *full : kNone;
    w.split_ = w.part_ = split;
    w.end_ = end;
    return w;
  }

  // The next tile, or false at the end.
  FLASHSDK_HD bool next(TileRef& tile) {
    if (split_ == 0) {
      if (position_ >= end_) return false;
      tile = {position_, is_partial(position_)};
      ++position_;
      return true;
    }
    for (;;) {
      if (part_ == split_ && !next_block()) return false;
      tile = {block_ * split_ + part_++, block_partial_};
      if (tile.index < end_) return true;
      part_ = split_;  // the rest of this layout block lies past the sequence
    }
  }

  // Part `index` of `parts`, whose lengths differ by a tile at most. Of runs alone; asked before the first next().
  FLASHSDK_HD TileWalk part(int index, int parts) const {
    const std::int64_t tiles = count();
    TileWalk w = *this;
    w.position_ = position_ + static_cast<int>(tiles * index / parts);
    w.end_ = position_ + static_cast<int>(tiles * (index + 1) / parts);
    return w;
  }

  // The tiles from `begin` on and before `end`; asked before the first next().
  FLASHSDK_HD TileWalk between(int begin, int end) const {
    TileWalk w = *this;
    w.end_ = min_of(end_, end);
    if (split_ == 0) {
      w.position_ = max_of(position_, begin);
      return w;
    }
    const int block = begin / split_;
    w.partial_ += lower_bound(partial_, partial_end_, block);
    w.full_ += lower_bound(full_, full_list_end_, block);
    w.next_partial_ = w.partial_ != partial_end_ ? *w.partial_ : kNone;
    w.next_full_ = w.full_ != full_list_end_ ? *w.full_ : kNone;
    if (min_of(w.next_partial_, w.next_full_) == block && w.next_block()) w.part_ = begin % split_;
    return w;
  }

  // Of runs alone: which tiles these are.
  FLASHSDK_HD bool has_runs() const { return split_ == 0; }
  FLASHSDK_HD int begin() const { return position_; }
  FLASHSDK_HD int end() const { return end_; }
  // The first full one. Where none is: in a walk along keys, the first one whose first key all queries see, if there is
  // such a one; along queries likewise.
  FLASHSDK_HD int full_begin() const { return full_begin_; }
  FLASHSDK_HD bool is_partial(int index) const { return index < full_begin_ || index >= full_end_; }

  // Upper bound of the tiles still to come: exact but for a last layout block cut by the sequence end.
  FLASHSDK_HD int count() const {
    if (split_ == 0) return max_of(0, end_ - position_);
    return static_cast<int>((partial_end_ - partial_) + (full_list_end_ - full_)) * split_ + (split_ - part_);
  }

  // How many tiles come before tile `index`, which the walk visits; asked before the first next().
  FLASHSDK_HD int rank_of(int index) const {
    if (split_ == 0) return index - position_;
    int block = index / split_;
    int before = lower_bound(partial_, partial_end_, block) + lower_bound(full_, full_list_end_, block);
    return before * split_ + index % split_;
  }

 private:
  static FLASHSDK_HD int lower_bound(const std::int32_t* begin, const std::int32_t* end, int value) {
    const std::int32_t* first = begin;
    while (begin != end) {
      const std::int32_t* middle = begin + (end - begin) / 2;
      if (*middle < value)
        begin = middle + 1;
      else
        end = middle;
    }
    return static_cast<int>(begin - first);
  }
  // The heads of both lists were read a block ago, so that nobody waits for memory here.
  FLASHSDK_HD bool next_block() {
    block_partial_ = next_partial_ < next_full_;
    block_ = block_partial_ ? next_partial_ : next_full_;
    if (block_ == kNone) return false;
    if (block_partial_) {
      next_partial_ = ++partial_ != partial_end_ ? *partial_ : kNone;
    } else {
      next_full_ = ++full_ != full_list_end_ ? *full_ : kNone;
    }
    part_ = 0;
    return true;
  }

  static constexpr int kNone = 0x7fffffff;  // behind every block: a list has ended
  int position_ = 0, full_begin_ = 0, full_end_ = 0, end_ = 0;
  const std::int32_t *partial_ = nullptr, *partial_end_ = nullptr, *full_ = nullptr, *full_list_end_ = nullptr;
  int split_ = 0, part_ = 0, block_ = 0;
  int next_partial_ = kNone, next_full_ = kNone;
  bool block_partial_ = false;
};

// The tiles of a walk from tile `origin`, or the nearest to it, down to the first and then up to the last. Lists are
// walked as they are.
class OutwardWalk {
 public:
  FLASHSDK_HD OutwardWalk(const TileWalk& walk, int origin)
      : walk_(walk),
        origin_(min_of(max_of(origin, walk.begin()), walk.end() - 1)),
        index_(max_of(origin_, walk.begin())) {}

  FLASHSDK_HD bool next(TileRef& tile) {
    if (!walk_.has_runs()) return walk_.next(tile);
    if (index_ >= walk_.end()) return false;
    tile = {index_, walk_.is_partial(index_)};
    if (index_ > origin_)
      ++index_;
    else
      index_ = index_ > walk_.begin() ? index_ - 1 : origin_ + 1;
    return true;
  }

 private:
  TileWalk walk_;
  int origin_, index_;
};

}  // namespace flashsdk
