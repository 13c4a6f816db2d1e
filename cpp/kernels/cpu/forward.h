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
#include "cpu/few_queries.h"
#include "cpu/forward_tile.h"

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

template <class T, int kHeadDim, class Policy, bool kFeatures>
class Forward : ForwardTile<T, kHeadDim, kFeatures> {
  static_assert(!kHasScore<Policy> || kFeatures, "where a policy's scores are asked for");
  using Base = ForwardTile<T, kHeadDim, kFeatures>;
  using Tr = typename Base::Tr;
  using Base::kKeys;
  using Base::p_;
  using Base::seqlen_;
  using Base::w_;
  using FewQueries = cpu::FLASHSDK_ISA_NS::FewQueries<T, kHeadDim>;
  using typename Base::KeyTile;
  using typename Base::Panel;
  using typename Base::Scratch;

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
    const int whole = m_blocks - parts.lines(), jobs = whole + parts.lines() * parts.most_parts();
    for_each_job(runner, std::int64_t{p.batch} * p.num_heads * jobs, [&](std::int64_t job, int slot) {
      Split line(job, jobs);
      Split head(line.quotient, p.num_heads);
      Split part(max_of(0, line.remainder - whole), parts.most_parts());
      // Every sequence has as many jobs as the longest: most of them are none, and must cost nothing.
      if (part.remainder > 0) {
        const SeqlenInfo seqlen(p, head.quotient);
        if (part.remainder >= num_parts(seqlen.seqlen_q, seqlen.seqlen_k)) return;
      }
      // Last queries first: under a causal mask they see most keys, and long jobs must not come last.
      const int m_block = m_blocks - 1 - (line.remainder < whole ? line.remainder : whole + part.quotient);
      Forward(p, tile, head.quotient, head.remainder, scratch[slot]).run(m_block, part.remainder, parts);
    });
  }

 private:
  static PartBuffers part_buffers(const ForwardParams& p, Tile tile) {
    return {p, p.num_heads, tile.m, p.seqlen_q, p.seqlen_k, p.total_k, Base::joined_floats(p)};
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
      : Base(p, batch, head, scratch), tile_(tile), policy_(p.mask, seqlen_, batch, head) {}

  void run(int m_block, int part, const PartBuffers& buffers) {
    const int i0 = m_block * tile_.m, i1 = min_of(i0 + tile_.m, seqlen_.seqlen_q);
    if (i0 >= i1) return;  // a packed sequence shorter than the longest
    TileWalk walk = policy_.row_walk(tile_, m_block);
    const TileRange tiles = tiles_of_sequence(walk.has_runs());
    const int parts = num_parts(seqlen_.seqlen_q, keys_in(tiles));
    if (part >= parts) return;
    const TileRange mine = part_of(tiles, part, parts);
    walk = walk.between(mine.begin, mine.end);
    if (parts > 1) {
      this->joined_ = {part, parts, buffers.rows(this->batch_, seqlen_.offset_k, this->head_)};
    }
    const PartOrder order = buffers.order(this->batch_, this->head_, m_block);
    auto wait_for_turn = [&] {
      if (parts > 1) order.wait_for_turn(part);
    };
    // By the sequence alone, so that results do not depend on how it is cut.
    FewQueries::fit(seqlen_.seqlen_q) ? run_few(walk, i0, i1, wait_for_turn) : run_panels(walk, i0, i1, wait_for_turn);
    if (parts > 1) order.pass(part);
  }

  // The tiles that queries of the sequence visit, without what a bias hides of them at either end. Of lists, and where
  // queries are too many for parts, all. A policy is asked for the tiles it is asked for elsewhere.
  TileRange tiles_of_sequence(bool runs) const {
    TileRange tiles{0, ceil_div(seqlen_.seqlen_k, tile_.n)};
    if (runs && seqlen_.seqlen_q <= kMostPartRows) {
      TileRange seen{tiles.end, 0};
      for (int m = 0; m * tile_.m < seqlen_.seqlen_q; ++m) {
        const TileWalk walk = policy_.row_walk(tile_, m);
        if (walk.begin() < walk.end()) seen = {min_of(seen.begin, walk.begin()), max_of(seen.end, walk.end())};
      }
      tiles = seen.begin < seen.end ? seen : TileRange{0, 0};
    }
    if constexpr (kFeatures) {
      const KeyRange shown = this->features_.keys_shown(seqlen_.seqlen_k);
      tiles.begin = max_of(tiles.begin, shown.begin / tile_.n);
      tiles.end = max_of(tiles.begin, min_of(tiles.end, ceil_div(shown.end, tile_.n)));
    }
    return tiles;
  }
  int keys_in(TileRange tiles) const { return min_of(tiles.end * tile_.n, seqlen_.seqlen_k) - tiles.begin * tile_.n; }

  // Queries [i0, i1), and results when their turn has come.
  template <class Turn>
  void run_panels(TileWalk walk, int i0, int i1, Turn wait_for_turn) {
    const int panels = ceil_div(i1 - i0, kPanel);
    int first_key = 0, end_key = seqlen_.seqlen_k;
    for (int n = 0; n < panels; ++n) {
      Panel& panel = w_.panel[n];
      this->begin_panel(panel, i0 + n * kPanel, i1);
      if constexpr (kHasKeyRange<Policy>) {
        panel.keys.set(policy_, panel.i0, panel.lanes);
        first_key = n == 0 ? panel.keys.first : min_of(first_key, panel.keys.first);
        end_key = n == 0 ? panel.keys.last_end : max_of(end_key, panel.keys.last_end);
      }
    }
    TileRef next;
    bool more = walk.next(next);
    KeyTile keys;
    while (keys.gather(walk, next, more, tile_.n, seqlen_.seqlen_k)) {
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
    wait_for_turn();
    for (int n = 0; n < panels; ++n) this->finish_panel(w_.panel[n]);
  }

  // The same of a sequence that has few.
  template <class Turn>
  void run_few(TileWalk walk, int i0, int i1, Turn wait_for_turn) {
    FewQueries few(seqlen_.template head_q<const T>(p_.q, this->batch_, this->head_) + i0 * p_.q.row, p_.q.row, i1 - i0,
                   p_.head_dim, p_.head_dim_v, this->scale_.q_factor, this->factor_);
    const KeyRange seen = seen_keys(i0, i1);
    for (TileRef tile; walk.next(tile);) {
      KeyRange keys{tile.index * tile_.n, min_of((tile.index + 1) * tile_.n, seqlen_.seqlen_k)};
      if (tile.partial) keys = {max_of(keys.begin, seen.begin), min_of(keys.end, seen.end)};
      if (keys.begin >= keys.end) continue;
      const int count = keys.end - keys.begin;
      this->with_key_type([&]<class E>() {
        FewQueries::with_rows(this->template rows_of<E>(p_.k), keys, [&](const auto& k) { few.scores(k, count); });
      });
      if constexpr (kFeatures)
        for (int i = i0; i < i1; ++i)
          this->features_.apply_row(few.row(i - i0), i, keys.begin, count, this->scale_.magnitude);
      if constexpr (kHasScore<Policy>)
        for (int i = i0; i < i1; ++i)
          for (int r = 0; r < count; ++r) {
            float& s = few.row(i - i0)[r];
            s = score_of(policy_, s, i, keys.begin + r);
          }
      if (tile.partial)
        for (int i = i0; i < i1; ++i) hide_keys(i, keys, few.row(i - i0));
      few.exponentiate();
      if constexpr (kFeatures)
        if (this->features_.dropout())
          for (int i = i0; i < i1; ++i) this->features_.drop_row(few.row(i - i0), i, keys.begin, count);
      this->with_key_type([&]<class E>() {
        FewQueries::with_rows(this->template rows_of<E>(p_.v), keys, [&](const auto& v) { few.accumulate(v); });
      });
    }
    wait_for_turn();
    for (int i = i0; i < i1; ++i) this->finish_row(i, few.out(i - i0), few.max(i - i0), few.sum(i - i0));
  }

  // The keys from the first to the last that one of the queries sees, where the policy knows them.
  KeyRange seen_keys(int i0, int i1) const {
    if constexpr (kHasKeyRange<Policy>) {
      LaneKeys<Tr::kFewQueries> seen;
      seen.set(policy_, i0, i1 - i0);
      return {seen.first, seen.last_end};
    }
    return {0, seqlen_.seqlen_k};
  }
  // Scores of `keys` that query i does not see become -inf.
  void hide_keys(int i, KeyRange keys, float* scores) const {
    if constexpr (kHasKeyRange<Policy>) {
      const KeyRange seen = policy_.keys_of(i);
      for (int j = keys.begin; j < min_of(keys.end, seen.begin); ++j) scores[j - keys.begin] = -INFINITY;
      for (int j = max_of(keys.begin, seen.end); j < keys.end; ++j) scores[j - keys.begin] = -INFINITY;
    } else {
      for (int j = keys.begin; j < keys.end; ++j)
        if (!policy_.allowed(i, j)) scores[j - keys.begin] = -INFINITY;
    }
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

  const Tile tile_;
  const Policy policy_;
};

template <class T, int kHeadDim, class Policy, bool kFeatures>
consteval ForwardEntry forward_entry() {
  constexpr Features kCompiledIn = kFeatures ? Features::kAll : Features::kNone;
  return make_entry<ForwardParams, Forward<T, kHeadDim, Policy, kFeatures>, T, Policy>(kHeadDim, kCompiledIn);
}

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
