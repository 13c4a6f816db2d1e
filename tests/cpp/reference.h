// Attention, forward and backward, as docs/semantics.md defines it: double precision, one element at a time.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <variant>
#include <vector>

#include "common/philox.h"
#include "flashsdk/attention.h"
#include "host_tensor.h"

namespace flashsdk::testing {

inline bool band_sees(const Band& band, std::int64_t seqlen_q, std::int64_t seqlen_k, std::int64_t i, std::int64_t j) {
  const std::int64_t distance = j - i - (band.alignment == Alignment::kTopLeft ? 0 : seqlen_k - seqlen_q);
  return (!band.left || distance >= -*band.left) && (!band.right || distance <= *band.right);
}

inline bool lists_block(const BlockLists& lists, std::int64_t b, std::int64_t h, std::int64_t line,
                        std::int64_t block) {
  if (!lists.offsets.given()) return false;
  if (lists.offsets.shape[0] == 1) b = 0;
  if (lists.offsets.shape[1] == 1) h = 0;
  const auto begin = static_cast<std::int64_t>(load(lists.offsets, {b, h, line}));
  const auto end = static_cast<std::int64_t>(load(lists.offsets, {b, h, line + 1}));
  for (std::int64_t n = begin; n < end; ++n) {
    if (load(lists.indices, Index{n}) == block) return true;
  }
  return false;
}

inline bool mask_sees(const Mask& mask, std::int64_t b, std::int64_t h, std::int64_t seqlen_q, std::int64_t seqlen_k,
                      std::int64_t i, std::int64_t j) {
  if (const auto* band = std::get_if<Band>(&mask)) return band_sees(*band, seqlen_q, seqlen_k, i, j);
  if (const auto* blocks = std::get_if<BlockMask>(&mask)) {
    const std::int64_t row = i / blocks->block_q, col = j / blocks->block_k;
    if (lists_block(blocks->row_full, b, h, row, col)) return true;
    return lists_block(blocks->row_partial, b, h, row, col) &&
           (!blocks->band || band_sees(*blocks->band, seqlen_q, seqlen_k, i, j));
  }
  return true;
}

// What a policy of one's own does, by head, query and key: what it hides beside the mask, the score that it makes of
// one that has all features, and its derivative.
struct OwnScores {
  std::function<bool(std::int64_t h, std::int64_t i, std::int64_t j)> sees;
  std::function<double(double s, std::int64_t h, std::int64_t i, std::int64_t j)> score, slope;
};

// Results in row-major order of the tensors' shapes. The backward needs dout, and dlse where it is given.
class Reference {
 public:
  std::vector<double> out, lse, dq, dk, dv;

  explicit Reference(const AttentionArgs& args, TensorView dout = {}, TensorView dlse = {}, OwnScores own = {})
      : a_(args),
        own_(std::move(own)),
        dlse_(dlse),
        packed_(args.cu_seqlens_q.given()),
        heads_(a_.q.shape[a_.q.rank - 2]),
        heads_kv_(a_.k.shape[a_.k.rank - 2]),
        d_(a_.q.shape[a_.q.rank - 1]),
        dv_(a_.v.shape[a_.v.rank - 1]),
        scale_(a_.softmax_scale ? *a_.softmax_scale : 1 / std::sqrt(static_cast<double>(d_))),
        q_(dense(a_.q)),
        k_(dense(a_.k)),
        v_(dense(a_.v)),
        do_(dense(dout)) {
    out.assign(a_.q.numel() / std::max<std::int64_t>(d_, 1) * dv_, 0);
    lse.assign(a_.q.numel() / std::max<std::int64_t>(d_, 1), -INFINITY);
    dq.assign(a_.q.numel(), 0);
    dk.assign(a_.k.numel(), 0);
    dv.assign(a_.v.numel(), 0);
    dropout_.threshold = static_cast<int>(std::nearbyint(a_.dropout_p * 256.));
    dropout_.seed = a_.seed;
    dropout_.offset = a_.offset;
    dropout_.state = static_cast<const std::uint64_t*>(a_.seed_tensor.data);
    dropout_.heads_each = a_.seed_tensor.rank == 2 ? 0 : static_cast<int>(heads_);
    dropout_.state_batch = a_.seed_tensor.rank == 2 ? a_.seed_tensor.stride[0] : 0;
    const std::int64_t batch = packed_ ? a_.cu_seqlens_q.shape[0] - 1 : a_.q.shape[0];
    for (std::int64_t b = 0; b < batch; ++b) sequence(b);
  }

 private:
  struct Score {
    double value, slope;  // the final score and its derivative by softmax_scale·q·k
    bool visible;
  };

  void sequence(std::int64_t b) {
    b_ = b;
    first_q_ = packed_ ? cumulative(a_.cu_seqlens_q, b) : 0;
    first_k_ = packed_ ? cumulative(a_.cu_seqlens_k, b) : 0;
    seqlen_q_ = packed_ ? cumulative(a_.cu_seqlens_q, b + 1) - first_q_ : a_.q.shape[1];
    seqlen_k_ = packed_ ? cumulative(a_.cu_seqlens_k, b + 1) - first_k_ : a_.k.shape[1];
    for (std::int64_t h = 0; h < heads_; ++h) {
      for (std::int64_t i = 0; i < seqlen_q_; ++i) query(h, i);
    }
  }

