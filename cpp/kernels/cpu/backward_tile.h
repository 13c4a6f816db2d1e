// One job of the backward's main pass, step by step, for any mask: what cpu/backward.h calls down a column of tiles.
#pragma once

#include "cpu/backward_passes.h"

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

// Steps are not inlined: all mask policies share one copy of each.
template <class T, int kHeadDim, bool kFeatures>
class BackwardTile {
 protected:
  using Tr = Traits<T, kHeadDim>;
  using Dot = typename Tr::Dot;
  using Word = typename Tr::Word;
  static constexpr int kStep = Dot::kStep, kParts = Dot::kParts;
  static constexpr int kRowPart = Tr::kRowPart, kRowPitch = Tr::kRowPitch, kWidePitch = Tr::kWidePitch;
  static constexpr int kKeys = Tr::kBackwardKeys, kQueries = Tr::kBackwardQueries;
  static constexpr int kPaddedKeys = kKeys + Dot::kMaxRowPadding;
  // Of the lanes of a tile so many are computed as hold its queries.
  static constexpr int kLaneStep = Dot::kTiles ? kPanel : kLanes;
  using SummedKeys = typename Tr::template SummedKeys<kKeys>;
  // Row pitch of S^T and dP^T (keys, queries), and of P^T and dS^T as operands in words of kStep queries, which take
  // their place; the words of the second part of these lie behind the first's.
  static constexpr int kScorePitch = kQueries + Tr::kPadding;
  static constexpr int kOperandPitch = kScorePitch * sizeof(float) / sizeof(Word);
  static constexpr int kOperandPart = kQueries / kStep;
  static_assert(kParts * kOperandPart <= kOperandPitch);
  static_assert(kParts == 1 || kQueries == kPanel, "a second part would overwrite scores of the next panel");

  // A tile of queries of q or dout in the three layouts its products read.
  struct QueryOperand {
    alignas(64) Word rows[kQueries * kRowPitch];                                    // (queries, d)
    alignas(64) Word transposed[kQueries / kPanel * kParts * Tr::kTransposedPart];  // per panel (d, lanes)
    alignas(64) Word row_words[kStep == 1 ? 1 : kQueries / kStep * kParts * kWidePitch];
    const Word* words() const { return kStep == 1 ? rows : row_words; }
  };
  struct Scratch {
    alignas(64) Word k[kPaddedKeys * kRowPitch], v[kPaddedKeys * kRowPitch];  // (keys, d)
    alignas(64) Word k_summed[kStep == 1 ? 1 : SummedKeys::kWords];  // the same for products that sum over keys
    alignas(64) float dk[kPaddedKeys * kWidePitch], dv[kPaddedKeys * kWidePitch];
    QueryOperand q, dout;
    alignas(64) float s[kPaddedKeys * kScorePitch];   // S^T (keys, lanes), then P^T
    alignas(64) float dp[kPaddedKeys * kScorePitch];  // dP^T, then dS^T
    alignas(64) Word ds_words[kStep == 1 ? 1 : ceil_div(kKeys, kStep) * kParts * kScorePitch];
    alignas(64) float dq[(Dot::kTiles ? kHeadDim : kQueries) * kPanel];    // this tile's share, of a panel
    alignas(64) float top[kQueries], log2_sum[kQueries], delta[kQueries];  // RowValues
    alignas(64) float row_max[kQueries], row_sum[kQueries];                // of the rows whose sum is taken anew
    LaneKeys<kQueries> lane_keys;
    alignas(64) float score_slope[kFeatures ? kKeys * kScorePitch : 1];
    alignas(64) std::uint8_t random[kFeatures ? kKeys * kScorePitch : 1];
    const Word* summed_k() const { return kStep == 1 ? k : k_summed; }
    const Word* ds_by_words() const { return kStep == 1 ? reinterpret_cast<const Word*>(dp) : ds_words; }
  };

  BackwardTile(const BackwardParams& p, const BackwardBuffers& buffers, int batch, int head_kv, Scratch& scratch)
      : p_(p),
        buffers_(buffers),
        batch_(batch),
        head_kv_(head_kv),
        seqlen_(p, batch),
        scale_(p.score.softmax_scale),
        w_(scratch) {
    factor_ = static_cast<float>(scale_.template to_natural<kFeatures>() * kLog2e);
  }

