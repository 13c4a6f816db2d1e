// T5's bias in Hopper's kernels: bfloat16, head_dim up to 64, any band. A kernel is a row, a policy, a set of features.
#pragma once

#include <flashsdk/kernels/sm90/backward/launch.h>
#include <flashsdk/kernels/sm90/forward/launch.h>

#include "t5_bias.h"

namespace t5_sm90 {

// clang-format off
struct ForwardRow {
  static constexpr flashsdk::table::Sm90Forward kRow{
      .head_dim = 64, .tile = {128, 128}, .stages_k = 4, .stages_v = 4, .stages_q = 2,
      .tuning = flashsdk::table::kTriesInTurns, .kernels = {}};
};
struct BackwardRow {
  static constexpr flashsdk::table::Sm90Backward kRow{
      .head_dim = 64, .tile = {128, 128}, .stages_do = 2, .stages_k = 2, .kernels = {}};
};
// clang-format on
constexpr auto kFeatures = flashsdk::Features::kCapped;  // what asks a policy for scores
using Element = cutlass::bfloat16_t;
using Policy = T5Policy<flashsdk::cuda::BuiltinPolicy>;

inline flashsdk::ForwardEntry forward() {
  using Traits = flashsdk::sm90::ForwardTraits<ForwardRow, Element>;
  return flashsdk::sm90::forward_entry<Traits, kFeatures, Policy>(flashsdk::MaskKind::kBand);
}
inline flashsdk::BackwardEntry backward() {
  using Traits = flashsdk::sm90::BackwardTraitsOf<BackwardRow, kFeatures, Element>;
  return flashsdk::sm90::backward_entry<Traits, kFeatures, Policy>(flashsdk::MaskKind::kBand);
}

}  // namespace t5_sm90
