// One job of the forward pass, step by step, for any mask: what cpu/forward.h calls as it walks the visited tiles.
#pragma once

#include "cpu/parts.h"
#include "cpu/scores.h"

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

// A packed tile of keys, gathered from as many visited tiles as fit: small layout blocks fill it too.
template <int kKeys, int kCut>
struct KeyTile {
  KeySegment segment[kKeys / 16 + 1];
  int num_segments, rows;
  bool partial;  // some segment is

  // Drops keys outside [begin, end), which no query of the job sees. The cut is as far as jobs of any size would cut: a
  // product on tile registers sums a step of kCut keys in an order of its own.
  FLASHSDK_HD void trim(int begin, int end) {
    if (num_segments != 1 || !partial) return;
    KeySegment& s = segment[0];
    const int skip = max_of(0, begin - s.key) & -kCut;
    const int count = min_of(s.key + s.count, end) - (s.key + skip);
    s.key += skip;
    s.count = rows = max_of(0, count);
  }

  // Takes tiles from the walk, whose next tile is in `tile` while `more`; false when nothing is left.
  FLASHSDK_HD bool gather(TileWalk& walk, TileRef& tile, bool& more, int tile_n, int seqlen_k) {
    num_segments = rows = 0;
    partial = false;
    while (more && rows + tile_n <= kKeys) {
      const int key = tile.index * tile_n, count = min_of(tile_n, seqlen_k - key);
      KeySegment* last = segment + num_segments - 1;
      if (num_segments > 0 && last->partial == tile.partial && last->key + last->count == key) {
        last->count += count;
      } else {
        segment[num_segments++] = {rows, key, count, tile.partial};
      }
      rows += count;
      partial |= tile.partial;
      more = walk.next(tile);
    }
    return rows > 0;
  }
};

// Steps are not inlined: all mask policies share one copy of each.
template <class T, int kHeadDim, bool kFeatures>
class ForwardTile {
 protected:
  using Tr = Traits<T, kHeadDim>;
  using Dot = typename Tr::Dot;
  using Word = typename Tr::Word;
  static constexpr int kStep = Dot::kStep, kParts = Dot::kParts, kKeys = Tr::kKeys;
  static constexpr int kRowPart = Tr::kRowPart, kRowPitch = Tr::kRowPitch, kWidePitch = Tr::kWidePitch;
  static constexpr int kPaddedKeys = kKeys + Dot::kMaxRowPadding, kPanels = Tr::kForwardQueries / kPanel;
  using SummedKeys = typename Tr::template SummedKeys<kKeys>;
  using KeyTile = cpu::FLASHSDK_ISA_NS::KeyTile<kKeys, Tr::kCut>;

  // One panel of queries: its operand and its running state.
  struct Panel {
    alignas(64) Word q[kParts * Tr::kTransposedPart];  // Q^T (head_dim, lanes)
    alignas(64) float o[kHeadDim * kPanel];            // O^T (head_dim_v, lanes), not normalised
    Vec max[kVecs], sum[kVecs];
    LaneKeys<kPanel> keys;
    int i0, lanes;
  };
  struct Scratch {
    Panel panel[kPanels];
    alignas(64) Word k[kPaddedKeys * kRowPitch];  // K (keys, head_dim)
    alignas(64) Word v[SummedKeys::kWords];       // V (keys, head_dim_v) in pairs, or its transpose
    alignas(64) float s[kPaddedKeys * kPanel];    // S^T (keys, lanes), then P^T
    alignas(64) Word rows[kPanel * kRowPitch];
    alignas(64) float out[kPanel * kWidePitch];
    alignas(64) std::uint8_t random[kFeatures ? kKeys * kPanel : 1];
  };

  // What earlier parts of the keys came to (cpu/parts.h): per row O, not normalised, and behind it m and l.
  struct Joined {
    int part = 0, parts = 1;
    float* rows = nullptr;
  };
  static int joined_floats(const ForwardParams& p) { return round_up(p.head_dim_v, kLanes) + kLanes; }

  ForwardTile(const ForwardParams& p, int batch, int head, Scratch& scratch)
      : p_(p),
        batch_(batch),
        head_(head),
        head_kv_(head / p.heads_per_group()),
        seqlen_(p, batch),
        features_(p.score, seqlen_, batch, head),
        scale_(p.score.softmax_scale * p.k_descale.of(batch, head_kv_)),
        w_(scratch) {
    factor_ = static_cast<float>(unit() * kLog2e);
  }

