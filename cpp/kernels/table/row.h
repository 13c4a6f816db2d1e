// What the rows of the kernel tables are made of. A row is one tile; it says for which features and masks there is a
// kernel of it.
#pragma once

#include <cstddef>

#include "common/features.h"
#include "common/params.h"
#include "common/tile_walk.h"

namespace flashsdk::table {

using enum Features;

// Largest head_dim of q and k, and of v.
struct HeadDims {
  int qk, v;
  constexpr HeadDims(int both) : qk(both), v(both) {}
  constexpr HeadDims(int of_qk, int of_v) : qk(of_qk), v(of_v) {}
  constexpr bool operator==(const HeadDims&) const = default;
};

// Masks as bits.
enum Masks : unsigned char {
  kNoMask = 0,
  kDense = 1 << static_cast<int>(MaskKind::kDense),
  kBand = 1 << static_cast<int>(MaskKind::kBand),
  kBlockSparse = 1 << static_cast<int>(MaskKind::kBlockSparse),
  kNoLayout = kDense | kBand,
  kBandOrLayout = kBand | kBlockSparse,
  kEveryMask = kNoLayout | kBlockSparse,
};
constexpr bool has(Masks masks, MaskKind kind) { return (masks >> static_cast<int>(kind) & 1) != 0; }

// The kernels of a row: for every set of features the masks that it is compiled for.
struct Kernels {
  Masks masks[kFeatureSets] = {};

  constexpr Masks of(Features features) const { return masks[static_cast<unsigned>(features)]; }
  // The masks of all kernels that have at least these features.
  constexpr Masks serving(Features features) const {
    unsigned all = kNoMask;
    for (unsigned set = 0; set < kFeatureSets; ++set)
      if (missing(static_cast<Features>(set), features) == kNone) all |= masks[set];
    return static_cast<Masks>(all);
  }
};
template <class... Sets>
constexpr Kernels kernels_for(Masks masks, Sets... sets) {
  Kernels kernels;
  ((kernels.masks[static_cast<unsigned>(sets)] = masks), ...);
  return kernels;
}
template <class... Sets>
constexpr Kernels every_mask(Sets... sets) {
  return kernels_for(kEveryMask, sets...);
}
template <class... Sets>
constexpr Kernels no_layout(Sets... sets) {
  return kernels_for(kNoLayout, sets...);
}
template <class... Sets>
constexpr Kernels layouts(Sets... sets) {
  return kernels_for(kBlockSparse, sets...);
}
constexpr Kernels operator|(Kernels a, const Kernels& b) {
  for (int i = 0; i < kFeatureSets; ++i) a.masks[i] = static_cast<Masks>(a.masks[i] | b.masks[i]);
  return a;
}

// The sets of features that kernels have code for, those before others that are asked first.
constexpr Features kSm80Sets[] = {kNone, kDropout, kAlibi, kBias, kAll};
constexpr Features kSm90Sets[] = {kNone, kDropout, kCapped, kAlibi, kBias, kBiasDropout};

// Of all GPU kernels.
constexpr DType kGpuDTypes[] = {DType::kFloat16, DType::kBFloat16};
constexpr int kGpuHeadDims[] = {32, 64, 96, 128, 192, 256, 576};

// That of these with which rows of a head_dim are built.
constexpr int built_with(HeadDims head_dim) {
  for (const int d : kGpuHeadDims)
    if (d >= head_dim.qk && d >= head_dim.v) return d;
  return 0;
}

// The largest head_dims that rows of a table have: calls with a larger one have no kernel.
template <class Row, std::size_t kRows>
constexpr HeadDims widest(const Row (&rows)[kRows]) {
  HeadDims widest = 0;
  for (const Row& row : rows) {
    if (row.head_dim.qk > widest.qk) widest.qk = row.head_dim.qk;
    if (row.head_dim.v > widest.v) widest.v = row.head_dim.v;
  }
  return widest;
}

}  // namespace flashsdk::table
