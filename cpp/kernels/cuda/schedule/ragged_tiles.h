// Sequences of unequal lengths in the order in which persistent thread blocks take their tiles.
#pragma once

#include "common/seqlen_info.h"

namespace flashsdk::cuda {

enum class TilesOf { kQueries, kKeys };

// One of the blocks · heads tiles of a sequence.
struct SequenceTile {
  int batch, blocks, index;
};

// The tiles of the longest sequences first, where sequences are as long as others whose number of tiles has the same
// highest bit: what is left to do at the end is then short. One warp looks at 32 sequences at once and never back.
template <TilesOf kOf>
class RaggedTiles {
 public:
  __device__ RaggedTiles(const ForwardParams& p, int tile_rows)
      : p_(p), tile_rows_(tile_rows), length_(highest_bit(max_of(1, ceil_div(longest(), tile_rows)))) {}

  __device__ int heads() const { return kOfKeys ? p_.num_heads_kv : p_.num_heads; }

  // Tile `index`, or false behind the last. Indices only grow from call to call.
  __device__ bool find(int index, SequenceTile& tile) {
    const int lane = threadIdx.x % 32;
    for (; length_ >= 0; --length_, batch_ = 0) {
      for (; batch_ < p_.batch; batch_ += 32) {
        const int tiles = tiles_of(batch_ + lane);
        int end = tiles;  // of this lane's sequence, among the 32
        for (int step = 1; step < 32; step *= 2) {
          const int before = __shfl_up_sync(kAll, end, step);
          if (lane >= step) end += before;
        }
        const int position = index - first_;
        const unsigned beyond = __ballot_sync(kAll, end > position);
        if (beyond != 0) {
          const int owner = __ffs(beyond) - 1;
          const int blocks = __shfl_sync(kAll, tiles, owner) / heads();
          tile = {batch_ + owner, blocks, position - __shfl_sync(kAll, end - tiles, owner)};
          return true;
        }
        first_ += __shfl_sync(kAll, end, 31);
      }
    }
    return false;
  }

 private:
  static constexpr bool kOfKeys = kOf == TilesOf::kKeys;
  __device__ int longest() const { return kOfKeys ? p_.seqlen_k : p_.seqlen_q; }
  __device__ static int highest_bit(int x) { return 31 - __clz(x); }

  // Of all heads, if the sequence is as long as those looked for.
  __device__ int tiles_of(int batch) const {
    if (batch >= p_.batch) return 0;
    const int blocks = ceil_div(length_of<kOfKeys>(p_, batch), tile_rows_);
    return blocks > 0 && highest_bit(blocks) == length_ ? blocks * heads() : 0;
  }

  static constexpr unsigned kAll = 0xffffffffu;
  const ForwardParams& p_;
  int tile_rows_;
  int length_, batch_ = 0;  // sequences looked at now
  int first_ = 0;           // tiles before these
};

}  // namespace flashsdk::cuda