  __attribute__((noinline)) void begin_panel(Panel& panel, int i0, int i1) {
    panel.i0 = i0;
    panel.lanes = min_of(kPanel, i1 - i0);
    const T* q = seqlen_.template head_q<const T>(p_.q, batch_, head_) + i0 * p_.q.row;
    const int d_padded = Tr::padded(p_.head_dim);
    pack_rows<Dot, kRowPitch, kRowPart>(q, p_.q.row, panel.lanes, p_.head_dim, d_padded, w_.rows);
    const int rows = round_up(panel.lanes, kLanes);  // few queries do not pay for a whole panel
    zero_rows<Dot, kRowPitch>(rows - panel.lanes, w_.rows + panel.lanes * kRowPitch);
    for (int part = 0; part < kParts; ++part) {
      Word* transposed = panel.q + part * Tr::kTransposedPart;
      transpose_rows<Dot, kRowPitch, kPanel>(w_.rows + part * kRowPart, rows, d_padded, transposed);
      scale_operand(transposed, scale_.q_factor, d_padded / kStep * kPanel);
    }
    std::memset(panel.o, 0, sizeof(float) * Tr::padded(p_.head_dim_v) * kPanel);
    for (int v = 0; v < kVecs; ++v) {
      panel.max[v] = set1(-INFINITY);
      panel.sum[v] = zero();
    }
  }

  // Calls f<E>() with the type that keys and values have in memory.
  template <class F>
  FLASHSDK_HD void with_key_type(F f) const {
    if constexpr (sizeof(T) == 2)
      if (p_.dtype_kv == DType::kFloat8E4M3) return f.template operator()<Fp8>();
    f.template operator()<T>();
  }
  // Where those of this head lie, in k or in v.
  template <class E>
  FLASHSDK_HD KeyRows<const E> rows_of(const TensorParam& t) const {
    return seqlen_.template keys<const E>(p_, t, batch_, head_kv_);
  }

  __attribute__((noinline)) void pack(const KeyTile& tile) {
    with_key_type([&]<class E>() {
      const KeyRows<const E> k = rows_of<E>(p_.k), v = rows_of<E>(p_.v);
      for (int n = 0; n < tile.num_segments; ++n) {
        const KeySegment& s = tile.segment[n];
        with_rows(k, p_.head_dim, s, [&](const auto* first, std::int64_t stride, int row, int count) {
          pack_rows<Dot, kRowPitch, kRowPart>(first, stride, count, p_.head_dim, Tr::padded(p_.head_dim),
                                              w_.k + row * kRowPitch);
        });
        with_rows(v, p_.head_dim_v, s, [&](const auto* first, std::int64_t stride, int row, int count) {
          pack_values(first, stride, count, w_.v + row / kStep * SummedKeys::kStep);
        });
      }
    });
    if constexpr (Dot::kTiles) zero_to_whole_steps(tile.rows);
    // Padding rows repeat the last key: its score cannot raise the maximum.
    for (int r = tile.rows; r < Dot::padded_rows(tile.rows); ++r)
      std::memcpy(w_.k + r * kRowPitch, w_.k + (tile.rows - 1) * kRowPitch, sizeof(Word) * kRowPitch);
  }

  // K and V rows the next tile will pack.
  void prefetch_next(int key, int count) {
    with_key_type([&]<class E>() {
      const KeyRows<const E> k = rows_of<E>(p_.k), v = rows_of<E>(p_.v);
      const int at_once = min_of(count, k.run(key));  // of pages the first
      next_k_ = RowPrefetch(k.at(key), p_.k.row, at_once, p_.head_dim);
      next_v_ = RowPrefetch(v.at(key), p_.v.row, at_once, p_.head_dim_v);
    });
  }

  // S^T of the tile's rows [begin, end) into the scratch, and its row maximum, which starts from the panel's.
  template <int kUsed>
  void scores(const Panel& panel, int begin, int end, Vec* maximum) {
    for (int v = 0; v < kUsed; ++v) maximum[v] = panel.max[v];
    product_of_heads<Tr, Strides<kRowPitch, 1, kPanel, kPanel, kRowPart, Tr::kTransposedPart>, kUsed>(
        w_.k + begin * kRowPitch, panel.q, p_.head_dim, w_.s + begin * kPanel, end - begin, maximum, &next_k_);
  }

