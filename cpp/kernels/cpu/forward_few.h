// The forward of sequences with a few queries (cpu/few_queries.h), of several heads in turns: where heads interleave in
// memory, as in (batch, seqlen, heads, head_dim), what a processor fetches behind a row is the next head's.
#pragma once

#include <new>

#include "cpu/few_queries.h"
#include "cpu/few_queries_tiles.h"
#include "cpu/forward_job.h"

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

// The class of as many queries as there is one for.
#if defined(__AMX_BF16__)
template <class T, int kHeadDim>
using MostFewQueries =
    std::conditional_t<std::is_same_v<T, Bf16>, FewQueriesOnTiles<kHeadDim>, FewQueries<T, kHeadDim>>;
#else
template <class T, int kHeadDim>
using MostFewQueries = FewQueries<T, kHeadDim>;
#endif

// Queries_: FewQueries or FewQueriesOnTiles.
template <class T, int kHeadDim, class Policy, bool kFeatures, class Queries_>
class ForwardFew : ForwardJob<T, kHeadDim, Policy, kFeatures> {
  using Job = ForwardJob<T, kHeadDim, Policy, kFeatures>;
  using Job::i0_;
  using Job::i1_;
  using Job::p_;
  using Job::policy_;
  using Job::seqlen_;
  using Job::tile_;
  using Job::walk_;
  using Queries = Queries_;
  using Rows = typename Queries::Rows;

 public:
  using typename Job::Scratch;

  static bool fit(int queries) { return queries <= Queries::kMost; }
  // Heads of one job are kept where other jobs have panels.
  static constexpr int most_heads() {
    constexpr std::size_t room = sizeof(Scratch::panel);
    return min_of(16, static_cast<int>(room / sizeof(ForwardFew)));
  }

  // How many heads lie on a page of memory, which is as far as a processor fetches ahead by itself. Not so many that
  // the longest job has more than a quarter of a thread's share of all keys. Which keys a window, a layout or a bias
  // shows is not asked: their heads go one by one.
  static int heads_together(const ForwardParams& p, int num_threads) {
    const bool interleaved = p.k.head < p.k.row && p.num_heads > 1;
    const bool hides = p.mask.kind == MaskKind::kBlockSparse || p.mask.band.left != BandParam::kUnlimited ||
                       p.score.bias.ptr != nullptr;
    if (!fit(p.seqlen_q) || !interleaved || hides) return 1;
    std::int64_t keys = 0, longest = 1;  // of a sequence, or of a part of it
    for (int batch = 0; batch < p.batch; ++batch) {
      const SeqlenInfo seqlen(p, batch);
      if (seqlen.seqlen_q == 0) continue;
      keys += seqlen.seqlen_k;
      longest = max_of(
          longest, ceil_div(std::int64_t{seqlen.seqlen_k}, std::int64_t{num_parts(seqlen.seqlen_q, seqlen.seqlen_k)}));
    }
    const std::int64_t head_bytes = std::int64_t{p.head_dim} * size_of(p.dtype_kv);
    const std::int64_t share = keys * p.num_heads / (4 * num_threads);
    const std::int64_t heads = min_of(ceil_div(kPage, head_bytes), share / longest);
    return max_of(1, static_cast<int>(min_of(heads, std::int64_t{min_of(most_heads(), p.num_heads)})));
  }

  // Queries [i0, i1) of heads [head, end_head), and results when their turns have come.
  static void run(const ForwardParams& p, Tile tile, int batch, int head, int end_head, Scratch& scratch, int m_block,
                  int part, const PartBuffers& buffers) {
    static_assert(most_heads() > 0 && alignof(ForwardFew) <= alignof(Scratch));
    static_assert(std::is_trivially_destructible_v<ForwardFew>, "nobody destroys them: nor may a policy ask for it");
    auto* few = reinterpret_cast<ForwardFew*>(scratch.panel);
    int heads = 0;
    for (; head < end_head; ++head) {
      auto* one = new (few + heads) ForwardFew(p, tile, batch, head, scratch);
      if (one->begin(m_block, part, buffers)) one->begin_queries(), ++heads;
    }
    if (heads == 0) return;
    few->with_key_type([&]<class E>() { walk_in_turns<E>(few, heads); });
    for (int n = 0; n < heads; ++n) few[n].finish();
  }

 private:
  static constexpr std::int64_t kPage = 4096;

  ForwardFew(const ForwardParams& p, Tile tile, int batch, int head, Scratch& scratch)
      : Job(p, tile, batch, head, scratch), queries_(scratch) {}

