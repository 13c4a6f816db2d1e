// Which tiles of queries a persistent block works on, and in which order.
#pragma once

#include <cuda/atomic>

#include "cuda/tile_scheduler.h"

namespace flashsdk::sm90 {

// Hands out the tiles of one launch, where their cost differs: whoever is done first gets the next. It lies in the
// caller's workspace, which may hold anything at first: block 0 sets it up under the launch's own 64-bit name while the
// others work on their first tile, and the last one to leave takes the name away, for when a graph launches it again.
struct TicketCounter {
  unsigned long long owner;
  int next;  // tile
  int left;  // blocks that still draw
};

struct ForwardSchedule {
  cuda::TileSchedule tiles;
  TicketCounter* tickets;  // null: tiles of equal cost, or one a block, dealt in turn
  unsigned long long launch;
};

__device__ __forceinline__ int highest_bit(int x) { return 31 - __clz(x); }

// The tiles of packed sequences in some order: those of the longest sequences first, where sequences are as long as
// others whose number of tiles has the same highest bit. One warp looks at 32 sequences at once and never back.
class PackedTiles {
 public:
  __device__ PackedTiles(const ForwardParams& p, int tile_rows)
      : p_(p), tile_rows_(tile_rows), length_(highest_bit(max_of(1, ceil_div(p.seqlen_q, tile_rows)))) {}

  // Tile `index`, or false behind the last. Indices only grow from call to call.
  __device__ bool find(int index, cuda::TileWork& work) {
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
          const int blocks = __shfl_sync(kAll, tiles, owner) / p_.num_heads;
          const int rest = position - __shfl_sync(kAll, end - tiles, owner);
          work = {blocks - 1 - rest / p_.num_heads, rest % p_.num_heads, batch_ + owner};
          return true;
        }
        first_ += __shfl_sync(kAll, end, 31);
      }
    }
    return false;
  }

 private:
  // Of all heads, if the sequence is as long as those looked for.
  __device__ int tiles_of(int batch) const {
    if (batch >= p_.batch) return 0;
    const int blocks = ceil_div(p_.cu_seqlens_q[batch + 1] - p_.cu_seqlens_q[batch], tile_rows_);
    return blocks > 0 && highest_bit(blocks) == length_ ? blocks * p_.num_heads : 0;
  }

  static constexpr unsigned kAll = 0xffffffffu;
  const ForwardParams& p_;
  int tile_rows_;
  int length_, batch_ = 0;  // sequences looked at now
  int first_ = 0;           // tiles before these
};

// One block's tiles, for a whole warp.
class WorkStream {
 public:
  __device__ WorkStream(const ForwardParams& p, const ForwardSchedule& schedule, int tile_rows)
      : schedule_(schedule), packed_(p, tile_rows), is_packed_(p.cu_seqlens_q != nullptr) {
    if (schedule.tickets != nullptr && blockIdx.x == 0 && threadIdx.x % 32 == 0) {
      schedule.tickets->next = schedule.tickets->left = gridDim.x;
      owner().store(schedule.launch, ::cuda::memory_order_release);
    }
  }

  __device__ bool next(cuda::TileWork& work) {
    index_ = index_ < 0 ? blockIdx.x : schedule_.tickets == nullptr ? index_ + gridDim.x : ticket();
    if (is_packed_ ? packed_.find(index_, work) : find(work)) return true;
    if (schedule_.tickets != nullptr) leave();
    return false;
  }
  // Once for each tile of queries, before next(): asks for the next one, when what is left of this one takes as long as
  // the answer. Sooner, a block might hold a long tile that another could begin.
  __device__ void draw() {
    if (schedule_.tickets == nullptr || threadIdx.x % 32 != 0) return;
    if (drawn_ == 0) wait_for_owner();
    drawn_ = atomicAdd(&schedule_.tickets->next, 1);  // never 0: blocks begin with those of their index
  }

 private:
  using Owner = ::cuda::atomic_ref<unsigned long long, ::cuda::thread_scope_device>;
  __device__ Owner owner() const { return Owner(schedule_.tickets->owner); }

  __device__ bool find(cuda::TileWork& work) const {
    if (index_ >= schedule_.tiles.size()) return false;
    work = schedule_.tiles.work(index_);
    return true;
  }

  __device__ void wait_for_owner() const {
    while (owner().load(::cuda::memory_order_acquire) != schedule_.launch) {
    }
  }
  __device__ int ticket() const { return __shfl_sync(0xffffffffu, drawn_, 0); }
  __device__ void leave() const {
    if (threadIdx.x % 32 != 0) return;
    wait_for_owner();
    if (atomicSub(&schedule_.tickets->left, 1) == 1) owner().store(0, ::cuda::memory_order_relaxed);
  }

  const ForwardSchedule& schedule_;
  PackedTiles packed_;
  bool is_packed_;
  int index_ = -1;
  int drawn_ = 0;  // of lane 0
};

}  // namespace flashsdk::sm90
