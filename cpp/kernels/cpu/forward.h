// Forward attention on a CPU (FlashAttention, arXiv 2205.14135, algorithm 1, transposed).
//
// A job is up to 1024 queries of one head, in panels of one micro-kernel's lanes. K and V tiles are packed once a job
// and stay in L2; per panel, with queries in vector lanes:
//   S^T = K·Q^T, m' = max(m, rows of S^T) or still m (raised()), P^T = exp(S^T - m'), l = l·exp(m - m') + sum P^T,
//   O^T = O^T·exp(m - m') + V^T·P^T.
// The keys of sequences with few queries are cut into parts, a job each (cpu/parts.h). Results do not depend on how
// jobs are cut or on the number of threads.
#pragma once

#include "cpu/entry.h"
#include "cpu/forward_few.h"

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

template <class T, int kHeadDim, class Policy, bool kFeatures>
class Forward : ForwardJob<T, kHeadDim, Policy, kFeatures> {
  using Job = ForwardJob<T, kHeadDim, Policy, kFeatures>;
  using Tr = typename Job::Tr;
  using Job::i0_;
  using Job::i1_;
  using Job::kKeys;
  using Job::p_;
  using Job::policy_;
  using Job::seqlen_;
  using Job::tile_;
  using Job::w_;
  using Job::walk_;
  using Few = ForwardFew<T, kHeadDim, Policy, kFeatures, FewQueries<T, kHeadDim>>;
  using MostFew = ForwardFew<T, kHeadDim, Policy, kFeatures, MostFewQueries<T, kHeadDim>>;
  using typename Job::KeyTile;
  using typename Job::Panel;
  using typename Job::Scratch;

 public:
  static constexpr Tile kTile{Tr::kForwardQueries, kKeys};

  static std::size_t workspace_size(const ForwardParams& p, int num_threads) {
    return part_buffers(p, tile_for(p, num_threads)).bytes() + sizeof(Scratch) * num_threads;
  }

  static void launch(const ForwardParams& p, const LaunchContext& context) {
    const ParallelRunner runner = runner_for(context.parallel, forward_flops(p));
    const Tile tile = tile_for(p, runner.num_threads);
    const int m_blocks = ceil_div(p.seqlen_q, tile.m);
    PartBuffers parts = part_buffers(p, tile);
    parts.place(static_cast<char*>(context.workspace));
    auto* scratch = reinterpret_cast<Scratch*>(static_cast<char*>(context.workspace) + parts.bytes());
    const int lines = m_blocks - parts.lines(), cut = parts.lines() * parts.most_parts();
    const int together = MostFew::heads_together(p, runner.num_threads);
    static_assert(Few::most_heads() >= MostFew::most_heads());
    const Jobs jobs{lines, cut, parts.most_parts(), ceil_div(p.num_heads, together)};
    for_each_job(runner, p.batch * jobs.of_batch(), [&](std::int64_t number, int slot) {
      const typename Jobs::Job job = jobs.at(number);
      // Every sequence has as many jobs as the longest: most of them are none, and must cost nothing.
      const SeqlenInfo seqlen(p, job.batch);
      if (job.part > 0 && job.part >= num_parts(seqlen.seqlen_q, seqlen.seqlen_k)) return;
      // Last queries first: under a causal mask they see most keys, and long jobs must not come last.
      const int m_block = m_blocks - 1 - job.line;
      const int head = job.heads * together, end_head = min_of(head + together, p.num_heads);
      // By the sequence alone, so that results do not depend on how it is cut.
      if (Few::fit(seqlen.seqlen_q))
        return Few::run(p, tile, job.batch, head, end_head, scratch[slot], m_block, job.part, parts);
      if (MostFew::fit(seqlen.seqlen_q))
        return MostFew::run(p, tile, job.batch, head, end_head, scratch[slot], m_block, job.part, parts);
      for (int h = head; h < end_head; ++h) Forward(p, tile, job.batch, h, scratch[slot]).run(m_block, job.part, parts);
    });
  }

 private:
  // The order of jobs: of a batch entry, lines of queries that are not cut, then parts of those that are. The lines of
  // a head come one after the other, as they share its keys. Of parts the heads do, as they share pages of memory.
  struct Jobs {
    int lines, cut, parts, groups;  // of heads

    struct Job {
      int batch, heads, line, part;
    };
    std::int64_t of_batch() const { return std::int64_t{groups} * (lines + cut); }
    Job at(std::int64_t number) const {
      const int batch = static_cast<int>(number / of_batch());
      number %= of_batch();
      const std::int64_t behind_lines = number - std::int64_t{groups} * lines;
      if (behind_lines < 0) {
        const Split line(number, lines);
        return {batch, line.quotient, line.remainder, 0};
      }
      const Split heads(behind_lines, groups), part(heads.quotient, parts);
      return {batch, heads.remainder, lines + part.quotient, part.remainder};
    }
  };