  // exp(s·scale - lse) = exp2((s - top)·factor_ - log2_sum), top being the lse in the units of s: rounded, and
  // log2_sum what that leaves out. Where top is no float32, which takes a scale below 1e-37, log2_sum has it all.
  struct RowOffset {
    double score_per_lse, factor;
    explicit RowOffset(const BackwardParams& p) {
      const double unit = ScaleSplit(p.score.softmax_scale).template to_natural<kFeatures>();
      score_per_lse = 1 / unit;
      factor = unit * kLog2e;
    }
    void operator()(float lse, float& top, float& log2_sum) const {
      const double exact = lse * score_per_lse;
      top = std::fabs(exact) <= FLT_MAX ? static_cast<float>(exact) : 0.f;
      log2_sum = static_cast<float>((exact - top) * factor);
    }
  };

  __attribute__((noinline)) void load_keys() {
    const T* k = seqlen_.template head_k<const T>(p_.k, batch_, head_kv_) + key0_ * p_.k.row;
    const T* v = seqlen_.template head_k<const T>(p_.v, batch_, head_kv_) + key0_ * p_.v.row;
    const int d = Tr::padded(p_.head_dim), d_v = Tr::padded(p_.head_dim_v);
    pack_rows<Dot, kRowPitch, kRowPart>(k, p_.k.row, keys_, p_.head_dim, d, w_.k);
    pack_rows<Dot, kRowPitch, kRowPart>(v, p_.v.row, keys_, p_.head_dim_v, d_v, w_.v);
    if constexpr (kStep > 1)
      pack_summed_parts<Dot, SummedKeys, kRowPitch, kRowPart>(w_.k, keys_, p_.head_dim, d, w_.k_summed);
    const int padding = Dot::kMaxRowPadding;
    zero_rows<Dot, kRowPitch>(padding, w_.k + keys_ * kRowPitch);
    zero_rows<Dot, kRowPitch>(padding, w_.v + keys_ * kRowPitch);
    std::memset(w_.dk, 0, sizeof(float) * (keys_ + padding) * kWidePitch);
    std::memset(w_.dv, 0, sizeof(float) * (keys_ + padding) * kWidePitch);
  }

  // What scores alone need of the queries: row values and q.
  __attribute__((noinline)) void load_scored_queries(int head) {
    const RowValues row = buffers_.row_values(p_, seqlen_, batch_, head) + i0_;
    for (int l = 0; l < kQueries; ++l) {
      w_.top[l] = l < lanes_ ? row.top[l] : 0.f;
      w_.log2_sum[l] = l < lanes_ ? row.log2_sum[l] : INFINITY;  // P = 0 past the sequence
      w_.delta[l] = l < lanes_ ? row.delta[l] : 0.f;
    }
    load_operand(w_.q, seqlen_.template head_q<const T>(p_.q, batch_, head) + i0_ * p_.q.row, p_.q.row, p_.head_dim);
    scale_operand(w_.q.transposed, scale_.q_factor, ceil_div(lanes_, kPanel) * kParts * Tr::kTransposedPart);
  }
  void load_queries(int head) {
    load_scored_queries(head);
    load_operand(w_.dout, seqlen_.template head_q<const T>(p_.dout, batch_, head) + i0_ * p_.dout.row, p_.dout.row,
                 p_.head_dim_v);
  }

