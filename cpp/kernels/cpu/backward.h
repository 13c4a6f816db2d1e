// Backward attention on a CPU (FlashAttention, arXiv 2205.14135, algorithm 4, transposed), in three passes:
//   1. delta = rowsum(dO∘O) - dlse, dQ accumulators zeroed, and row sums where |lse| is too large for float32 to say P;
//      of these the gradient of a sink;
//   2. a job per tile of keys, which walks down its column of the score matrix with queries in vector lanes:
//        S^T = K·Q^T, dP^T = V·dO^T, P^T = exp(S^T - lse), dS^T = P^T∘(dP^T - delta),
//        dV += P^T·dO, dK += dS^T·Q, dQ^T += K^T·dS^T;
//   3. dQ converted.
// dK and dV belong to the job, or, of few keys and many queries, to a job for each part of the queries, which join them
// in the order of these parts (cpu/parts.h). dQ tiles are shared by the jobs of a head, which add to them in the order
// of their keys (DqOrder): gradients are bit-identical for any number of threads.
#pragma once

#include "cpu/backward_tile.h"
#include "cpu/entry.h"

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

template <class T, int kHeadDim, class Policy, bool kFeatures>
class Backward : BackwardTile<T, kHeadDim, kFeatures> {
  static_assert(!kHasScore<Policy> || kFeatures, "where a policy's scores are asked for");
  using Base = BackwardTile<T, kHeadDim, kFeatures>;
  using Tr = typename Base::Tr;
  using Base::begin_;
  using Base::buffers_;
  using Base::end_;
  using Base::i0_;
  using Base::key0_;
  using Base::keys_;
  using Base::kKeys;
  using Base::kQueries;
  using Base::lanes_;
  using Base::p_;
  using Base::seqlen_;
  using Base::w_;
  using typename Base::Scratch;

 public:
  static constexpr Tile kTile{kQueries, kKeys};

  static std::size_t workspace_size(const BackwardParams& p, int num_threads) {
    return BackwardBuffers(p, tile_for(p)).bytes() + sizeof(Scratch) * num_threads;
  }

  static void launch(const BackwardParams& p, const LaunchContext& context) {
    const Tile tile = tile_for(p);
    const ParallelRunner runner = runner_for(context.parallel, 2.5 * forward_flops(p));
    BackwardBuffers buffers(p, tile);
    buffers.place(context.workspace);
    auto* scratch = reinterpret_cast<Scratch*>(static_cast<char*>(context.workspace) + buffers.bytes());

    prepare_backward<T>(
        p, buffers, runner, typename Base::RowOffset(p), [&](int slot, int batch, int head, int m_block) {
          Backward(p, tile, buffers, batch, head / p.heads_per_group(), scratch[slot]).sum_rows(head, m_block);
        });
    write_dsink(p, buffers, runner, typename Base::RowOffset(p));
    const int heads = p.batch * p.num_heads_kv;
    const int side_by_side = heads_side_by_side(p, runner.num_threads);
    for_each_job(runner, buffers.jobs(), [&](std::int64_t job, int slot) {
      Split group(job, side_by_side * buffers.jobs_of_head());
      const int first = group.quotient * side_by_side;
      Split column(group.remainder, min_of(side_by_side, heads - first));
      Split head(first + column.remainder, p.num_heads_kv);
      Backward(p, tile, buffers, head.quotient, head.remainder, scratch[slot]).run(buffers.column_job(column.quotient));
    });
    convert_dq<T>(p, buffers, runner);
  }

 private:
  static Tile tile_for(const ForwardParams& p) {
    if (p.mask.kind != MaskKind::kBlockSparse) return kTile;
    return {tile_in_block(p.mask.block_q, kTile.m), tile_in_block(p.mask.block_k, kTile.n)};
  }
  // Heads whose columns are computed in turns, instead of one head after the other. Columns of a random layout visit
  // other tiles each, so that threads on one head would wait for each other's dQ: simulated at density 1/16, 7 % of the
  // time with 2 threads and 40 % with 16. Columns of a band or of no mask move in step, and share Q and dO in L3.
  static int heads_side_by_side(const ForwardParams& p, int num_threads) {
    return p.mask.kind == MaskKind::kBlockSparse ? min_of(p.batch * p.num_heads_kv, num_threads) : 1;
  }

  Backward(const BackwardParams& p, Tile tile, const BackwardBuffers& buffers, int batch, int head_kv, Scratch& scratch)
      : Base(p, buffers, batch, head_kv, scratch), tile_(tile) {}

