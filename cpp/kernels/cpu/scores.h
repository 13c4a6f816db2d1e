// What happens to a tile of raw scores S^T (keys, queries in `width` lanes, rows kPitch apart) beside the exponential:
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
// scale of zero or, with fp8's factors, NaN: with masked scores, which are -inf, either would make NaN. Of a huge scale
// Q takes 2^32: bf16 dot products flush terms below 2^-126, which such a scale would show, and the rest times log2(e)
// is no infinity.
struct ScaleSplit {
  float q_factor, magnitude;
  FLASHSDK_HD explicit ScaleSplit(float scale) : q_factor(1.f), magnitude(std::fabs(scale)) {
    if (magnitude > 0x1p100f) {
      q_factor = 0x1p32f;
      magnitude /= q_factor;
    }
    if (scale < 0.f) q_factor = -q_factor;
    if (scale == 0.f || std::isnan(scale)) q_factor = scale, magnitude = 1.f;
  }

  // From stored scores to natural logarithms: features have multiplied by the magnitude already.
  template <bool kFeatures>
  FLASHSDK_HD double to_natural() const {
    return kFeatures ? 1.0 : magnitude;
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
template <int kPitch, class Policy, int kLanesHeld>
void mask_scores(float* s, int width, const KeySegment& segment, const Policy& policy,
                 const LaneKeys<kLanesHeld>& lane_keys, int i0, int lanes) {
  for (int r = 0; r < segment.count; ++r, s += kPitch) {
    const int j = segment.key + r;
    if constexpr (kHasKeyRange<Policy>) {
      for (int l = 0; l < width; l += kLanes)
        store(s + l, mask_keys(load(s + l), load_int(lane_keys.begin + l), load_int(lane_keys.end + l), j));
    } else {
      // Lanes of padding are as blind as the last query: a key that nobody sees may hold NaN.
      for (int l = 0; l < width; ++l)
        if (!policy.allowed(i0 + min_of(l, lanes - 1), j)) s[l] = -INFINITY;
    }
  }
}

// A policy's own change of scores, lanes being queries from i0 on; lanes of padding are as the last query. Where
// `slope` is given, it is multiplied by the derivative, or becomes it where no other feature has written one.
template <int kPitch, class Policy>
void apply_policy_score(float* s, int width, const KeySegment& segment, const Policy& policy, int i0, int lanes,
                        float* slope = nullptr, bool has_slope = false) {
  for (int r = 0; r < segment.count; ++r)
    for (int l = 0; l < width; ++l) {
      const int at = r * kPitch + l, i = i0 + min_of(l, lanes - 1), j = segment.key + r;
      if (slope != nullptr) slope[at] = (has_slope ? slope[at] : 1.f) * score_slope_of(policy, s[at], i, j);
      s[at] = score_of(policy, s[at], i, j);
    }
}

// The score features of one batch and head.
class ScoreFeatures {
 public:
  FLASHSDK_HD ScoreFeatures(const ScoreParam& p, const SeqlenInfo& seqlen, int batch, int head)
      // Below the normal numbers its reciprocal may be infinite; there tanh is ±1 and the score next to 0 anyway.
      : softcap_(p.softcap > 0.f && p.softcap < FLT_MIN ? FLT_MIN : p.softcap),
        slope_(alibi_slope(p, batch, head)),
        shift_(seqlen.seqlen_k - seqlen.seqlen_q),
        bias_(p.bias),
        bias_offset_(batch * p.bias.batch + head * p.bias.head),
        threshold_(p.dropout.threshold),
        dropout_scale_(p.dropout.scale()),
        rng_(DropoutRng(p.dropout, batch).of(head)) {}

  bool softcap() const { return softcap_ > 0.f; }
  bool dropout() const { return threshold_ > 0; }
  int threshold() const { return threshold_; }
  float dropout_scale() const { return dropout_scale_; }

  // Raw scores times `scale` become final scores. With `softcap_slope`, writes d(capped)/d(scaled).
  //
  // A bias of -inf, and a boolean one, hides the key whatever its score is, NaN too; from lanes of padding every key is
  // hidden, or those that are hidden from all. A finite bias never does: the sum stays finite.
  template <int kPitch>
  void apply(float* s, int width, const KeySegment& segment, int i0, int lanes, float scale,
             float* softcap_slope) const {
    alignas(64) float bias[kLanes * kLanes], query[kLanes];
    for (int r0 = 0; r0 < segment.count; r0 += kLanes) {
      const int keys = min_of(kLanes, segment.count - r0);
      for (int l = 0; l < width; l += kLanes) {
        if (bias_.ptr != nullptr) load_bias(i0 + l, lanes - l, segment.key + r0, keys, bias);
        for (int n = 0; n < kLanes; ++n) query[n] = static_cast<float>(i0 + l + n + shift_);
        for (int r = r0; r < r0 + keys; ++r) {
          const int at = r * kPitch + l;
          const Vec distance = sub(load(query), set1(static_cast<float>(segment.key + r)));
          const Score score = final_score(mul(load(s + at), set1(scale)), bias + (r - r0) * kLanes, distance);
          store(s + at, score.value);
          if (softcap_ > 0.f && softcap_slope != nullptr) store(softcap_slope + at, score.softcap_slope);
        }
      }
    }
  }
  // The same of the keys [j0, j0 + count) and query i, keys in lanes; lanes behind the last one become anything.
  void apply_row(float* s, int i, int j0, int count, float scale) const {
    alignas(64) float bias[kLanes] = {}, key[kLanes];
    const float query = static_cast<float>(i + shift_);
    for (int r = 0; r < count; r += kLanes) {
      if (bias_.ptr != nullptr)
        with_bias([&](const auto* first) {
          first += i * bias_.row + (j0 + r) * bias_.col;
          store(bias, bias_of_keys(first, bias_.col, count - r));
        });
      for (int n = 0; n < kLanes; ++n) key[n] = static_cast<float>(j0 + r + n);
      store(s + r, final_score(mul(load(s + r), set1(scale)), bias, sub(set1(query), load(key))).value);
    }
  }
  // Of probabilities that lie likewise, zeros what dropout leaves out.
  void drop_row(float* p, int i, int j0, int count) const {
    const DropoutRng rng = rng_;
    for (int r = 0; r < count; ++r) p[r] = rng.keep(i, j0 + r, threshold_) ? p[r] : 0.f;
  }

  // The keys from the first to the last that a bias shows, where it is the same for all queries, as for padding.
  KeyRange keys_shown(int seqlen_k) const {
    KeyRange keys{0, seqlen_k};
    if (bias_.ptr == nullptr || bias_.row != 0 || bias_.col != 1) return keys;
    with_bias([&](const auto* first) {
      auto hides = [&](int begin, int end) {
        const auto hidden = hidden_bits(*first);
        decltype(bias_bits(*first)) shown = 0;
        for (int j = begin; j < end; ++j) shown |= bias_bits(first[j]) ^ hidden;
        return shown == 0;
      };
      for (int block : {2048, 64}) {  // one that shows nothing is passed as a whole
        for (int n; (n = min_of(block, keys.end - keys.begin)) > 0 && hides(keys.end - n, keys.end);) keys.end -= n;
        for (int n; (n = min_of(block, keys.end - keys.begin)) > 0 && hides(keys.begin, keys.begin + n);)
          keys.begin += n;
      }
    });
    return keys;
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

  struct Score {
    Vec value, softcap_slope;
  };
  FLASHSDK_HD Score final_score(Vec x, const float* bias, Vec distance) const {
    Score score{x, x};
    if (softcap_ > 0.f) {
      const Vec th = tanh(mul(x, set1(1.f / softcap_)));
      score.softcap_slope = sub(set1(1.f), mul(th, th));
      x = mul(th, set1(softcap_));
    }
    if (bias_.ptr != nullptr) {
      const Vec b = load(bias);
      x = select_below(b, -FLT_MAX, set1(-INFINITY), max(set1(-FLT_MAX), add(x, b)));
    }
    if (slope_ != 0.f) x = sub(x, mul(set1(slope_), max(distance, sub(zero(), distance))));
    score.value = x;
    return score;
  }

  // Calls f with the bias of this batch and head, as a pointer to elements. True bytes attend.
  template <class F>
  FLASHSDK_HD void with_bias(F f) const {
    switch (bias_.dtype) {
      case DType::kFloat32:
        return f(static_cast<const float*>(bias_.ptr) + bias_offset_);
      case DType::kBFloat16:
        return f(static_cast<const Bf16*>(bias_.ptr) + bias_offset_);
      case DType::kFloat16:
        return f(static_cast<const Fp16*>(bias_.ptr) + bias_offset_);
      default:
        return f(static_cast<const std::uint8_t*>(bias_.ptr) + bias_offset_);
    }
  }
  template <class T>
  static FLASHSDK_HD float bias_value(T x) {
    return to_float(x);
  }
  static FLASHSDK_HD float bias_value(std::uint8_t attend) { return attend != 0 ? 0.f : -INFINITY; }
  // As integers, of which many are compared at once, and what hides a key among them: false or -inf.
  static FLASHSDK_HD std::uint8_t bias_bits(std::uint8_t attend) { return attend; }
  static FLASHSDK_HD std::uint16_t bias_bits(Bf16 x) { return x.bits; }
  static FLASHSDK_HD std::uint16_t bias_bits(Fp16 x) { return x.bits; }
  static FLASHSDK_HD std::uint32_t bias_bits(float x) { return __builtin_bit_cast(std::uint32_t, x); }
  static FLASHSDK_HD std::uint8_t hidden_bits(std::uint8_t) { return 0; }
  static FLASHSDK_HD std::uint16_t hidden_bits(Bf16) { return 0xFF80; }
  static FLASHSDK_HD std::uint16_t hidden_bits(Fp16) { return 0xFC00; }
  static FLASHSDK_HD std::uint32_t hidden_bits(float) { return 0xFF800000; }
  template <class T>
  static FLASHSDK_HD Vec bias_values(const T* at) {
    return load_as_float(at);
  }
  static FLASHSDK_HD Vec bias_values(const std::uint8_t* at) {
    return select_below(keep_at_least(set1(1.f), at, 1), 1.f, set1(-INFINITY), zero());
  }
  // Of a query the keys from one on, of which `count` exist: -inf behind them. Stride 0 is the same for all keys.
  template <class T>
  static FLASHSDK_HD Vec bias_of_keys(const T* first, std::int64_t stride, int count) {
    if (stride == 0) return set1(bias_value(*first));
    if (count >= kLanes) return bias_values(first);
    alignas(64) float x[kLanes];
    for (int n = 0; n < kLanes; ++n) x[n] = n < count ? bias_value(first[n]) : -INFINITY;
    return load(x);
  }
  // Of kLanes queries from i on, of which `lanes` exist, and the keys [j, j + keys): (keys, lanes).
  __attribute__((noinline)) void load_bias(int i, int lanes, int j, int keys, float* block) const {
    with_bias([&](const auto* first) {
      first += i * bias_.row + j * bias_.col;
      if (bias_.row == 0) {
        for (int r = 0; r < keys; ++r) store(block + r * kLanes, set1(bias_value(first[r * bias_.col])));
        return;
      }
      alignas(64) float rows[kLanes * kLanes];
      for (int l = 0; l < kLanes; ++l)
        store(rows + l * kLanes, l < lanes ? bias_of_keys(first + l * bias_.row, bias_.col, keys) : set1(-INFINITY));
      transpose(rows, kLanes, block, kLanes);
    });
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