  template <int kUsed>
  __attribute__((noinline)) void apply_features(const Panel& panel, const KeySegment& segment) {
    features_.template apply<kPanel>(w_.s + segment.row * kPanel, kUsed * kLanes, segment, panel.i0, panel.lanes,
                                     scale_.magnitude, nullptr);
    if (features_.dropout())
      features_.template random_bytes<kUsed * kLanes, kPanel>(segment, panel.i0, w_.random + segment.row * kPanel);
  }

  template <int kUsed>
  __attribute__((noinline)) void row_maximum(const Panel& panel, int begin, int end, Vec* maximum) const {
    for (int v = 0; v < kUsed; ++v) {
      Vec m = panel.max[v];
      for (int r = begin; r < end; ++r) m = max(m, load(w_.s + r * kPanel + v * kLanes));
      maximum[v] = m;
    }
  }

  // The online softmax's step with the scores of rows [begin, end) and their maximum, and O^T += V^T·P^T.
  template <int kUsed>
  __attribute__((noinline)) void accumulate(Panel& panel, int begin, int end, const Vec* maximum) {
    // m' and exp(m - m'); a row that has seen no key yet takes m' = 0 instead of -inf.
    Vec rescale[kUsed], shift[kUsed];
    for (int v = 0; v < kUsed; ++v) {
      const Vec max = Dot::kTiles ? raised(panel.max[v], maximum[v]) : maximum[v];
      shift[v] = finite_or_zero(max);
      rescale[v] = exp2<5>(mul(sub(panel.max[v], shift[v]), set1(factor_)));
      panel.max[v] = max;
      panel.sum[v] = mul(panel.sum[v], rescale[v]);
    }
    exponentiate<kUsed>(panel, begin, end, shift);
    using S = Strides<SummedKeys::kRow, SummedKeys::kStep, kParts * kPanel, kPanel, SummedKeys::kPart, kPanel>;
    product<Dot, S, kUsed>(w_.v + begin / kStep * SummedKeys::kStep,
                           reinterpret_cast<const Word*>(w_.s + begin * kPanel), ceil_div(end - begin, kStep), panel.o,
                           p_.head_dim_v, FromScaledC{rescale}, nullptr, &next_v_);
  }

  // O = O^T / l and lse = m + log l.
  __attribute__((noinline)) void finish_panel(const Panel& panel) {
    alignas(64) float max[kPanel], sum[kPanel];
    for (int v = 0; v < kVecs; ++v) {
      store(max + v * kLanes, panel.max[v]);
      store(sum + v * kLanes, panel.sum[v]);
    }
    const int d = round_up(p_.head_dim_v, kLanes);
    for (int c = 0; c < d; c += kLanes)
      for (int l = 0; l < panel.lanes; l += kLanes)
        transpose(panel.o + c * kPanel + l, kPanel, w_.out + l * kWidePitch + c, kWidePitch);
    for (int l = 0; l < panel.lanes; ++l) finish_row(panel.i0 + l, w_.out + l * kWidePitch, max[l], sum[l]);
  }
  // A row that sees no key has l = 0: out = 0, lse = -inf. Dropout's scale comes last: a P that is rounded to bf16
  // loses nothing to it.
  void finish_row(int i, float* o, float max, float sum) const {
    if (joined_.parts > 1) {
      float* joined = joined_.rows + std::int64_t{i} * joined_floats(p_);
      if (joined_.part > 0) join(joined, o, max, sum);
      if (joined_.part + 1 < joined_.parts) return store_joined(o, max, sum, joined);
    }
    T* out = seqlen_.template head_q<T>(p_.out, batch_, head_) + i * p_.out.row;
    float* lse = seqlen_.rows(p_.lse, batch_, head_) + i * p_.lse.row;
    const float* sink = p_.sink.of(head_, i);
    const Total total = sink == nullptr ? total_of(max, sum) : total_with(*sink, max, sum);
    store_row(o, p_.head_dim_v, total.scale, out);
    *lse = total.lse;
  }