  void run(ColumnJob job) {
    const auto [n_block, part] = job;
    DqOrder order(buffers_.progress(this->batch_ * p_.num_heads_kv + this->head_kv_, part), n_block);
    key0_ = n_block * tile_.n;
    keys_ = min_of(tile_.n, seqlen_.seqlen_k - key0_);
    const int group = p_.heads_per_group();
    const int parts = num_parts(seqlen_.seqlen_k, std::int64_t{group} * seqlen_.seqlen_q);
    if (keys_ > 0 && part < parts) {  // else a packed sequence shorter than the longest
      this->load_keys();
      const int m_blocks = ceil_div(p_.seqlen_q, tile_.m), visited = ceil_div(seqlen_.seqlen_q, tile_.m);
      const TileRange mine = part_of({0, group * visited}, part, parts);
      for (int g = 0; g < group; ++g) {
        const TileRange of_head{max_of(0, mine.begin - g * visited), min_of(visited, mine.end - g * visited)};
        if (of_head.begin >= of_head.end) continue;
        const int head = this->head_kv_ * group + g;
        const Policy policy(p_.mask, seqlen_, this->batch_, head);
        const ScoreFeatures features(p_.score, seqlen_, this->batch_, head);
        if constexpr (kFeatures) {
          const KeyRange shown = features.keys_shown(seqlen_.seqlen_k);
          if (key0_ + keys_ <= shown.begin || key0_ >= shown.end) continue;
        }
        TileWalk walk = policy.col_walk(tile_, n_block).between(of_head.begin, of_head.end);
        TileRef query, next;
        for (bool more = walk.next(next); more;) {
          query = next;
          more = walk.next(next);
          if (more)
            this->prefetch_next(head, next.index * tile_.m, min_of(tile_.m, seqlen_.seqlen_q - next.index * tile_.m));
          order.reach(g * m_blocks + query.index);
          add_tile(policy, features, head, query, [&] { order.wait_for_turn(); });
        }
      }
      order.finish();
      if (parts > 1) return join_parts(n_block, part, parts);
      this->store_gradients();
    }
    order.finish();
  }

  void join_parts(int n_block, int part, int parts) {
    const PartBuffers& buffers = buffers_.parts();
    const std::int64_t offset = std::int64_t{p_.heads_per_group()} * seqlen_.offset_q;
    float* joined = buffers.rows(this->batch_, offset, this->head_kv_) + key0_ * BackwardBuffers::joined_floats(p_);
    const PartOrder order = buffers.order(this->batch_, this->head_kv_, n_block);
    order.wait_for_turn(part);
    if (part > 0) this->add_gradients(joined);
    part + 1 < parts ? this->keep_gradients(joined) : this->store_gradients();
    order.pass(part);
  }

  // The row sums of one tile of queries.
  void sum_rows(int head, int m_block) {
    const Policy policy(p_.mask, seqlen_, this->batch_, head);
    const ScoreFeatures features(p_.score, seqlen_, this->batch_, head);
    begin_queries(m_block);
    this->load_scored_queries(head);
    this->begin_row_sums();
    TileWalk walk = policy.row_walk(tile_, m_block);
    for (TileRef key; walk.next(key);) {
      key0_ = key.index * tile_.n;
      keys_ = min_of(tile_.n, seqlen_.seqlen_k - key0_);
      if (!visible_keys(policy, key.partial)) continue;
      this->load_scored_keys();
      this->scores();
      adjust_scores(policy, features, key.partial);
      this->add_to_row_sums();
    }
    this->finish_row_sums(head);
  }

  void begin_queries(int m_block) {
    i0_ = m_block * tile_.m;
    lanes_ = min_of(tile_.m, seqlen_.seqlen_q - i0_);
    this->lane_end_ = round_up(lanes_, Base::kLaneStep);
  }

  // One tile of the score matrix: its share of dV, dK and, when its turn has come, dQ.
  template <class Turn>
  void add_tile(const Policy& policy, const ScoreFeatures& features, int head, TileRef query, Turn wait_for_turn) {
    begin_queries(query.index);
    if (!visible_keys(policy, query.partial)) return;
    this->load_queries(head);
    this->scores();
    this->dout_products();
    adjust_scores(policy, features, query.partial);
    this->differentiate_softmax(features, features.softcap() || kHasScoreSlope<Policy>);
    this->add_to_dk_dv();
    this->add_to_dq(head, wait_for_turn);
  }

  // The keys of this job that some query of the tile can see, from a whole step on; false when there is none.
  bool visible_keys(const Policy& policy, bool partial) {
    begin_ = 0;
    end_ = keys_;
    if constexpr (kHasKeyRange<Policy>) {
      if (!partial) return true;
      w_.lane_keys.set(policy, i0_, lanes_);
      begin_ = max_of(0, w_.lane_keys.first - key0_) & -Tr::kCut;
      end_ = min_of(end_, w_.lane_keys.last_end - key0_);
    }
    return begin_ < end_;
  }

  void adjust_scores(const Policy& policy, const ScoreFeatures& features, bool partial) {
    const KeySegment segment{begin_, key0_ + begin_, end_ - begin_, partial};
    if constexpr (kFeatures) this->apply_features(features, segment);
    if constexpr (kHasScore<Policy>) {
      const int first = begin_ * Base::kScorePitch;
      apply_policy_score<Base::kScorePitch>(w_.s + first, this->lane_end_, segment, policy, i0_, lanes_,
                                            kHasScoreSlope<Policy> ? w_.score_slope + first : nullptr,
                                            features.softcap());
    }
    if (partial)
      mask_scores<Base::kScorePitch>(w_.s + begin_ * Base::kScorePitch, this->lane_end_, segment, policy, w_.lane_keys,
                                     i0_, lanes_);
  }

  const Tile tile_;
};

template <class T, int kHeadDim, class Policy, bool kFeatures>
consteval BackwardEntry backward_entry() {
  constexpr Features kCompiledIn = kFeatures ? Features::kAll : Features::kNone;
  return make_entry<BackwardParams, Backward<T, kHeadDim, Policy, kFeatures>, T, Policy>(kHeadDim, kCompiledIn);
}

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
