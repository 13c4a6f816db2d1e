// What surrounds the backward's main pass: its workspace, the order in which jobs add to dQ, the pre- and post-pass.
#pragma once

#include "cpu/parts.h"
#include "cpu/scores.h"

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

// What the main pass knows of each query: P = 2^((score - top)·factor - log2_sum) and dS = P∘(dP - delta). log2_sum is
// +inf where the query sees no key: P = 0.
struct RowValues {
  float *top, *log2_sum, *delta;
  FLASHSDK_HD RowValues operator+(int i) const { return {top + i, log2_sum + i, delta + i}; }
};

// A job of the main pass: of a tile of keys, and of the parts of the queries (cpu/parts.h) that its column is cut into.
struct ColumnJob {
  int n_block, part;
};

// The shared workspace of one call: row values (num_heads x all queries), dQ accumulators (the same rows x head_dim),
// the jobs' progress, and dK and dV of parts. Everything is O(seqlen).
class BackwardBuffers {
 public:
  FLASHSDK_HD BackwardBuffers(const ForwardParams& p, Tile tile)
      : tile_(tile),
        packed_(p.packed()),
        num_heads_(p.num_heads),
        m_blocks_(ceil_div(p.seqlen_q, tile.m)),
        n_blocks_(ceil_div(p.seqlen_k, tile.n)),
        dq_pitch_(round_up(p.head_dim, kLanes)),
        rows_(std::int64_t{p.num_heads} * (packed_ ? p.total_q : std::int64_t{p.batch} * p.seqlen_q)),
        parts_(p, p.num_heads_kv, tile.n, p.seqlen_k, std::int64_t{p.heads_per_group()} * p.seqlen_q,
               std::int64_t{p.heads_per_group()} * p.total_q, joined_floats(p)),
        jobs_of_head_(n_blocks_ + parts_.lines() * (parts_.most_parts() - 1)),
        jobs_(std::int64_t{p.batch} * p.num_heads_kv * jobs_of_head_) {}

  std::size_t bytes() const { return parts_offset() + parts_.bytes(); }
  void place(void* workspace) {
    base_ = static_cast<char*>(workspace);
    parts_.place(base_ + parts_offset());
    std::memset(progress(0, 0), 0, jobs_ * sizeof(std::int32_t));
  }

  std::int64_t jobs() const { return jobs_; }
  int jobs_of_head() const { return jobs_of_head_; }
  // First the first parts of all tiles of keys, then the second ones of those that have more, …
  ColumnJob column_job(int job) const {
    if (job < n_blocks_) return {job, 0};
    const Split part(job - n_blocks_, parts_.lines());
    return {part.remainder, part.quotient + 1};
  }
  // Of one of the batch·num_heads_kv heads, the jobs of one part.
  std::int32_t* progress(int head, int part) const {
    return reinterpret_cast<std::int32_t*>(base_ + progress_offset()) + std::int64_t{head} * jobs_of_head_ +
           (part == 0 ? 0 : n_blocks_ + (part - 1) * parts_.lines());
  }
  const PartBuffers& parts() const { return parts_; }
  // dK and dV of a key.
  static FLASHSDK_HD int joined_floats(const ForwardParams& p) {
    return round_up(p.head_dim, kLanes) + round_up(p.head_dim_v, kLanes);
  }

  int m_blocks() const { return m_blocks_; }
  Tile tile() const { return tile_; }

  // Those of the sequence's first query.
  RowValues row_values(const ForwardParams& p, const SeqlenInfo& s, int batch, int head) const {
    float* top = reinterpret_cast<float*>(base_) + first_row(p, s, batch, head);
    return {top, top + rows_, top + 2 * rows_};
  }
  float* dq(const ForwardParams& p, const SeqlenInfo& s, int batch, int head) const {
    return reinterpret_cast<float*>(base_ + dq_offset()) + first_row(p, s, batch, head) * dq_pitch_;
  }
  int dq_pitch() const { return dq_pitch_; }

 private:
  static std::size_t aligned(std::size_t bytes) { return (bytes + 63) / 64 * 64; }
  std::size_t dq_offset() const { return aligned(3 * rows_ * sizeof(float)); }
  std::size_t progress_offset() const { return dq_offset() + aligned(rows_ * dq_pitch_ * sizeof(float)); }
  std::size_t parts_offset() const { return progress_offset() + aligned(jobs_ * sizeof(std::int32_t)); }
  std::int64_t first_row(const ForwardParams& p, const SeqlenInfo& s, int batch, int head) const {
    return packed_ ? std::int64_t{head} * p.total_q + s.offset_q
                   : (std::int64_t{batch} * num_heads_ + head) * p.seqlen_q;
  }

  Tile tile_;
  bool packed_;
  int num_heads_, m_blocks_, n_blocks_, dq_pitch_;
  std::int64_t rows_;
  PartBuffers parts_;
  int jobs_of_head_;
  std::int64_t jobs_;
  char* base_ = nullptr;
};