  // Row sums taken anew, for the rows whose lse is not trusted: over all tiles of keys that the queries visit.
  void begin_row_sums() {
    for (int l = 0; l < kQueries; ++l) {
      w_.row_max[l] = -INFINITY;
      w_.row_sum[l] = 0.f;
    }
  }
  __attribute__((noinline)) void load_scored_keys() {
    const T* k = seqlen_.template head_k<const T>(p_.k, batch_, head_kv_) + key0_ * p_.k.row;
    pack_rows<Dot, kRowPitch, kRowPart>(k, p_.k.row, keys_, p_.head_dim, Tr::padded(p_.head_dim), w_.k);
    zero_rows<Dot, kRowPitch>(Dot::kMaxRowPadding, w_.k + keys_ * kRowPitch);
  }
  // The online softmax's step without P: m' = max(m, rows of S^T), l = l·exp(m - m') + sum exp(S^T - m').
  __attribute__((noinline)) void add_to_row_sums() {
    const Vec factor = set1(factor_);
    for (int l = 0; l < lane_end_; l += kLanes) {
      const Vec old_max = load(w_.row_max + l);
      Vec new_max = old_max, sum = zero();
      for (int r = begin_; r < end_; ++r) new_max = max(new_max, load(w_.s + r * kScorePitch + l));
      const Vec shift = finite_or_zero(new_max);
      for (int r = begin_; r < end_; ++r)
        sum = add(sum, exp2<5>(mul(sub(load(w_.s + r * kScorePitch + l), shift), factor)));
      const Vec rescale = exp2<5>(mul(sub(old_max, shift), factor));
      store(w_.row_max + l, new_max);
      store(w_.row_sum + l, fma(load(w_.row_sum + l), rescale, sum));
    }
  }
  void finish_row_sums(int head) {
    const float* lse = seqlen_.rows(p_.lse, batch_, head) + i0_ * p_.lse.row;
    const RowValues row = buffers_.row_values(p_, seqlen_, batch_, head) + i0_;
    const RowOffset row_offset(p_);
    for (int l = 0; l < lanes_; ++l) {
      if (trusted<T>(lse[l * p_.lse.row])) continue;
      const float* sink = p_.sink.of(head, i0_ + l);
      const bool sees = w_.row_sum[l] != 0.f;
      const double keys = std::log2(double{w_.row_sum[l]});
      // How far the sink is above what the keys sum up to, in units of log2.
      const double above = sink == nullptr ? -INFINITY : *sink * kLog2e - w_.row_max[l] * double{factor_} - keys;
      const double both = std::log2(1 + std::exp2(-std::fabs(above)));  // that the smaller adds to the larger
      if (sees && !(above > 0)) {
        row.top[l] = w_.row_max[l];
        row.log2_sum[l] = static_cast<float>(keys + both);
      } else if (sink != nullptr) {  // it is most of the row's sum, or all of it
        row_offset(*sink, row.top[l], row.log2_sum[l]);
        if (sees) row.log2_sum[l] += static_cast<float>(both);
      }
    }
  }

  // The rows of q and dout the next tile will pack.
  void prefetch_next(int head, int i0, int lanes) {
    next_q_ =
        RowPrefetch(seqlen_.template head_q<const T>(p_.q, batch_, head) + i0 * p_.q.row, p_.q.row, lanes, p_.head_dim);
    next_dout_ = RowPrefetch(seqlen_.template head_q<const T>(p_.dout, batch_, head) + i0 * p_.dout.row, p_.dout.row,
                             lanes, p_.head_dim_v);
  }

  // S^T = K·Q^T of the visible keys, and dP^T = V·dO^T.
  void scores() { multiply_visible(w_.k, w_.q.transposed, p_.head_dim, w_.s, next_q_); }
  void dout_products() { multiply_visible(w_.v, w_.dout.transposed, p_.head_dim_v, w_.dp, next_dout_); }

  __attribute__((noinline)) void apply_features(const ScoreFeatures& features, const KeySegment& segment) {
    features.template apply<kScorePitch>(w_.s + begin_ * kScorePitch, lane_end_, segment, i0_, lanes_, scale_.magnitude,
                                         w_.score_slope + begin_ * kScorePitch);
    if (features.dropout())
      features.template random_bytes<kQueries, kScorePitch>(segment, i0_, w_.random + begin_ * kScorePitch);
  }

  // S^T, dP^T -> P^T (dropped), dS^T in place, as operands. Rows of padding become zeros: they are summed too. sloped:
  // scores are no sums, and have a derivative.
  __attribute__((noinline)) void differentiate_softmax(const ScoreFeatures& features, bool sloped) {
    const int padded_end = begin_ + Dot::padded_rows(end_ - begin_);
    std::memset(w_.s + end_ * kScorePitch, 0, sizeof(float) * (padded_end - end_) * kScorePitch);
    std::memset(w_.dp + end_ * kScorePitch, 0, sizeof(float) * (padded_end - end_) * kScorePitch);
    const Vec factor = set1(factor_);
    auto at = [&](int r, int l, Vec& p, Vec& ds) __attribute__((always_inline)) {
      const int i = r * kScorePitch + l;
      p = exp2<Tr::kExpDegree>(fms(sub(load(w_.s + i), load(w_.top + l)), factor, load(w_.log2_sum + l)));
      Vec dp = load(w_.dp + i);
      Vec undropped = p;
      if constexpr (kFeatures) {
        if (features.dropout()) {
          p = keep_at_least(p, w_.random + i, features.threshold());  // scaled when dV is stored
          dp = mul(keep_at_least(dp, w_.random + i, features.threshold()), set1(features.dropout_scale()));
        }
      }
      ds = mul(undropped, sub(dp, load(w_.delta + l)));
      if constexpr (kFeatures)
        if (sloped) ds = mul(ds, load(w_.score_slope + i));
    };
    if constexpr (kStep == 1) {
      for (int r = begin_; r < end_; ++r)
#pragma GCC unroll 4
        for (int l = 0; l < lane_end_; l += kLanes) {
          Vec p, ds;
          at(r, l, p, ds);
          store(w_.s + r * kScorePitch + l, p);
          store(w_.dp + r * kScorePitch + l, ds);
        }
    } else {
      differentiate_in_words(at);
    }
  }