  void query(std::int64_t h, std::int64_t i) {
    const std::int64_t g = h / (heads_ / heads_kv_);
    std::vector<Score> s(seqlen_k_);
    double highest = -INFINITY, sum = 0;
    for (std::int64_t j = 0; j < seqlen_k_; ++j) {
      s[j] = score(h, g, i, j);
      if (s[j].visible) highest = std::max(highest, s[j].value);
    }
    if (highest == -INFINITY) return;  // sees no key: out = 0, lse = -inf, no gradient
    for (const Score& x : s) sum += x.visible ? std::exp(x.value - highest) : 0;
    lse[row_at(h, i)] = highest + std::log(sum);

    const auto rng = flashsdk::DropoutRng(dropout_, static_cast<int>(b_)).of(static_cast<int>(h));
    std::vector<double> p(seqlen_k_, 0), factor(seqlen_k_, 0), dp(seqlen_k_, 0);
    double delta = 0;
    for (std::int64_t j = 0; j < seqlen_k_; ++j) {
      if (!s[j].visible) continue;
      p[j] = std::exp(s[j].value - highest) / sum;
      const bool keep =
          dropout_.threshold == 0 || rng.keep(static_cast<int>(i), static_cast<int>(j), dropout_.threshold);
      factor[j] = keep ? 256. / (256 - dropout_.threshold) : 0;
      for (std::int64_t c = 0; c < dv_; ++c) {
        out[query_at(h, i, c, dv_)] += p[j] * factor[j] * v_[key_at(g, j, c, dv_)];
        if (!do_.empty()) dp[j] += factor[j] * do_[query_at(h, i, c, dv_)] * v_[key_at(g, j, c, dv_)];
      }
      delta += p[j] * dp[j];
    }
    if (do_.empty()) return;
    if (dlse_.given()) delta -= packed_ ? load(dlse_, {h, first_q_ + i}) : load(dlse_, {b_, h, i});
    for (std::int64_t j = 0; j < seqlen_k_; ++j) {
      const double ds = p[j] * (dp[j] - delta) * s[j].slope * scale_;
      for (std::int64_t c = 0; c < d_; ++c) {
        dq[query_at(h, i, c, d_)] += ds * k_[key_at(g, j, c, d_)];
        dk[key_at(g, j, c, d_)] += ds * q_[query_at(h, i, c, d_)];
      }
      for (std::int64_t c = 0; c < dv_; ++c) {
        dv[key_at(g, j, c, dv_)] += p[j] * factor[j] * do_[query_at(h, i, c, dv_)];
      }
    }
  }

  Score score(std::int64_t h, std::int64_t g, std::int64_t i, std::int64_t j) const {
    Score s{0, 1, mask_sees(a_.mask, b_, h, seqlen_q_, seqlen_k_, i, j) && (!own_.sees || own_.sees(h, i, j))};
    if (!s.visible) return s;
    for (std::int64_t c = 0; c < d_; ++c) s.value += q_[query_at(h, i, c, d_)] * k_[key_at(g, j, c, d_)];
    s.value *= scale_;
    if (a_.softcap > 0) {
      const double t = std::tanh(s.value / a_.softcap);
      s.value = a_.softcap * t;
      s.slope = 1 - t * t;
    }
    if (a_.bias.given()) {
      const double bias =
          load(a_.bias, {b_ % a_.bias.shape[0], h % a_.bias.shape[1], i % a_.bias.shape[2], j % a_.bias.shape[3]});
      if (a_.bias.dtype == DType::kBool) {
        s.visible = bias != 0;
      } else {
        s.value += bias;
      }
    }
    if (a_.alibi_slopes.given()) {
      const double slope = a_.alibi_slopes.rank == 1 ? load(a_.alibi_slopes, Index{h}) : load(a_.alibi_slopes, {b_, h});
      s.value -= slope * static_cast<double>(std::abs(i + seqlen_k_ - seqlen_q_ - j));
    }
    if (own_.slope) s.slope *= own_.slope(s.value, h, i, j);
    if (own_.score) s.value = own_.score(s.value, h, i, j);
    s.visible = s.visible && s.value != -INFINITY;
    return s;
  }

  static std::int64_t cumulative(const TensorView& cu, std::int64_t n) {
    return static_cast<std::int64_t>(load(cu, Index{n}));
  }
  std::int64_t query_at(std::int64_t h, std::int64_t i, std::int64_t c, std::int64_t d) const {
    return (((packed_ ? first_q_ : b_ * seqlen_q_) + i) * heads_ + h) * d + c;
  }
  std::int64_t key_at(std::int64_t g, std::int64_t j, std::int64_t c, std::int64_t d) const {
    return (((packed_ ? first_k_ : b_ * seqlen_k_) + j) * heads_kv_ + g) * d + c;
  }
  std::int64_t row_at(std::int64_t h, std::int64_t i) const {
    return packed_ ? h * a_.q.shape[0] + first_q_ + i : (b_ * heads_ + h) * seqlen_q_ + i;
  }

  const AttentionArgs& a_;
  OwnScores own_;
  TensorView dlse_;
  bool packed_;
  std::int64_t heads_, heads_kv_, d_, dv_;
  double scale_;
  std::vector<double> q_, k_, v_, do_;  // row-major
  flashsdk::DropoutParam dropout_;
  std::int64_t b_ = 0, first_q_ = 0, first_k_ = 0, seqlen_q_ = 0, seqlen_k_ = 0;
};

}  // namespace flashsdk::testing