// Jobs of one head, and of one part of its queries, add to a dQ tile in ascending order of their keys. Each publishes
// how far down its column it has come, and adds at a position only when all earlier ones have passed it. Jobs are
// claimed in ascending order, so the earliest one running never waits, and as all of them move down the same way the
// others rarely do.
class DqOrder {
 public:
  // progress: of these jobs, all 0 at the start; `job` is this one's number among them.
  FLASHSDK_HD DqOrder(std::int32_t* progress, int job) : progress_(progress), job_(job) {}

  // All before `position` is done with. Said before the tile there is computed: with a sparse layout the next one may
  // lie far down, and jobs that follow need not wait for it.
  FLASHSDK_HD void reach(int position) {
    position_ = position;
    __atomic_store_n(progress_ + job_, position, __ATOMIC_RELEASE);
  }
  void wait_for_turn() {
    while (first_running_ < job_ && done(first_running_) == kFinished) ++first_running_;
    for (int other = first_running_; other < job_; ++other) wait_until([&] { return done(other) > position_; });
  }
  FLASHSDK_HD void finish() { __atomic_store_n(progress_ + job_, kFinished, __ATOMIC_RELEASE); }

 private:
  static constexpr std::int32_t kFinished = 0x7FFFFFFF;
  FLASHSDK_HD std::int32_t done(int job) const { return __atomic_load_n(progress_ + job, __ATOMIC_ACQUIRE); }

  std::int32_t* progress_;
  int job_, first_running_ = 0, position_ = 0;
};

// Calls fn(slot, batch, head, m_block, seqlen, first query, queries) for every tile of queries there is.
template <class F>
void for_each_query_tile(const ForwardParams& p, const BackwardBuffers& buffers, const ParallelRunner& runner, F fn) {
  const std::int64_t jobs = std::int64_t{p.batch} * p.num_heads * buffers.m_blocks();
  for_each_job(runner, jobs, [&](std::int64_t job, int slot) {
    Split line(job, buffers.m_blocks());
    Split head(line.quotient, p.num_heads);
    const SeqlenInfo seqlen(p, head.quotient);
    const int i0 = line.remainder * buffers.tile().m, queries = min_of(buffers.tile().m, seqlen.seqlen_q - i0);
    if (queries > 0) fn(slot, head.quotient, head.remainder, line.remainder, seqlen, i0, queries);
  });
}

// Columns [c, c + kLanes) of up to kLanes rows, transposed; zeros beyond them.
template <class T>
void load_columns(const T* src, std::int64_t stride, int rows, int c, int d, float* columns) {
  alignas(64) float block[kLanes * kLanes];
  for (int l = 0; l < kLanes; ++l)
    load_row(src + l * stride + c, l < rows ? min_of(kLanes, d - c) : 0, kLanes, block + l * kLanes);
  transpose(block, kLanes, columns, kLanes);
}

// Dot products of up to kLanes pairs of rows, summed in the order of the fp32 product dP^T = V·dO^T: where P is 1 for
// one key, and out that key's v, delta is that key's dP to the last bit, and dS exactly 0.
template <class T>
void row_dots(const T* a, std::int64_t stride_a, const T* b, std::int64_t stride_b, int rows, int d, float* dst) {
  alignas(64) float columns_a[kLanes * kLanes], columns_b[kLanes * kLanes], dots[kLanes];
  Vec total = zero(), sum = zero();
  for (int c = 0; c < d; c += kLanes) {
    if (c > 0 && c % kLongestSum<T> == 0) {
      total = add(total, sum);
      sum = zero();
    }
    load_columns(a, stride_a, rows, c, d, columns_a);
    load_columns(b, stride_b, rows, c, d, columns_b);
    for (int n = 0; n < kLanes; ++n) sum = fma(load(columns_a + n * kLanes), load(columns_b + n * kLanes), sum);
  }
  store(dots, add(total, sum));
  for (int l = 0; l < rows; ++l) dst[l] = dots[l];
}

// The same of up to kLanes / 2 pairs, whose transposes take longer than what they save: one lane of a vector counts.
template <class T>
void few_row_dots(const T* a, std::int64_t stride_a, const T* b, std::int64_t stride_b, int rows, int d, float* dst) {
  constexpr int kRows = 4;  // side by side, which hides the latency of a sum
  alignas(64) float x[kRows][kLanes], y[kRows][kLanes], dots[kLanes];
  for (int r = 0; r < rows; r += kRows) {
    Vec total[kRows], sum[kRows];
    for (int n = 0; n < kRows; ++n) total[n] = sum[n] = zero();
    for (int c = 0; c < d; c += kLanes) {
      if (c > 0 && c % kLongestSum<T> == 0)
        for (int n = 0; n < kRows; ++n) {
          total[n] = add(total[n], sum[n]);
          sum[n] = zero();
        }
      const int columns = min_of(kLanes, d - c);
      for (int n = 0; n < kRows; ++n) {
        const int row = min_of(r + n, rows - 1);
        load_row(a + row * stride_a + c, columns, kLanes, x[n]);
        load_row(b + row * stride_b + c, columns, kLanes, y[n]);
      }
      for (int i = 0; i < columns; ++i)
#pragma GCC unroll 4
        for (int n = 0; n < kRows; ++n) sum[n] = fma(set1(x[n][i]), set1(y[n][i]), sum[n]);
    }
    for (int n = 0; n < min_of(kRows, rows - r); ++n) {
      store(dots, add(total[n], sum[n]));
      dst[r + n] = dots[0];
    }
  }
}