  // dV += P^T·dO and dK += dS^T·Q.
  void add_to_dk_dv() {
    using S = Strides<kOperandPitch, 1, kParts * kWidePitch, kWidePitch, kOperandPart, kWidePitch>;
    const int rows = end_ - begin_, query_steps = Dot::kTiles ? lane_end_ / kStep : ceil_div(lanes_, kStep);
    const auto* p = reinterpret_cast<const Word*>(w_.s) + begin_ * kOperandPitch;
    const auto* ds = reinterpret_cast<const Word*>(w_.dp) + begin_ * kOperandPitch;
    auto add = [&](const Word* weights, const Word* queries, float* dst, int d) __attribute__((always_inline)) {
      for (int c = 0; c < d; c += kPanel)
        with_vectors_of<Dot>(d - c, [&]<int kUsed>() __attribute__((always_inline)) {
          product<Dot, S, kUsed>(weights, queries + c, query_steps, dst + begin_ * kWidePitch + c, rows, FromC{});
        });
    };
    add(p, w_.dout.words(), w_.dv, p_.head_dim_v);
    add(ds, w_.q.words(), w_.dk, p_.head_dim);
  }

  // dQ += dS·K, once it is its turn. Rows are queries and lanes head dimensions, so that it costs what the queries cost
  // and accumulators need no padding. Tile registers read dS by rows of keys only: there it is dQ^T = K^T·dS^T.
  template <class Turn>
  void add_to_dq(int head, Turn wait_for_turn) {
    const std::int64_t pitch = buffers_.dq_pitch();
    float* dq = buffers_.dq(p_, seqlen_, batch_, head) + i0_ * pitch;
    const Word* keys = w_.summed_k() + begin_ / kStep * SummedKeys::kStep;
    const Word* ds = w_.ds_by_words() + begin_ / kStep * kParts * kScorePitch;
    const int steps = ceil_div(end_ - begin_, kStep);
    if constexpr (Dot::kTiles) {
      using S =
          Strides<SummedKeys::kRow, SummedKeys::kStep, kParts * kScorePitch, kPanel, SummedKeys::kPart, kScorePitch>;
      for (int l = 0; l < lane_end_; l += kPanel) {
        product<Dot, S>(keys, ds + l, steps, w_.dq, p_.head_dim, FromZero{});
        if (l == 0) wait_for_turn();
        add_transposed(dq + l * pitch, min_of(kPanel, lanes_ - l));
      }
    } else {
      using S = Strides<1, kScorePitch, SummedKeys::kStep, kPanel>;
      for (int c = 0; c < p_.head_dim; c += kPanel) {
        with_vectors_of<Dot>(p_.head_dim - c, [&]<int kUsed>() __attribute__((always_inline)) {
          product<Dot, S, kUsed>(ds, keys + c, steps, w_.dq, lanes_, FromZero{});
        });
        if (c == 0) wait_for_turn();
        for (int l = 0; l < lanes_; ++l)
          add_row(w_.dq + l * kPanel, min_of(kPanel, buffers_.dq_pitch() - c), dq + l * pitch + c);
      }
    }
  }

