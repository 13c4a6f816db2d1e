// What surrounds the backward's main pass: its workspace, the order in which jobs add to dQ, and the pre- and post-pass.
#pragma once

#include "cpu/jobs.h"
#include "cpu/scores.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <sched.h>

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

// The shared workspace of one call: delta (num_heads x all queries), the jobs' progress, and dQ accumulators in tiles
// of (head_dim, 64 lanes). Everything is O(seqlen).
class BackwardBuffers {
 public:
  FLASHSDK_HD BackwardBuffers(const ForwardParams& p, Tile tile, int dq_rows)
      : tile_(tile),
        packed_(p.cu_seqlens_q != nullptr),
        num_heads_(p.num_heads),
        m_blocks_(ceil_div(p.seqlen_q, tile.m)),
        n_blocks_(ceil_div(p.seqlen_k, tile.n)),
        dq_tile_floats_(std::int64_t{dq_rows} * kDqLanes),
        jobs_(std::int64_t{p.batch} * p.num_heads_kv * n_blocks_),
        rows_(std::int64_t{p.num_heads} * (packed_ ? p.total_q : std::int64_t{p.batch} * p.seqlen_q)),
        tiles_((packed_ ? std::int64_t{p.total_q} / tile.m + p.batch : std::int64_t{p.batch} * m_blocks_) *
               p.num_heads) {}

  static constexpr int kDqLanes = 64;

  std::size_t bytes() const { return progress_offset() + aligned(jobs_ * sizeof(std::int32_t)); }
  void place(void* workspace) { base_ = static_cast<char*>(workspace); }

  std::int64_t jobs() const { return jobs_; }
  int n_blocks() const { return n_blocks_; }
  int m_blocks() const { return m_blocks_; }
  Tile tile() const { return tile_; }
  std::size_t dq_tile_bytes() const { return dq_tile_floats_ * sizeof(float); }
  // Of the jobs of one of the batch·num_heads_kv heads.
  std::int32_t* progress(int head) const {
    return reinterpret_cast<std::int32_t*>(base_ + progress_offset()) + std::int64_t{head} * n_blocks_;
  }

  // delta of the sequence's first query.
  float* delta(const ForwardParams& p, const SeqlenInfo& s, int batch, int head) const {
    auto* first = reinterpret_cast<float*>(base_);
    if (packed_) return first + std::int64_t{head} * p.total_q + s.offset_q;
    return first + (std::int64_t{batch} * num_heads_ + head) * p.seqlen_q;
  }

  // A packed sequence starts at tile offset_q / m + batch: ceil(length / m) tiles fit before the next one's first.
  float* dq_tile(const SeqlenInfo& s, int batch, int head, int m_block) const {
    const std::int64_t first = packed_ ? s.offset_q / tile_.m + std::int64_t{batch} : std::int64_t{batch} * m_blocks_;
    return reinterpret_cast<float*>(base_ + dq_offset()) + ((first + m_block) * num_heads_ + head) * dq_tile_floats_;
  }

 private:
  static std::size_t aligned(std::size_t bytes) { return (bytes + 63) / 64 * 64; }
  std::size_t dq_offset() const { return aligned(rows_ * sizeof(float)); }
  std::size_t progress_offset() const { return dq_offset() + tiles_ * dq_tile_bytes(); }

  Tile tile_;
  bool packed_;
  int num_heads_, m_blocks_, n_blocks_;
  std::int64_t dq_tile_floats_, jobs_, rows_, tiles_;
  char* base_ = nullptr;
};

// Jobs of one head add to a dQ tile in ascending order of their keys. Each publishes how far down its column it has
// come, and adds at a position only when all earlier ones have passed it. Jobs are claimed in ascending order, so the
// earliest one running never waits, and as all of them move down the same way the others rarely do.
class DqOrder {
 public:
  // progress: of the head's jobs, all 0 at the start; `job` is this one's number among them.
  FLASHSDK_HD DqOrder(std::int32_t* progress, int job) : progress_(progress), job_(job) {}

  // All before `position` is done with. Said before the tile there is computed: with a sparse layout the next one may
  // lie far down, and jobs that follow need not wait for it.
  FLASHSDK_HD void reach(int position) {
    position_ = position;
    __atomic_store_n(progress_ + job_, position, __ATOMIC_RELEASE);
  }
  void wait_for_turn() {
    while (first_running_ < job_ && done(first_running_) == kFinished) ++first_running_;
    for (int other = first_running_; other < job_; ++other)
      for (int spins = 0; done(other) <= position_; ++spins) pause(spins);
  }
  FLASHSDK_HD void finish() { __atomic_store_n(progress_ + job_, kFinished, __ATOMIC_RELEASE); }

