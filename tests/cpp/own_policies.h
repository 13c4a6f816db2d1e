// Policies of one's own, for kernels that the tests compile, and what each of them computes.
#pragma once

#include <vector>

#include "custom_mask/dilated_window.h"
#include "custom_score/t5_bias.h"
#include "reference.h"

namespace flashsdk::testing {

inline OwnScores dilated_window(DilatedWindow mask) {
  const auto sees = [mask](std::int64_t, std::int64_t i, std::int64_t j) {
    for (int n = 0; n < mask.window; ++n)
      if (j == i - std::int64_t{n} * mask.dilation) return true;
    return false;
  };
  return {sees, {}, {}};
}

// T5's bias of as many heads.
struct T5 {
  static constexpr int kBuckets = 8, kMaxDistance = 20;
  int heads;
  std::vector<float> learned, by_distance;

  explicit T5(int num_heads) : heads(num_heads) {
    for (int n = 0; n < kBuckets * heads; ++n) learned.push_back(0.7f * static_cast<float>((5 * n) % 7 - 3));
    by_distance = t5_by_distance(learned, heads, kBuckets, kMaxDistance);
  }
  OwnScores definition() const {
    const auto score = [table = learned, n = heads](double s, std::int64_t h, std::int64_t i, std::int64_t j) {
      return s + table[static_cast<std::size_t>(t5_bucket(static_cast<int>(j - i), kBuckets, kMaxDistance) * n + h)];
    };
    return {{}, score, {}};
  }
};

// Scores that are no sums: times a factor, plus a number.
template <class Mask>
class FactorPolicy : public Mask {
 public:
  using Mask::Mask;
  FLASHSDK_HD float score(float s, int i, int j) const { return s * factor(i, j) + 0.25f; }
  FLASHSDK_HD float score_slope(float, int i, int j) const { return factor(i, j); }

  static OwnScores definition() {
    const auto slope = [](double, std::int64_t, std::int64_t i, std::int64_t j) {
      return (i + 2 * j) % 3 == 0 ? 0.5 : 1.25;
    };
    const auto score = [slope](double s, std::int64_t h, std::int64_t i, std::int64_t j) {
      return s * slope(s, h, i, j) + 0.25;
    };
    return {{}, score, slope};
  }

 private:
  static FLASHSDK_HD float factor(int i, int j) { return (i + 2 * j) % 3 == 0 ? 0.5f : 1.25f; }
};

}  // namespace flashsdk::testing
