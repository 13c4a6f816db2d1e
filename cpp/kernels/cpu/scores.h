// What happens to a tile of raw scores S^T (keys, queries in kWidth lanes, rows kPitch apart) beside the exponential:
// rare score features, the mask, the row maximum, and dropout's random bytes. Off features are compiled out by callers.
#pragma once

#include <cfloat>

#include "common/philox.h"
#include "common/score_mod.h"
#include "cpu/traits.h"

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

// Keys [key, key + count) of the sequence in rows [row, row + count) of a tile.
struct KeySegment {
  int row, key, count;
  bool partial;
};

// The scale multiplies scores inside the exponential: (s - max)·magnitude·log2(e). Its sign goes into Q, and so does a
// scale of zero, for which masked scores, -inf·0, would be NaN. Of a huge scale Q takes 2^32: bf16 dot products flush
// terms below 2^-126, which such a scale would show, and the rest times log2(e) is no infinity.
struct ScaleSplit {
  float q_factor, magnitude;
  FLASHSDK_HD explicit ScaleSplit(float scale) : q_factor(1.f), magnitude(std::fabs(scale)) {
    if (magnitude > 0x1p100f) {
      q_factor = 0x1p32f;
      magnitude /= q_factor;
    }
    if (scale < 0.f) q_factor = -q_factor;
    if (scale == 0.f) q_factor = 0.f, magnitude = 1.f;
  }
};

// The interval of keys each lane sees, where the policy knows it.
template <int kWidth>
struct LaneKeys {
  alignas(64) std::int32_t begin[kWidth], end[kWidth];
  int first, last_end;  // of all lanes

  template <class Policy>
  void set(const Policy& policy, int i0, int lanes) {
    first = 0x7FFFFFFF;
    last_end = 0;
    for (int l = 0; l < kWidth; ++l) {
      KeyRange keys = policy.keys_of(i0 + min_of(l, lanes - 1));
      begin[l] = keys.begin;
      end[l] = keys.end;
      if (keys.begin < keys.end) {
        first = min_of(first, keys.begin);
        last_end = max_of(last_end, keys.end);
      }
    }
  }
};

// -inf where query i0 + l does not see the key.
template <int kWidth, int kPitch, class Policy, int kLanesHeld>
void mask_scores(float* s, const KeySegment& segment, const Policy& policy, const LaneKeys<kLanesHeld>& lane_keys,
                 int i0, int lanes) {
  static_assert(kWidth <= kLanesHeld);
  for (int r = 0; r < segment.count; ++r, s += kPitch) {
    const int j = segment.key + r;
    if constexpr (kHasKeyRange<Policy>) {
      for (int l = 0; l < kWidth; l += kLanes)
        store(s + l, mask_keys(load(s + l), load_int(lane_keys.begin + l), load_int(lane_keys.end + l), j));
    } else {
      // Lanes of padding are as blind as the last query: a key that nobody sees may hold NaN.
      for (int l = 0; l < kWidth; ++l)
        if (!policy.allowed(i0 + min_of(l, lanes - 1), j)) s[l] = -INFINITY;
    }
  }
}

// The score features of one batch and head.
class ScoreFeatures {
 public:
  FLASHSDK_HD ScoreFeatures(const ScoreParam& p, const SeqlenInfo& seqlen, int batch, int head, int num_heads)
      // Below the normal numbers its reciprocal may be infinite; there tanh is ±1 and the score next to 0 anyway.
      : softcap_(p.softcap > 0.f && p.softcap < FLT_MIN ? FLT_MIN : p.softcap),
        slope_(alibi_slope(p, batch, head)),
        shift_(seqlen.seqlen_k - seqlen.seqlen_q),
        bias_(p.bias),
        bias_offset_(batch * p.bias.batch + head * p.bias.head),
        threshold_(p.dropout.threshold),
        dropout_scale_(p.dropout.scale()),
        rng_(p.dropout, batch * num_heads + head) {}

  bool softcap() const { return softcap_ > 0.f; }
  bool dropout() const { return threshold_ > 0; }
  int threshold() const { return threshold_; }
  float dropout_scale() const { return dropout_scale_; }