 private:
  static constexpr std::int32_t kFinished = 0x7FFFFFFF;
  FLASHSDK_HD std::int32_t done(int job) const { return __atomic_load_n(progress_ + job, __ATOMIC_ACQUIRE); }
  static FLASHSDK_HD void pause(int spins) {
    if (spins > 1000) {
      sched_yield();  // more threads than processors
      return;
    }
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  std::int32_t* progress_;
  int job_, first_running_ = 0, position_ = 0;
};

// Calls fn(batch, head, m_block, seqlen, first query, queries) for every tile of queries there is.
template <class F>
void for_each_query_tile(const ForwardParams& p, const BackwardBuffers& buffers, const ParallelRunner& runner, F fn) {
  const std::int64_t jobs = std::int64_t{p.batch} * p.num_heads * buffers.m_blocks();
  for_each_job(runner, jobs, [&](std::int64_t job, int) {
    Split line(job, buffers.m_blocks());
    Split head(line.quotient, p.num_heads);
    const SeqlenInfo seqlen(p, head.quotient);
    const int i0 = line.remainder * buffers.tile().m, queries = min_of(buffers.tile().m, seqlen.seqlen_q - i0);
    if (queries > 0) fn(head.quotient, head.remainder, line.remainder, seqlen, i0, queries);
  });
}

template <class T>
float row_dot(const T* a, const T* b, int n) {
  Vec sum = zero();
  int c = 0;
  for (; c + kLanes <= n; c += kLanes) sum = fma(load_as_float(a + c), load_as_float(b + c), sum);
  alignas(64) float lane[kLanes];
  store(lane, sum);
  float total = 0.f;
  for (int l = 0; l < kLanes; ++l) total += lane[l];
  for (; c < n; ++c) total += to_float(a[c]) * to_float(b[c]);
  return total;
}

// delta = rowsum(dO∘O) - dlse; progress and dQ accumulators zeroed.
template <class T>
void prepare_backward(const BackwardParams& p, const BackwardBuffers& buffers, const ParallelRunner& runner) {
  std::memset(buffers.progress(0), 0, buffers.jobs() * sizeof(std::int32_t));
  for_each_query_tile(p, buffers, runner, [&](int batch, int head, int m_block, const SeqlenInfo& s, int i0, int n) {
    std::memset(buffers.dq_tile(s, batch, head, m_block), 0, buffers.dq_tile_bytes());
    const T* out = s.head_q<const T>(p.out, batch, head) + i0 * p.out.row;
    const T* dout = s.head_q<const T>(p.dout, batch, head) + i0 * p.dout.row;
    float* delta = buffers.delta(p, s, batch, head) + i0;
    for (int i = 0; i < n; ++i) delta[i] = row_dot(out + i * p.out.row, dout + i * p.dout.row, p.head_dim_v);
    if (p.dlse.ptr == nullptr) return;
    const float* dlse = s.rows(p.dlse, batch, head) + i0 * p.dlse.row;
    for (int i = 0; i < n; ++i) delta[i] -= dlse[i * p.dlse.row];
  });
}

// dQ = softmax_scale · accumulator, transposed back.
template <class T, int kLanesOfTile>
void convert_dq(const BackwardParams& p, const BackwardBuffers& buffers, const ParallelRunner& runner) {
  static_assert(kLanesOfTile == BackwardBuffers::kDqLanes);
  for_each_query_tile(p, buffers, runner, [&](int batch, int head, int m_block, const SeqlenInfo& s, int i0, int n) {
    const float* tile = buffers.dq_tile(s, batch, head, m_block);
    T* dq = s.head_q<T>(p.dq, batch, head) + i0 * p.dq.row;
    alignas(64) float rows[kLanes * 256];
    const int d_padded = round_up(p.head_dim, kLanes);
    for (int i = 0; i < n; i += kLanes) {
      for (int c = 0; c < d_padded; c += kLanes)
        transpose(tile + c * kLanesOfTile + i, kLanesOfTile, rows + c, d_padded);
      for (int l = 0; l < min_of(kLanes, n - i); ++l)
        store_row(rows + l * d_padded, p.head_dim, p.score.softmax_scale, dq + (i + l) * p.dq.row);
    }
  });
}

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
