// Which kernels a call asks, and which of them first: the registry goes by it, and check.h proves by it that no call is
// left without one. Of a call it looks at what keys tell of. What else a kernel wants of one, it says when it is asked.
#pragma once

#include <compare>
#include <cstddef>
#include <limits>
#include <type_traits>

#include "common/kernel_entry.h"
#include "table/row.h"

namespace flashsdk::table {

struct Call {
  DType dtype;  // of q
  bool fp8_kv;
  HeadDims head_dim;
  MaskKind mask;
  Features features;  // that it asks for
  bool on_cpu;
  bool backward = false;
  int longest = std::numeric_limits<int>::max();  // queries or keys of a sequence, at most
};

template <class Params>
Call call_of(const Params& p) {
  return {p.dtype,
          p.fp8_kv(),
          {p.head_dim, p.head_dim_v},
          p.mask.kind,
          p.score.features(),
          p.device.type == DeviceType::kCPU,
          std::is_same_v<Params, BackwardParams>,
          max_of(p.seqlen_q, p.seqlen_k)};
}

// Kernels are listed in this order. The smallest head_dim that fits is the fastest, and what is not asked for is better
// not compiled in.
struct Listed {
  int slower_backend, arch_rank, head_dim, head_dim_v, features;
  bool any_alignment;
  std::size_t position;

  // arch_rank: among the backend's architectures, 0 is the fastest; position: in its table.
  constexpr Listed(const KernelKey& key, int arch_rank, std::size_t position)
      : slower_backend(-static_cast<int>(key.backend)),
        arch_rank(arch_rank),
        head_dim(key.head_dim),
        head_dim_v(key.head_dim_v),
        features(count(key.features)),
        any_alignment(key.any_alignment),
        position(position) {}
  constexpr auto operator<=>(const Listed&) const = default;
};
// And asked in this. Kernels that split keys take calls of few queries, and those whatever the backend.
struct Asked {
  bool splits_none;
  Listed listed;

  constexpr Asked(const KernelKey& key, int arch_rank, std::size_t position)
      : splits_none(!key.splits_keys), listed(key, arch_rank, position) {}
  constexpr auto operator<=>(const Asked&) const = default;
};

// Those that compete for a problem: all that the key decides beside head_dim, and whether any feature is asked for.
constexpr bool competes(const KernelKey& key, DType dtype, MaskKind mask, bool featured) {
  return key.mask == mask && key.dtype == dtype && (!featured || key.features != kNone);
}
// Whether a GPU's kernel is for keys and values of another type than the call's. A CPU's take all.
constexpr bool has_other_keys(const KernelKey& key, const Call& call) {
  return key.backend != Backend::kCpu && key.fp8_kv != call.fp8_kv;
}
// Kernels of fp8 keys are nothing to calls of 16 bits. A call of fp8 keys hears why others do not take it, but not that
// they do not split.
constexpr bool is_asked(const KernelKey& key, const Call& call) {
  return key.head_dim >= call.head_dim.qk && key.head_dim_v >= call.head_dim.v &&
         competes(key, call.dtype, call.mask, call.features != kNone) &&
         (key.backend == Backend::kCpu) == call.on_cpu &&
         !(has_other_keys(key, call) && (key.fp8_kv || key.splits_keys));
}

// Whether sequences are so short that sm80's kernels, of smaller tiles, take less time than sm90's on the same GPU,
// however few they are (benchmarks/results/short_sequences.csv). A call that names its backend is not asked.
constexpr bool is_short_for_sm90(const Call& call) {
  if (call.on_cpu || call.mask == MaskKind::kBlockSparse) return false;
  const int head_dim = max_of(call.head_dim.qk, call.head_dim.v);
  if (!call.backward) return call.features == kNone && head_dim > 96 && call.longest <= 32;
  const bool gains = call.features == kNone || call.features == kAlibi || call.features == kDropout;
  return gains && head_dim <= 64 && call.longest <= 64;
}

// The first kernel that the call asks and that `takes` it, else null. kernels: pointers to what has a key(), in the
// order of Asked.
template <class Kernels, class Takes>
constexpr auto choose(const Kernels& kernels, const Call& call, Takes takes) {
  HeadDims splitting = 0;  // those of the kernels that may split keys
  for (const auto* kernel : kernels) {
    const KernelKey& key = kernel->key();
    if (!is_asked(key, call)) continue;
    if (key.splits_keys) {
      // Those of the first that fits speak for all: larger ones split where these say that it does not pay.
      const HeadDims own{key.head_dim, key.head_dim_v};
      if (splitting == HeadDims(0)) splitting = own;
      if (splitting != own) continue;
    }
    if (takes(*kernel)) return kernel;
  }
  return static_cast<typename Kernels::value_type>(nullptr);
}

}  // namespace flashsdk::table