  // Raw scores times `scale` become final scores. With `softcap_slope`, writes d(capped)/d(scaled).
  //
  // A bias of -inf, and a boolean one, hides the key whatever its score is, NaN too; from lanes of padding every key is
  // hidden. A finite bias never does: the sum stays finite.
  template <int kWidth, int kPitch>
  void apply(float* s, const KeySegment& segment, int i0, int lanes, float scale, float* softcap_slope) const {
    alignas(64) float bias[kWidth], query[kWidth];
    for (int l = 0; l < kWidth; ++l) {
      query[l] = static_cast<float>(i0 + l + shift_);
      bias[l] = -INFINITY;
    }
    for (int r = 0; r < segment.count; ++r) {
      const int j = segment.key + r;
      if (bias_.ptr != nullptr) load_bias(i0, lanes, j, bias);
      for (int l = 0; l < kWidth; l += kLanes) {
        float* at = s + r * kPitch + l;
        Vec x = mul(load(at), set1(scale));
        if (softcap_ > 0.f) {
          Vec th = tanh(mul(x, set1(1.f / softcap_)));
          if (softcap_slope != nullptr) store(softcap_slope + r * kPitch + l, sub(set1(1.f), mul(th, th)));
          x = mul(th, set1(softcap_));
        }
        if (bias_.ptr != nullptr) {
          const Vec b = load(bias + l);
          x = select_below(b, -FLT_MAX, set1(-INFINITY), max(set1(-FLT_MAX), add(x, b)));
        }
        if (slope_ != 0.f) {
          Vec distance = sub(load(query + l), set1(static_cast<float>(j)));
          x = sub(x, mul(set1(slope_), max(distance, sub(zero(), distance))));
        }
        store(at, x);
      }
    }
  }

  // bytes[r][l] decides query i0 + l and key segment.key + r. The generator is called for all rows at once, which the
  // compiler turns into vectors: one call yields the bytes of rows r and r + 8 for columns c and c + 1 in each word.
  template <int kWidth, int kPitch>
  void random_bytes(const KeySegment& segment, int i0, std::uint8_t* bytes) const {
    constexpr int kGroups = ceil_div(kWidth, 16), kCalls = 8 * kGroups;
    const int row0 = i0 / 16 * 16, key_end = segment.key + segment.count;
    alignas(64) std::uint32_t word[4][kCalls];
    for (int col0 = segment.key / 32 * 32; col0 < key_end; col0 += 32)
      for (int pair = 0; pair < 4; ++pair) {
        const DropoutRng rng = rng_;
        for (int l = 0; l < kCalls; ++l) {
          const PhiloxBytes random = rng.group(row0 + l / 8 * 16 + l % 8, col0 + 2 * pair);
          for (int w = 0; w < 4; ++w) word[w][l] = random.word[w];
        }
        for (int c = 0; c < 8; ++c) {
          const int j = col0 + 8 * (c / 2) + 2 * pair + c % 2;
          if (j < segment.key || j >= key_end) continue;
          spread_bytes<kWidth>(word[c / 2], 16 * (c % 2), i0 - row0, bytes + (j - segment.key) * kPitch);
        }
      }
  }

 private:
  // Of each word, the byte at `shift` for the first 8 rows of its group of 16 and the next one for the other 8. dst
  // holds the rows from `first` on.
  template <int kWidth>
  static void spread_bytes(const std::uint32_t* word, int shift, int first, std::uint8_t* dst) {
    constexpr int kGroups = ceil_div(kWidth, 16), kCalls = 8 * kGroups;
    alignas(64) std::uint8_t low[kCalls], high[kCalls], rows[16 * kGroups];
    for (int l = 0; l < kCalls; ++l) {
      low[l] = static_cast<std::uint8_t>(word[l] >> shift);
      high[l] = static_cast<std::uint8_t>(word[l] >> (shift + 8));
    }
    for (int g = 0; g < kGroups; ++g) {
      std::memcpy(rows + 16 * g, low + 8 * g, 8);
      std::memcpy(rows + 16 * g + 8, high + 8 * g, 8);
    }
    std::memcpy(dst, rows + first, kWidth);
  }

  void load_bias(int i0, int lanes, int j, float* dst) const {
    for (int l = 0; l < lanes; ++l) {
      std::int64_t at = bias_offset_ + (i0 + l) * bias_.row + j * bias_.col;
      switch (bias_.dtype) {
        case DType::kFloat32:
          dst[l] = static_cast<const float*>(bias_.ptr)[at];
          break;
        case DType::kBFloat16:
          dst[l] = to_float(static_cast<const Bf16*>(bias_.ptr)[at]);
          break;
        case DType::kFloat16:
          dst[l] = to_float(static_cast<const Fp16*>(bias_.ptr)[at]);
          break;
        default:
          dst[l] = static_cast<const std::uint8_t*>(bias_.ptr)[at] != 0 ? 0.f : -INFINITY;
      }
    }
  }

  float softcap_, slope_;
  int shift_;
  BiasParam bias_;
  std::int64_t bias_offset_;
  int threshold_;
  float dropout_scale_;
  DropoutRng rng_;
};

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