// P = exp(score - lse) inherits the rounding of the lse, half a unit of float32: up to this |lse| it adds no more than
// 9.5e-7 to the relative error of P in fp32, and 3.1e-5 where outputs are rounded to 16 bits. Beyond it the row's sum
// is taken anew: at 1e9 the lse no longer tells one key from twenty.
template <class T>
inline constexpr float kMaxTrustedLse = sizeof(T) == 4 ? 32.f : 1024.f;

template <class T>
FLASHSDK_HD bool trusted(float lse) {
  return !(std::fabs(lse) > kMaxTrustedLse<T>) || lse == -INFINITY;
}

// The row values, with delta = rowsum(dO∘O) - dlse, and dQ accumulators zeroed. row_offset(lse, top, log2_sum)
// splits an lse. Calls sum_rows(slot, batch, head, m_block) for tiles in which some lse is not trusted.
template <class T, class RowOffset, class SumRows>
void prepare_backward(const BackwardParams& p, const BackwardBuffers& buffers, const ParallelRunner& runner,
                      const RowOffset& row_offset, SumRows sum_rows) {
  auto prepare = [&](int slot, int batch, int head, int m_block, const SeqlenInfo& s, int i0, int n) {
    const std::int64_t pitch = buffers.dq_pitch();
    std::memset(buffers.dq(p, s, batch, head) + i0 * pitch, 0, sizeof(float) * n * pitch);
    const T* out = s.head_q<const T>(p.out, batch, head) + i0 * p.out.row;
    const T* dout = s.head_q<const T>(p.dout, batch, head) + i0 * p.dout.row;
    const float* lse = s.rows(p.lse, batch, head) + i0 * p.lse.row;
    const float* dlse = p.dlse.ptr == nullptr ? nullptr : s.rows(p.dlse, batch, head) + i0 * p.dlse.row;
    const RowValues row = buffers.row_values(p, s, batch, head) + i0;
    for (int i = 0; i < n; i += kLanes) {
      const int rows = min_of(kLanes, n - i);
      const auto dots = rows <= kLanes / 2 ? few_row_dots<T> : row_dots<T>;
      dots(out + i * p.out.row, p.out.row, dout + i * p.dout.row, p.dout.row, rows, p.head_dim_v, row.delta + i);
    }
    bool all_trusted = true;
    for (int i = 0; i < n; ++i) {
      const float x = lse[i * p.lse.row];
      const bool sees = x != -INFINITY;  // else out and dout may hold anything
      all_trusted &= trusted<T>(x);
      row_offset(sees && trusted<T>(x) ? x : 0.f, row.top[i], row.log2_sum[i]);
      if (!sees) row.log2_sum[i] = INFINITY;
      row.delta[i] = !sees ? 0.f : (dlse == nullptr ? row.delta[i] : row.delta[i] - dlse[i * p.dlse.row]);
    }
    if (!all_trusted) sum_rows(slot, batch, head, m_block);
  };
  for_each_query_tile(p, buffers, runner, prepare);
}

// dsink = -sum of exp(sink - lse)·delta over the queries of a head, in their order. The sink is split as an lse is: so
// the difference is 0 where they are the same, however large.
template <class RowOffset>
void write_dsink(const BackwardParams& p, const BackwardBuffers& buffers, const ParallelRunner& runner,
                 const RowOffset& row_offset) {
  if (p.dsink == nullptr) return;
  for_each_job(runner, p.num_heads, [&](std::int64_t head, int) {
    float top, log2_sum;
    row_offset(*p.sink.of(static_cast<int>(head), 0), top, log2_sum);
    double sum = 0.;
    for (int batch = 0; batch < p.batch; ++batch) {
      const SeqlenInfo s(p, batch);
      const RowValues row = buffers.row_values(p, s, batch, static_cast<int>(head));
      for (int i = 0; i < s.seqlen_q; ++i)
        sum += std::exp2((double{top} - row.top[i]) * row_offset.factor + (double{log2_sum} - row.log2_sum[i])) *
               row.delta[i];
    }
    p.dsink[head] = static_cast<float>(-sum);
  });
}

// dQ = softmax_scale · accumulator.
template <class T>
void convert_dq(const BackwardParams& p, const BackwardBuffers& buffers, const ParallelRunner& runner) {
  auto convert = [&](int, int batch, int head, int, const SeqlenInfo& s, int i0, int n) {
    const std::int64_t pitch = buffers.dq_pitch();
    const float* rows = buffers.dq(p, s, batch, head) + i0 * pitch;
    T* dq = s.head_q<T>(p.dq, batch, head) + i0 * p.dq.row;
    for (int i = 0; i < n; ++i) store_row(rows + i * pitch, p.head_dim, p.score.softmax_scale, dq + i * p.dq.row);
  };
  for_each_query_tile(p, buffers, runner, convert);
}

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
