// A change of scores of our own: T5's relative position bias (arXiv 1910.10683, section 2.1). Distances share a learned
// number by buckets that grow with the logarithm, and beyond max_distance all share one. This file is all that the
// kernels need to know of it, forward and backward, on a CPU and a GPU (flashsdk/kernels/common/mask_policy.h).
#pragma once

#include <cmath>
#include <cstdlib>
#include <vector>

#include <flashsdk/kernels/common/mask_policy.h>

// Reached through MaskParam::user. A number for each distance key - query in [-reach, reach]: (heads, 2 reach + 1).
struct T5Bias {
  const float* by_distance;
  int reach;
};

// Mask is a policy of the library's, which this one extends.
template <class Mask>
class T5Policy : public Mask {
 public:
  FLASHSDK_HD T5Policy(const flashsdk::MaskParam& mask, const flashsdk::SeqlenInfo& s, int batch, int head)
      : Mask(mask, s, batch, head), bias_(*static_cast<const T5Bias*>(mask.user)) {
    bias_.by_distance += head * (2 * bias_.reach + 1) + bias_.reach;
  }
  FLASHSDK_HD float score(float s, int i, int j) const {
    return s + bias_.by_distance[flashsdk::max_of(-bias_.reach, flashsdk::min_of(j - i, bias_.reach))];
  }

 private:
  T5Bias bias_;
};

// The bucket of a distance, of buckets on both sides of the diagonal.
inline int t5_bucket(int distance, int buckets, int max_distance) {
  const int half = buckets / 2, exact = half / 2, far = std::abs(distance), side = distance > 0 ? half : 0;
  if (far < exact) return side + far;
  const double share = std::log(static_cast<double>(far) / exact) / std::log(static_cast<double>(max_distance) / exact);
  return side + flashsdk::min_of(exact + static_cast<int>(share * (half - exact)), half - 1);
}

// What T5Bias points to, from the learned numbers (buckets, heads).
inline std::vector<float> t5_by_distance(const std::vector<float>& learned, int heads, int buckets, int max_distance) {
  std::vector<float> result;
  for (int head = 0; head < heads; ++head)
    for (int d = -max_distance; d <= max_distance; ++d)
      result.push_back(learned[t5_bucket(d, buckets, max_distance) * heads + head]);
  return result;
}
