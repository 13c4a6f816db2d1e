// SM90 kernels with policies of one's own.
#include "custom_score/sm90.h"
#include "gpu/own_kernels.h"
#include "own_policies.h"

namespace flashsdk::testing {
namespace {

template <class Policy, Features kFeatures>
OwnKernel kernel() {
  using Element = cutlass::bfloat16_t;
  using ForwardTraits = sm90::ForwardTraits<t5_sm90::ForwardRow, Element>;
  using BackwardTraits = sm90::BackwardTraitsOf<t5_sm90::BackwardRow, kFeatures, Element>;
  return {sm90::forward_entry<ForwardTraits, kFeatures, Policy>(MaskKind::kBand),
          sm90::backward_entry<BackwardTraits, kFeatures, Policy>(MaskKind::kBand)};
}

}  // namespace

OwnKernels own_sm90() {
  return {kernel<DilatedWindowPolicy, Features::kNone>(),
          {t5_sm90::forward(), t5_sm90::backward()},
          kernel<FactorPolicy<cuda::BuiltinPolicy>, Features::kCapped>()};
}

}  // namespace flashsdk::testing
