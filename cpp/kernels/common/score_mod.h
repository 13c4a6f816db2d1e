// The rare score features, for one query and key: scale, softcap, bias and ALiBi (docs/semantics.md).
#pragma once

#include "common/params.h"

namespace flashsdk {

// |i + seqlen_k - seqlen_q - j|, the distance ALiBi penalises.
FLASHSDK_HD int alibi_distance(int i, int j, int seqlen_q, int seqlen_k) {
  int d = i + seqlen_k - seqlen_q - j;
  return d < 0 ? -d : d;
}

FLASHSDK_HD float alibi_slope(const ScoreParam& score, int batch, int head) {
  return score.alibi_slopes == nullptr ? 0.f : score.alibi_slopes[batch * score.alibi_batch + head];
}

}  // namespace flashsdk
