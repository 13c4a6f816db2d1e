// SM80 kernels with policies of one's own.
#include <flashsdk/kernels/sm80/launch.h>

#include "gpu/own_kernels.h"
#include "own_policies.h"

namespace flashsdk::testing {
namespace {

// clang-format off
struct MaskForward {
  static constexpr table::Sm80Forward kRow{
      .head_dim = 64, .tile = {128, 64}, .warps = 4, .q_in_registers = true, .kernels = {}};
};
struct MaskBackward {
  static constexpr table::Sm80Backward kRow{
      .head_dim = 64, .tile = {32, 128}, .warps = 4, .warps_s = 4, .warps_dk = 4, .warps_dq = 2, .blocks = 2,
      .kernels = {}};
};
struct ScoreForward {
  static constexpr table::Sm80Forward kRow{.head_dim = 64, .tile = {64, 64}, .warps = 4, .blocks = 3, .kernels = {}};
};
struct ScoreBackward {
  static constexpr table::Sm80Backward kRow{
      .head_dim = 64, .tile = {64, 128}, .warps = 8, .warps_s = 8, .warps_dk = 8, .warps_dq = 4, .kernels = {}};
};
// clang-format on

template <class Policy, Features kFeatures, class Forward, class Backward>
OwnKernel kernel() {
  using Element = cutlass::bfloat16_t;
  return {sm80::forward_entry<sm80::ForwardTraitsOf<Forward, Element>, Policy, kFeatures>(),
          sm80::backward_entry<sm80::BackwardTraitsOf<Backward, Element>, Policy, kFeatures>()};
}

}  // namespace

OwnKernels own_sm80() {
  return {kernel<DilatedWindowPolicy, Features::kNone, MaskForward, MaskBackward>(),
          kernel<T5Policy<BandPolicy>, Features::kAll, ScoreForward, ScoreBackward>(),
          kernel<FactorPolicy<BandPolicy>, Features::kAll, ScoreForward, ScoreBackward>()};
}

}  // namespace flashsdk::testing