 private:
  // What O is multiplied with in the end, and the lse.
  struct Total {
    float scale, lse;
  };
  Total total_of(float max, float sum) const {
    if (sum == 0.f) return {0.f, -INFINITY};
    return {value_scale() / sum, saturate(max * unit() + std::log(double{sum}))};
  }
  float value_scale() const { return p_.score.dropout.scale() * p_.v_descale.of(batch_, head_kv_); }
  // With a logit more, which has no value.
  __attribute__((noinline)) Total total_with(float sink, float max, float sum) const {
    if (sum == 0.f) return {0.f, sink};
    const double highest_key = max * unit(), highest = highest_key > sink ? highest_key : sink;
    const double of_keys = std::exp(highest_key - highest);
    const double total = sum * of_keys + std::exp(sink - highest);
    return {static_cast<float>(value_scale() * of_keys / total), saturate(highest + std::log(total))};
  }

  // The online softmax's step with what a part has found: o, max and sum become those of all parts up to it.
  __attribute__((noinline)) void join(const float* before, float* o, float& max, float& sum) const {
    const int d = round_up(p_.head_dim_v, kLanes);
    const Vec old_max = set1(before[d]), new_max = FLASHSDK_ISA_NS::max(old_max, set1(max)), factor = set1(factor_);
    const Vec shift = finite_or_zero(new_max);
    const Vec rescale = exp2<5>(mul(sub(old_max, shift), factor));
    const Vec scale = exp2<5>(mul(sub(set1(max), shift), factor));
    for (int c = 0; c < d; c += kLanes) store(o + c, fma(load(before + c), rescale, mul(load(o + c), scale)));
    alignas(64) float lane[3][kLanes];
    store(lane[0], new_max);
    store(lane[1], rescale);
    store(lane[2], scale);
    max = lane[0][0];
    sum = before[d + 1] * lane[1][0] + sum * lane[2][0];
  }
  void store_joined(const float* o, float max, float sum, float* joined) const {
    const int d = round_up(p_.head_dim_v, kLanes);
    std::memcpy(joined, o, sizeof(float) * d);
    joined[d] = max;
    joined[d + 1] = sum;
  }

  // Tile registers cannot rescale O as they load it: the maximum stays while P comes to no more than 2^8, which neither
  // bf16 nor the sum minds.
  Vec raised(Vec old_max, Vec new_max) const {
    return select_below(mul(sub(new_max, old_max), set1(factor_)), 8.f, old_max, new_max);
  }

  // Calls f(first row, stride, row of the tile, rows) for the keys of a segment: at once where they are a stride apart.
  // Those of several pages are copied a panel at a time, which is a whole number of steps of every product. Those of 8
  // bits are as well, where products take words of 16.
  template <class E, class F>
  void with_rows(const KeyRows<const E>& keys, int d, const KeySegment& s, F f) {
    constexpr bool kWidened = !std::is_same_v<E, T> && kStep > 1;
    if (!kWidened && keys.run(s.key) >= s.count) return f(keys.at(s.key), keys.stride(), s.row, s.count);
    static_assert(kPanel % Tr::kCut == 0);
    using Copied = std::conditional_t<kWidened, T, E>;
    auto* copy = reinterpret_cast<Copied*>(w_.out);  // free until the last tile is done
    for (int r = 0; r < s.count; r += kPanel) {
      const int count = min_of(kPanel, s.count - r);
      for (int n = 0; n < count; ++n) {
        const E* row = keys.at(s.key + r + n);
        if constexpr (kWidened) {
          widen_row(row, d, copy + n * d);
        } else {
          std::memcpy(copy + n * d, row, sizeof(E) * d);
        }
      }
      f(static_cast<const Copied*>(copy), d, s.row + r, count);
    }
  }

  // V for the product that sums over its rows; two parts by way of packed rows.
  template <class E>
  void pack_values(const E* src, std::int64_t stride, int rows, Word* dst) {
    const int d = p_.head_dim_v, d_padded = Tr::padded(d);
    if constexpr (kParts == 1) {
      pack_summed_rows<Dot, SummedKeys::kRow, SummedKeys::kStep>(src, stride, rows, d, d_padded, dst);
    } else {
      for (int r = 0; r < rows; r += kPanel) {
        const int count = min_of(kPanel, rows - r);
        pack_rows<Dot, kRowPitch, kRowPart>(src + r * stride, stride, count, d, d_padded, w_.rows);
        pack_summed_parts<Dot, SummedKeys, kRowPitch, kRowPart>(w_.rows, count, d, d_padded, dst + r / kStep);
      }
    }
  }