  void store_gradients() {
    store_gradients(p_.dk, w_.dk, p_.head_dim, p_.score.softmax_scale);
    store_gradients(p_.dv, w_.dv, p_.head_dim_v, p_.score.dropout.scale());
  }
  // Those of other parts of the queries, a row a key: added to this part's, or made of them.
  __attribute__((noinline)) void add_gradients(const float* joined) {
    const int d = round_up(p_.head_dim, kLanes), d_v = round_up(p_.head_dim_v, kLanes);
    for (int r = 0; r < keys_; ++r, joined += d + d_v) {
      add_row(joined, d, w_.dk + r * kWidePitch);
      add_row(joined + d, d_v, w_.dv + r * kWidePitch);
    }
  }
  __attribute__((noinline)) void keep_gradients(float* joined) const {
    const int d = round_up(p_.head_dim, kLanes), d_v = round_up(p_.head_dim_v, kLanes);
    for (int r = 0; r < keys_; ++r, joined += d + d_v) {
      std::memcpy(joined, w_.dk + r * kWidePitch, sizeof(float) * d);
      std::memcpy(joined + d, w_.dv + r * kWidePitch, sizeof(float) * d_v);
    }
  }

 private:
  void store_gradients(const TensorParam& tensor, const float* src, int d, float scale) {
    T* dst = seqlen_.template head_k<T>(tensor, batch_, head_kv_) + key0_ * tensor.row;
    for (int r = 0; r < keys_; ++r) store_row(src + r * kWidePitch, d, scale, dst + r * tensor.row);
  }
  static FLASHSDK_HD void add_row(const float* src, int n, float* dst) {
    for (int c = 0; c < n; c += kLanes) store(dst + c, add(load(dst + c), load(src + c)));
  }
  // w_.dq, the transpose, to rows of dQ.
  __attribute__((noinline)) void add_transposed(float* dq, int lanes) {
    alignas(64) float block[kLanes * kLanes];
    const std::int64_t pitch = buffers_.dq_pitch();
    for (int l = 0; l < lanes; l += kLanes)
      for (int c = 0; c < p_.head_dim; c += kLanes) {
        transpose(w_.dq + c * kPanel + l, kPanel, block, kLanes);
        for (int n = 0; n < min_of(kLanes, lanes - l); ++n)
          add_row(block + n * kLanes, kLanes, dq + (l + n) * pitch + c);
      }
  }

  void multiply_visible(const Word* keys, const Word* queries, int d, float* dst, RowPrefetch& next) {
    using S = Strides<kRowPitch, 1, kPanel, kScorePitch, kRowPart, Tr::kTransposedPart>;
    for (int l = 0; l < lanes_; l += kPanel)
      with_vectors_of<Dot>(lanes_ - l, [&]<int kUsed>() __attribute__((always_inline)) {
        product_of_heads<Tr, S, kUsed>(keys + begin_ * kRowPitch, queries + l / kPanel * kParts * Tr::kTransposedPart,
                                       d, dst + begin_ * kScorePitch + l, end_ - begin_, nullptr, &next);
      });
  }

  // A row that sees no key counts as zeros, whatever it holds: 0·NaN would reach the keys of the tile.
  __attribute__((noinline)) void load_operand(QueryOperand& operand, const T* src, std::int64_t stride, int d) {
    const int d_padded = Tr::padded(d), padding = lane_end_ - lanes_;
    pack_rows<Dot, kRowPitch, kRowPart>(src, stride, lanes_, d, d_padded, operand.rows);
    zero_rows<Dot, kRowPitch>(padding, operand.rows + lanes_ * kRowPitch);
    for (int l = 0; l < lanes_; ++l)
      if (w_.log2_sum[l] == INFINITY) zero_rows<Dot, kRowPitch>(1, operand.rows + l * kRowPitch);
    for (int part = 0; part < kParts; ++part) {
      const Word* rows = operand.rows + part * kRowPart;
      for (int l = 0; l < lanes_; l += kPanel)
        transpose_rows<Dot, kRowPitch, kPanel>(rows + l * kRowPitch, min_of(kPanel, lane_end_ - l), d_padded,
                                               operand.transposed + (l / kPanel * kParts + part) * Tr::kTransposedPart);
      if constexpr (kStep > 1)
        pack_row_words<Dot, kParts * kWidePitch>(reinterpret_cast<const Bf16*>(rows), kRowPitch * kStep, lane_end_,
                                                 d_padded, d_padded, operand.row_words + part * kWidePitch);
    }
  }

