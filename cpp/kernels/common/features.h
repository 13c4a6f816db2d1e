// The features that a kernel has compiled in beside the mask, as a set: what its key, its name and its code are from.
#pragma once

namespace flashsdk {

// In namespace cuda, although CPUs use it too: the type is part of GPU kernels' names, and what ptxas makes of a kernel
// depends on its name (benchmarks/results/sm90_forward_names.csv).
namespace cuda {
// The more, the more registers a kernel takes, also from calls that use none of it.
enum class Features : unsigned {
  kNone = 0,
  kDropout = 1,
  kSoftcap = 2,
  kBias = 4,
  kAlibi = 8,
  kCapped = kDropout | kSoftcap,
  kBiasDropout = kBias | kDropout,
  kAll = kDropout | kSoftcap | kBias | kAlibi
};

constexpr bool has(Features f, Features bit) { return (static_cast<unsigned>(f) & static_cast<unsigned>(bit)) != 0; }
constexpr bool has_dropout(Features f) { return has(f, Features::kDropout); }
constexpr bool has_bias(Features f) { return has(f, Features::kBias); }
constexpr bool has_alibi(Features f) { return has(f, Features::kAlibi); }
constexpr bool has_softcap(Features f) { return has(f, Features::kSoftcap); }
constexpr Features operator|(Features a, Features b) {
  return static_cast<Features>(static_cast<unsigned>(a) | static_cast<unsigned>(b));
}
// What `of` has and `f` lacks.
constexpr Features missing(Features f, Features of) {
  return static_cast<Features>(static_cast<unsigned>(of) & ~static_cast<unsigned>(f));
}
constexpr int count(Features f) { return has_dropout(f) + has_softcap(f) + has_bias(f) + has_alibi(f); }

}  // namespace cuda
using cuda::Features;

constexpr int kFeatureSets = 16;  // that there can be

}  // namespace flashsdk