  static PartBuffers part_buffers(const ForwardParams& p, Tile tile) {
    return {p, p.num_heads, tile.m, p.seqlen_q, p.seqlen_k, p.total_k, Job::joined_floats(p)};
  }

  // Tiles cut layout blocks evenly; with few jobs they shrink until every thread has some.
  static Tile tile_for(const ForwardParams& p, int num_threads) {
    if (p.mask.kind == MaskKind::kBlockSparse)
      return {tile_in_block(p.mask.block_q, kTile.m), tile_in_block(p.mask.block_k, kTile.n)};
    Tile tile = kTile;
    const double lines = double{1} * p.batch * p.num_heads * num_parts(p.seqlen_q, p.seqlen_k);
    while (tile.m > kPanel && lines * ceil_div(p.seqlen_q, tile.m) < 4 * num_threads) tile.m /= 2;
    return tile;
  }

  Forward(const ForwardParams& p, Tile tile, int batch, int head, Scratch& scratch)
      : Job(p, tile, batch, head, scratch) {}

  void run(int m_block, int part, const PartBuffers& buffers) {
    if (!this->begin(m_block, part, buffers)) return;
    const int panels = ceil_div(i1_ - i0_, kPanel);
    int first_key = 0, end_key = seqlen_.seqlen_k;
    for (int n = 0; n < panels; ++n) {
      Panel& panel = w_.panel[n];
      this->begin_panel(panel, i0_ + n * kPanel, i1_);
      if constexpr (kHasKeyRange<Policy>) {
        panel.keys.set(policy_, panel.i0, panel.lanes);
        first_key = n == 0 ? panel.keys.first : min_of(first_key, panel.keys.first);
        end_key = n == 0 ? panel.keys.last_end : max_of(end_key, panel.keys.last_end);
      }
    }
    TileRef next;
    bool more = walk_.next(next);
    KeyTile keys;
    while (keys.gather(walk_, next, more, tile_.n, seqlen_.seqlen_k)) {
      keys.trim(first_key, end_key);
      this->pack(keys);
      if (more) {
        const int key = next.index * tile_.n;
        this->prefetch_next(key, min_of(tile_.n, seqlen_.seqlen_k - key));
      }
      for (int n = 0; n < panels; ++n) {
        Panel& panel = w_.panel[n];
        with_vectors_of<typename Tr::Dot>(panel.lanes, [&]<int kUsed>() { attend<kUsed>(panel, keys); });
      }
    }
    this->in_turn([&] {
      for (int n = 0; n < panels; ++n) this->finish_panel(w_.panel[n]);
    });
  }

  // In the first kUsed vectors of lanes.
  template <int kUsed>
  void attend(Panel& panel, const KeyTile& tile) {
    int begin, end;
    visible_rows(panel, tile, begin, end);
    if (begin >= end) return;
    Vec maximum[kUsed];
    this->template scores<kUsed>(panel, begin, end, maximum);
    if (kFeatures || tile.partial) {
      adjust_scores<kUsed>(panel, tile, begin, end);
      this->template row_maximum<kUsed>(panel, begin, end, maximum);
    }
    this->template accumulate<kUsed>(panel, begin, end, maximum);
  }

  // The tile's rows some lane of the panel can see, from a whole step on.
  void visible_rows(const Panel& panel, const KeyTile& tile, int& begin, int& end) const {
    begin = 0;
    end = tile.rows;
    if constexpr (kHasKeyRange<Policy>) {
      if (!tile.partial || tile.num_segments > 1) return;
      const int key = tile.segment[0].key;
      begin = max_of(0, panel.keys.first - key) & -Tr::kCut;
      end = min_of(end, panel.keys.last_end - key);
    }
  }

  // Score features and mask, on the rows [begin, end).
  template <int kUsed>
  void adjust_scores(const Panel& panel, const KeyTile& tile, int begin, int end) {
    for (int n = 0; n < tile.num_segments; ++n) {
      KeySegment s = tile.segment[n];
      const int skip = max_of(0, begin - s.row);
      s = {s.row + skip, s.key + skip, min_of(s.count, end - s.row) - skip, s.partial};
      if (s.count <= 0) continue;
      if constexpr (kFeatures) this->template apply_features<kUsed>(panel, s);
      if constexpr (kHasScore<Policy>)
        apply_policy_score<kPanel>(w_.s + s.row * kPanel, kUsed * kLanes, s, policy_, panel.i0, panel.lanes);
      if (s.partial)
        mask_scores<kPanel>(w_.s + s.row * kPanel, kUsed * kLanes, s, policy_, panel.keys, panel.i0, panel.lanes);
    }
  }
};

template <class T, int kHeadDim, class Policy, bool kFeatures>
consteval ForwardEntry forward_entry() {
  constexpr Features kCompiledIn = kFeatures ? Features::kAll : Features::kNone;
  return make_entry<ForwardParams, Forward<T, kHeadDim, Policy, kFeatures>, T, Policy>(kHeadDim, kCompiledIn);
}

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