  // P^T and dS^T as bf16 rows (keys, queries), whose words are of queries, and dS^T once more in words of keys.
  template <class At>
  FLASHSDK_HD void differentiate_in_words(At& at) {
#if defined(__AVX512BF16__)
    auto *p_rows = reinterpret_cast<std::uint32_t*>(w_.s), *ds_rows = reinterpret_cast<std::uint32_t*>(w_.dp);
    for (int l = 0; l < lane_end_; l += kPanel)
      with_vectors_of<Dot>(lane_end_ - l, [&]<int kUsed>() __attribute__((always_inline)) {
        differentiate_in_pairs<kUsed>(at, l, p_rows, ds_rows);
      });
    const int done = begin_ + round_up(end_ - begin_, 2), steps = ceil_div(end_ - begin_, 2);
    std::memset(w_.ds_words + done / 2 * kParts * kScorePitch, 0,
                sizeof(Word) * (round_up(steps, Dot::kDepth) - steps) * kParts * kScorePitch);
#elif defined(FLASHSDK_NEON_BF16)
    auto *p_rows = reinterpret_cast<Word*>(w_.s), *ds_rows = reinterpret_cast<Word*>(w_.dp);
    for (int r = begin_; r < end_; r += 4)
      for (int l = 0; l < lane_end_; l += kLanes) {
        uint16x4_t ds_words[4];
#pragma GCC unroll 4
        for (int n = 0; n < 4; ++n) {
          Vec p = zero(), ds = zero();
          if (r + n < end_) at(r + n, l, p, ds);
          ds_words[n] = to_bf16(ds);
          const int word = (r + n) * kOperandPitch + l / kLanes;
          store_word(p_rows + word, to_bf16(p));
          store_word(ds_rows + word, ds_words[n]);
        }
        store_words(w_.ds_words + r / 4 * kScorePitch + l, ds_words);
      }
#else
    (void)at;
#endif
  }
#if defined(__AVX512BF16__)
  // Of kUsed vectors of lanes from l on.
  template <int kUsed, class At>
  FLASHSDK_HD void differentiate_in_pairs(At& at, int l, std::uint32_t* p_rows, std::uint32_t* ds_rows) {
    constexpr int kPaired = round_up(kUsed, 2);
    for (int r = begin_; r < begin_ + round_up(end_ - begin_, 2); r += 2) {
      Vec p[2][kPaired], ds[2][kPaired];
      if constexpr (kUsed < kPaired) p[0][kUsed] = p[1][kUsed] = ds[0][kUsed] = ds[1][kUsed] = zero();
#pragma GCC unroll 4
      for (int v = 0; v < kUsed; ++v) {
        at(r, l + v * kLanes, p[0][v], ds[0][v]);
        if (r + 1 < end_) {
          at(r + 1, l + v * kLanes, p[1][v], ds[1][v]);
        } else {
          p[1][v] = ds[1][v] = zero();
        }
      }
#pragma GCC unroll 4
      for (int v = 0; v < kUsed; ++v) {
        const Bf16Parts<kParts> pairs(ds[0][v], ds[1][v]);
        for (int part = 0; part < kParts; ++part)
          store_pairs(w_.ds_words + (r / 2 * kParts + part) * kScorePitch + l + v * kLanes,
                      interleave_halves(pairs.part[part]));
      }
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h)
#pragma GCC unroll 2
        for (int v = 0; v < kPaired; v += 2) {
          const Bf16Parts<kParts> p_pair(p[h][v], p[h][v + 1]), ds_pair(ds[h][v], ds[h][v + 1]);
          for (int part = 0; part < kParts; ++part) {
            const int word = (r + h) * kOperandPitch + part * kOperandPart + (l + v * kLanes) / 2;
            store_pairs(p_rows + word, p_pair.part[part]);
            store_pairs(ds_rows + word, ds_pair.part[part]);
          }
        }
    }
  }
#endif

 protected:
  const BackwardParams& p_;
  const BackwardBuffers& buffers_;
  const int batch_, head_kv_;
  const SeqlenInfo seqlen_;
  const ScaleSplit scale_;
  Scratch& w_;
  float factor_;  // of a stored score, to units of log2
  RowPrefetch next_q_, next_dout_;
  int key0_ = 0, keys_ = 0;                // this job's keys
  int i0_ = 0, lanes_ = 0, lane_end_ = 0;  // this tile's queries, and with lanes of padding
  int begin_ = 0, end_ = 0;                // its visible keys, relative to key0_
};

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
