// ALiBi for one head (docs/semantics.md). Scale, softcap and bias are each backend's own.
#pragma once

#include "common/params.h"

namespace flashsdk {

FLASHSDK_HD float alibi_slope(const ScoreParam& score, int batch, int head) {
  return score.alibi_slopes == nullptr ? 0.f : score.alibi_slopes[batch * score.alibi_batch + head];
}

}  // namespace flashsdk
