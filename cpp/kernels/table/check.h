// What every row of the tables promises, checked where it is compiled: a message names the row by its values.
#pragma once

#include <cstddef>
#include <iterator>
#include <type_traits>
#include <utility>

#include "sm90/forward/tiles.h"
#include "table/cpu.h"
#include "table/sm80.h"
#include "table/sm90.h"

namespace flashsdk::table {

constexpr int kSm90SharedBytes = 227 * 1024;  // that a CTA can have
constexpr int kSmallSharedBytes = 99 * 1024;  // on the GPUs with the least: 8.6, 8.9, 12.0
constexpr int kRegisters = 65536;             // of a multiprocessor

constexpr bool is_compiled(int head_dim) { return built_with(head_dim) == head_dim; }
constexpr bool is_wide(HeadDims head_dim) { return built_with(head_dim) > 256; }
constexpr bool has_kernels(const Kernels& kernels) { return kernels.serving(kNone) != kNoMask; }
// Whether all its sets of features are among those that there is code for.
template <std::size_t kSets>
constexpr bool only(const Kernels& kernels, const Features (&sets)[kSets]) {
  Kernels others = kernels;
  for (const Features set : sets) others.masks[static_cast<unsigned>(set)] = kNoMask;
  return !has_kernels(others);
}
constexpr bool of_every_mask(const Kernels& kernels) {
  for (const Masks masks : kernels.masks)
    if (masks != kNoMask && masks != kEveryMask) return false;
  return true;
}

constexpr bool of_no_layout(const Kernels& kernels) {
  for (const Masks masks : kernels.masks)
    if (has(masks, MaskKind::kBlockSparse)) return false;
  return true;
}

// K, V and Q tiles of 16 bits.
constexpr int smem_bytes(const Sm90Forward& row) {
  return 2 * (row.tile.m * row.stages_q * row.head_dim.qk + row.tile.n * row.stages_k * row.head_dim.qk +
              row.tile.n * row.stages_v * row.head_dim.v);
}

// Of a thread: what S, P and the output take, and what ForwardTraits gives to one that computes.
constexpr int tile_registers(const Sm90Forward& row) { return row.tile.n / 2 + row.tile.n / 4 + row.head_dim.v / 2; }
constexpr int compute_registers(const Sm90Forward& row) {
  return row.tile.m != 128 ? 160 : tile_registers(row) > 176 ? 232 : 224;
}
// Of a CTA: a warpgroup for each 64 rows, and one that loads.
constexpr int registers(const Sm90Forward& row) {
  const int loads = row.tile.m != 128 ? 32 : tile_registers(row) > 176 ? 40 : 56;
  return 128 * (row.tile.m / 64 * compute_registers(row) + loads);
}

template <Sm80Forward kRow>
struct CheckedSm80Forward {
  static_assert(is_wide(kRow.head_dim) || (is_compiled(kRow.head_dim.qk) && kRow.head_dim.qk == kRow.head_dim.v),
                "head_dim: see kGpuHeadDims");
  static_assert(is_wide(kRow.head_dim) == (kRow.column_warps > 1) && kRow.warps % kRow.column_warps == 0,
                "column_warps: more than 1 of all warps for wide heads, and for these alone");
  static_assert(kRow.tile.m % (16 * kRow.warps / kRow.column_warps) == 0, "tile.m: not a multiple of 16 rows a warp");
  static_assert(kRow.tile.n % 16 == 0, "tile.n: not a multiple of 16");
  static_assert(kRow.stages == 1 || kRow.stages == 2, "stages: not 1 or 2");
  static_assert(only(kRow.kernels, kSm80Sets), "kernels: a set of features that sm80 has no code for");
  static_assert(has_kernels(kRow.kernels), "kernels: none");
};

template <Sm80Fp8Forward kRow>
struct CheckedSm80Fp8Forward : CheckedSm80Forward<Sm80Forward(kRow)> {
  static_assert(kRow.stages == 1 && !kRow.q_in_registers, "stages, q_in_registers: not as fp8_forward_kernel has them");
  static_assert(kRow.any_alignment || only(kRow.kernels, {kNone}), "kernels: no tile of a bias is loaded");
};
template <Sm80Fp8SplitForward kRow>
struct CheckedSm80Fp8SplitForward {
  static_assert(is_compiled(kRow.head_dim.qk) && kRow.head_dim.qk == kRow.head_dim.v, "head_dim: see kGpuHeadDims");
  static_assert(kRow.head_dim.qk % 64 == 0, "head_dim: not a multiple of what the lanes of a row read at once");
  static_assert(kRow.tile.m == 16 && kRow.tile.n % (16 * kRow.warps) == 0, "tile: not 16 rows, 16 keys a warp");
  static_assert(!kRow.any_alignment && !kRow.q_in_registers, "any_alignment, q_in_registers: they are for other tiles");
  static_assert(of_no_layout(kRow.kernels), "kernels: tiles of a part follow each other");
  static_assert(smem_bytes(kRow) <= kSmallSharedBytes, "stages: more shared memory than some GPUs have");
  static_assert(only(kRow.kernels, kSm80Sets), "kernels: a set of features that sm80 has no code for");
  static_assert(has_kernels(kRow.kernels), "kernels: none");
};

template <Sm80Backward kRow>
struct CheckedSm80Backward {
  static_assert(kRow.head_dim.qk == kRow.head_dim.v && (is_wide(kRow.head_dim) || is_compiled(kRow.head_dim.qk)),
                "head_dim: see kGpuHeadDims");
  static_assert(is_wide(kRow.head_dim) == (kRow.copies > 1) && (kRow.copies == 1 || kRow.copies % 2 == 0) &&
                    kRow.warps % (kRow.copies * kRow.warps_s) == 0,
                "copies: an even number of them for wide heads, and for these alone");
  static_assert(kRow.stages == 2 || (kRow.stages == 1 && kRow.copies > 1), "stages: not 2, or 1 for wide heads");
  static_assert(kRow.tile.m % 16 == 0 && kRow.tile.n % 16 == 0, "tile: not a multiple of 16");
  static_assert(kRow.warps % kRow.warps_s == 0 && kRow.warps % kRow.warps_dk == 0 && kRow.warps % kRow.warps_dq == 0,
                "warps: not a multiple of those along one side of a product");
  static_assert(only(kRow.kernels, kSm80Sets), "kernels: a set of features that sm80 has no code for");
  static_assert(has_kernels(kRow.kernels), "kernels: none");
};

// The head_dim of the rows that a call with these is offered to first: the smallest.
constexpr HeadDims first_rows(HeadDims call) {
  HeadDims first = widest(kSm90Forward);
  for (const Sm90Forward& row : kSm90Forward) {
    const HeadDims d = row.head_dim;
    if (d.qk >= call.qk && d.v >= call.v && (d.qk < first.qk || (d.qk == first.qk && d.v < first.v))) first = d;
  }
  return first;
}
// Whether every tile that calls with these are given is in one of these rows that has a kernel for them.
constexpr bool chosen_tiles_are_there(HeadDims call) {
  const HeadDims head_dim = first_rows(call);
  for (unsigned set = 0; set < kFeatureSets; ++set)
    for (const MaskKind mask : {MaskKind::kDense, MaskKind::kBand, MaskKind::kBlockSparse}) {
      bool serves[std::size(kSm90Forward)] = {}, served = false;
      for (std::size_t i = 0; i < std::size(kSm90Forward); ++i) {
        const Sm90Forward& row = kSm90Forward[i];
        serves[i] = row.head_dim == head_dim && has(row.kernels.serving(static_cast<Features>(set)), mask);
        served = served || serves[i];
      }
      if (!served) continue;  // sm80's
      for (const int seqlen_q : sm90::kChoiceLengths)
        for (const int seqlen_k : sm90::kChoiceLengths) {
          const Tile tile = sm90::choose_forward_tile({call, static_cast<Features>(set), mask, seqlen_q, seqlen_k});
          bool there = false;
          for (std::size_t i = 0; i < std::size(kSm90Forward); ++i)
            there = there || (serves[i] && kSm90Forward[i].tile.m == tile.m && kSm90Forward[i].tile.n == tile.n);
          if (!there) return false;
        }
    }
  return true;
}
// Whether some call with these is given this row's tile.
constexpr bool is_chosen(const Sm90Forward& row, HeadDims call) {
  for (unsigned set = 0; set < kFeatureSets; ++set)
    for (const MaskKind mask : {MaskKind::kDense, MaskKind::kBand, MaskKind::kBlockSparse})
      for (const int seqlen_q : sm90::kChoiceLengths)
        for (const int seqlen_k : sm90::kChoiceLengths) {
          if (row.kernels.masks[set] == kNoMask) continue;
          const Tile tile = sm90::choose_forward_tile({call, static_cast<Features>(set), mask, seqlen_q, seqlen_k});
          if (tile.m == row.tile.m && tile.n == row.tile.n) return true;
        }
  return false;
}
// Whether some call is, of those that its head_dim comes first for.
constexpr bool is_chosen(const Sm90Forward& row) {
  for (int less = 0; less < row.head_dim.qk; less += 8) {
    const HeadDims call(row.head_dim.qk - less, min_of(row.head_dim.v, row.head_dim.qk - less));
    if (first_rows(call) == row.head_dim && is_chosen(row, call)) return true;
  }
  return false;
}
constexpr bool has_backward(HeadDims head_dim) {
  for (const Sm90Backward& row : kSm90Backward)
    if (row.head_dim == head_dim) return true;
  return false;
}

template <Sm90Forward kRow>
struct CheckedSm90Forward {
  static_assert(is_compiled(kRow.head_dim.qk), "head_dim: see kGpuHeadDims");
  static_assert(kRow.tile.m % 64 == 0, "tile.m: not a multiple of 64 rows a warpgroup");
  static_assert(kRow.tile.n % 16 == 0, "tile.n: not a multiple of 16");
  static_assert(kRow.stages_k >= 1 && kRow.stages_v >= 1 && kRow.stages_q >= 1, "stages: less than 1");
  static_assert(smem_bytes(kRow) < kSm90SharedBytes, "stages: more shared memory than a CTA has");
  static_assert(kRow.tile.n % 32 == 0 || kRow.kernels.serving(kDropout) == kNoMask,
                "tile.n: dropout is drawn for 32 keys at once");
  static_assert(registers(kRow) <= kRegisters, "tile.m: more warpgroups than there are registers for");
  static_assert(tile_registers(kRow) < compute_registers(kRow), "tile: S, P and the output fill a thread's registers");
  static_assert(only(kRow.kernels, kSm90Sets), "kernels: a set of features that sm90 has no code for");
  static_assert(of_every_mask(kRow.kernels), "kernels: an sm90 kernel serves every mask");
  static_assert(has_kernels(kRow.kernels), "kernels: none");
  static_assert(is_chosen(kRow), "tile: choose_forward_tile() gives it to no call");
  static_assert(has_backward(kRow.head_dim), "head_dim: no row of kSm90Backward has it");
};

template <HeadDims kCall>
struct CheckedSm90Calls {
  static_assert(chosen_tiles_are_there(kCall),
                "choose_forward_tile(): gives some of these a tile that no row has for their features");
};

template <Sm90Backward kRow>
struct CheckedSm90Backward {
  static_assert(is_compiled(kRow.head_dim.qk), "head_dim: see kGpuHeadDims");
  static_assert(kRow.tile.m % 64 == 0 && kRow.tile.n % 64 == 0, "tile: not a multiple of 64");
  static_assert(kRow.stages_do >= 1 && kRow.stages_k >= 1, "stages: less than 1");
  static_assert(only(kRow.kernels, kSm90Sets), "kernels: a set of features that sm90 has no code for");
  static_assert(of_every_mask(kRow.kernels), "kernels: an sm90 kernel serves every mask");
  static_assert(has_kernels(kRow.kernels), "kernels: none");
};

// Rows with kAll of a head_dim serve every mask: a call is refused for its size or device alone.
template <class Row, std::size_t kRows>
constexpr bool serves_everything(const Row (&rows)[kRows], int head_dim) {
  unsigned masks = kNoMask;
  for (const Row& row : rows)
    if (row.head_dim.qk >= head_dim && row.any_alignment) masks |= row.kernels.of(kAll);
  return masks == kEveryMask;
}
static_assert(serves_everything(kSm80Forward, widest(kSm80Forward).qk) &&
                  serves_everything(kSm80Backward, widest(kSm80Backward).qk) && serves_everything(kSm80Fp8Forward, 256),
              "sm80: no kernel for calls that no other takes");
// The same of those that every GPU has the shared memory for, and of every head_dim: kernels that take any alignment
// keep no tile of a bias, and need nothing beside smem_bytes().
template <class Row, std::size_t kRows>
constexpr bool serves_small_gpus(const Row (&rows)[kRows]) {
  for (const int compiled : kGpuHeadDims) {
    const int head_dim = compiled < widest(rows).qk ? compiled : widest(rows).qk;
    unsigned masks = kNoMask;
    for (const Row& row : rows)
      if (row.head_dim.qk >= head_dim && row.any_alignment && smem_bytes(row) <= kSmallSharedBytes)
        masks |= row.kernels.of(kAll);
    if (masks != kEveryMask) return false;
  }
  return true;
}
static_assert(serves_small_gpus(kSm80Forward) && serves_small_gpus(kSm80Backward) && serves_small_gpus(kSm80Fp8Forward),
              "sm80: no kernel for some calls on GPUs with the least shared memory");

// Whether two rows have a kernel of one name: it has the head_dim, the tile and the features.
template <class Row>
constexpr bool share_a_kernel(const Row& a, const Row& b) {
  if (a.head_dim != b.head_dim || a.tile.m != b.tile.m || a.tile.n != b.tile.n) return false;
  if constexpr (requires { a.any_alignment; })
    if (a.any_alignment != b.any_alignment) return false;
  for (unsigned set = 0; set < kFeatureSets; ++set)
    if (a.kernels.masks[set] != kNoMask && b.kernels.masks[set] != kNoMask) return true;
  return false;
}
template <class Row, std::size_t kRows>
constexpr int times(const Row (&rows)[kRows], const Row& row) {
  int times = 0;
  for (const Row& other : rows) times += share_a_kernel(row, other) ? 1 : 0;
  return times;
}
template <auto kRow, int kTimes>
struct CheckedAlone {
  static_assert(kTimes == 1, "tile: another row has it, with a set of features of this one");
};

template <int kHeadDim>
struct CheckedCpuHeadDim {
  static_assert(kHeadDim % 64 == 0, "head_dim: not a multiple of 64, of which packed rows are made");
  static_assert(cpu_has(kHeadDim, kAll), "head_dim: no kernel of it takes calls with features");
};
template <int kBefore, int kHeadDim>
struct CheckedCpuHeadDims {
  static_assert(kBefore < kHeadDim, "head_dim: not larger than the one before");
};

// One check a row.
constexpr auto each(auto check) {
  return [check]<std::size_t... kIndices>(std::index_sequence<kIndices...>) {
    (check(std::integral_constant<std::size_t, kIndices>()), ...);
  };
}
// And that no row of a table has a kernel of another.
template <const auto& kTable>
constexpr void check_rows(auto check_row) {
  each([check_row](auto i) {
    check_row(i);
    CheckedAlone<kTable[i], times(kTable, kTable[i])>();
  })(std::make_index_sequence<std::size(kTable)>());
}
constexpr void check_tables() {
  check_rows<kSm80Forward>([](auto i) { CheckedSm80Forward<kSm80Forward[i]>(); });
  check_rows<kSm80SplitForward>([](auto i) { CheckedSm80Forward<kSm80SplitForward[i]>(); });
  check_rows<kSm80Fp8Forward>([](auto i) { CheckedSm80Fp8Forward<kSm80Fp8Forward[i]>(); });
  check_rows<kSm80Fp8SplitForward>([](auto i) { CheckedSm80Fp8SplitForward<kSm80Fp8SplitForward[i]>(); });
  check_rows<kSm80Backward>([](auto i) { CheckedSm80Backward<kSm80Backward[i]>(); });
  check_rows<kSm90Forward>([](auto i) { CheckedSm90Forward<kSm90Forward[i]>(); });
  each([](auto i) {
    constexpr int kHeadDim = 8 * (i + 1);
    CheckedSm90Calls<kHeadDim>();
    CheckedSm90Calls<HeadDims(kHeadDim, 128)>();  // with q and k wider than v, or narrower
  })(std::make_index_sequence<widest(kSm90Forward).qk / 8>());
  check_rows<kSm90Backward>([](auto i) { CheckedSm90Backward<kSm90Backward[i]>(); });
  each([](auto i) {
    CheckedCpuHeadDim<kCpuHeadDims[i]>();
    if constexpr (i > 0) CheckedCpuHeadDims<kCpuHeadDims[i - 1], kCpuHeadDims[i]>();
  })(std::make_index_sequence<std::size(kCpuHeadDims)>());
}

}  // namespace flashsdk::table