  // Transposed V has garbage behind its last key: P is 0 there, which a NaN would survive.
  void zero_to_whole_steps(int rows) {
    const int first = ceil_div(rows, kStep), end = round_up(first, Dot::kDepth);
    if (first == end) return;
    for (int c = 0; c < kParts * Tr::padded(p_.head_dim_v); ++c)
      std::memset(w_.v + c * SummedKeys::kPart + first, 0, sizeof(Word) * (end - first));
  }

  double unit() const { return scale_.template to_natural<kFeatures>(); }
  // An lse of -inf says that no key was seen: one out of float32's range must not.
  static float saturate(double lse) {
    return static_cast<float>(lse < -FLT_MAX ? -FLT_MAX : (lse > FLT_MAX ? FLT_MAX : lse));
  }

  // P^T = exp(S^T - m') in place, in the layout the second product reads, and its sum.
  template <int kUsed>
  void exponentiate(Panel& panel, int begin, int end, const Vec* shift) {
    Vec sum[kUsed];
    for (int v = 0; v < kUsed; ++v) sum[v] = zero();
    const Vec factor = set1(factor_);
    // The difference first: exactly 1 at the maximum, however large, where s·factor and m'·factor round apart.
    auto probability = [&](int r, int v) __attribute__((always_inline)) {
      Vec e = exp2<Tr::kExpDegree>(mul(sub(load(w_.s + r * kPanel + v * kLanes), shift[v]), factor));
      sum[v] = add(sum[v], e);
      if constexpr (kFeatures) e = drop(e, r, v);
      return e;
    };
    if constexpr (kStep == 1) {
      for (int r = begin; r < end; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kUsed; ++v) store(w_.s + r * kPanel + v * kLanes, probability(r, v));
    } else {
#if defined(__AVX512BF16__)
      auto* pairs = reinterpret_cast<std::uint32_t*>(w_.s + begin * kPanel);
      for (int r = begin; r < end; r += 2, pairs += kParts * kPanel)
#pragma GCC unroll 4
        for (int v = 0; v < kUsed; ++v) {
          Vec even = probability(r, v), odd = r + 1 < end ? probability(r + 1, v) : zero();
          const Bf16Parts<kParts> p(even, odd);
          for (int part = 0; part < kParts; ++part)
            store_pairs(pairs + part * kPanel + v * kLanes, interleave_halves(p.part[part]));
        }
      const int steps = ceil_div(end - begin, 2);
      std::memset(pairs, 0, sizeof(Word) * (round_up(steps, Dot::kDepth) - steps) * kParts * kPanel);
#elif defined(FLASHSDK_NEON_BF16)
      Word* words = reinterpret_cast<Word*>(w_.s + begin * kPanel);
      for (int r = begin; r < end; r += 4, words += kPanel) {
        // The words of a vector lie where scores of two vectors have: all are made before the first is stored.
        uint16x4_t p[kUsed][4];
#pragma GCC unroll 4
        for (int v = 0; v < kUsed; ++v)
#pragma GCC unroll 4
          for (int n = 0; n < 4; ++n) p[v][n] = to_bf16(r + n < end ? probability(r + n, v) : zero());
#pragma GCC unroll 4
        for (int v = 0; v < kUsed; ++v) store_words(words + v * kLanes, p[v]);
      }
#endif
    }
    for (int v = 0; v < kUsed; ++v) panel.sum[v] = add(panel.sum[v], sum[v]);
  }

  FLASHSDK_HD Vec drop(Vec e, int r, int v) const {
    return features_.dropout() ? keep_at_least(e, w_.random + r * kPanel + v * kLanes, features_.threshold()) : e;
  }

 protected:
  const ForwardParams& p_;
  const int batch_, head_, head_kv_;
  const SeqlenInfo seqlen_;
  const ScoreFeatures features_;
  const ScaleSplit scale_;
  Scratch& w_;
  float factor_;  // of a stored score, to units of log2
  RowPrefetch next_k_, next_v_;
  Joined joined_;
};

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