  void begin_queries() {
    const T* q = seqlen_.template head_q<const T>(p_.q, this->batch_, this->head_) + i0_ * p_.q.row;
    queries_.begin(q, p_.q.row, i1_ - i0_, p_.head_dim, p_.head_dim_v, this->scale_.q_factor, this->factor_);
    seen_ = seen_keys();
    next_tile();
  }

  // A tile of each head, again and again, until none has one left.
  template <class E>
  static void walk_in_turns(ForwardFew* few, int heads) {
    Rows k, v;
    int n = heads - 1;
    const auto next_head = [&] {
      for (int tried = 0; tried < heads; ++tried) {
        n = n + 1 < heads ? n + 1 : 0;
        if (few[n].has_keys()) break;
      }
      few[n].template set_rows<E>(few->p_.k, few->p_.head_dim, k);
    };
    for (next_head(); k.count() > 0;) {
      ForwardFew& one = few[n];
      one.template set_rows<E>(one.p_.v, one.p_.head_dim_v, v);
      one.queries_.template scores<E>(k, v);
      one.finish_scores();
      one.next_tile();
      next_head();
      one.queries_.template accumulate<E>(v, k);
    }
  }

  bool has_keys() const { return keys_.begin < keys_.end; }
  template <class E>
  void set_rows(const TensorParam& t, int columns, Rows& rows) const {
    rows.set(this->template rows_of<E>(t), keys_, columns);
  }
  // Keys of the next tile of which a query sees any; none when all tiles are done.
  void next_tile() {
    for (TileRef tile; walk_.next(tile);) {
      keys_ = {tile.index * tile_.n, min_of((tile.index + 1) * tile_.n, seqlen_.seqlen_k)};
      if (tile.partial) keys_ = {max_of(keys_.begin, seen_.begin), min_of(keys_.end, seen_.end)};
      partial_ = tile.partial;
      if (has_keys()) return;
    }
    keys_ = {0, 0};
  }

  // Score features, mask and softmax: P in place of S.
  void finish_scores() {
    const int count = keys_.end - keys_.begin;
    if constexpr (kFeatures)
      for (int i = i0_; i < i1_; ++i)
        this->features_.apply_row(queries_.row(i - i0_), i, keys_.begin, count, this->scale_.magnitude);
    if constexpr (kHasScore<Policy>)
      for (int i = i0_; i < i1_; ++i)
        for (int r = 0; r < count; ++r) {
          float& s = queries_.row(i - i0_)[r];
          s = score_of(policy_, s, i, keys_.begin + r);
        }
    if (partial_)
      for (int i = i0_; i < i1_; ++i) hide_keys(i, queries_.row(i - i0_));
    queries_.exponentiate();
    if constexpr (kFeatures)
      if (this->features_.dropout())
        for (int i = i0_; i < i1_; ++i) this->features_.drop_row(queries_.row(i - i0_), i, keys_.begin, count);
  }

  void finish() {
    this->in_turn([&] {
      for (int i = i0_; i < i1_; ++i)
        this->finish_row(i, queries_.out(i - i0_), queries_.max(i - i0_), queries_.sum(i - i0_));
    });
  }

  // From the first to the last that one of the queries sees, where the policy knows them.
  KeyRange seen_keys() const {
    if constexpr (kHasKeyRange<Policy>) {
      LaneKeys<Queries::kMost> seen;
      seen.set(policy_, i0_, i1_ - i0_);
      return {seen.first, seen.last_end};
    }
    return {0, seqlen_.seqlen_k};
  }
  // Scores of keys that query i does not see become -inf.
  void hide_keys(int i, float* scores) const {
    const KeyRange keys = keys_;
    if constexpr (kHasKeyRange<Policy>) {
      const KeyRange seen = policy_.keys_of(i);
      for (int j = keys.begin; j < min_of(keys.end, seen.begin); ++j) scores[j - keys.begin] = -INFINITY;
      for (int j = max_of(keys.begin, seen.end); j < keys.end; ++j) scores[j - keys.begin] = -INFINITY;
    } else {
      for (int j = keys.begin; j < keys.end; ++j)
        if (!policy_.allowed(i, j)) scores[j - keys.begin] = -INFINITY;
    }
  }

  Queries queries_;
  KeyRange seen_{0, 0}, keys_{0, 0};  // in all, and of the tile
  bool partial_ = false;              // the tile is
};

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
