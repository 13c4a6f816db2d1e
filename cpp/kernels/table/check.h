// What every row of the tables promises, checked where it is compiled: a message names the row by its values.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <type_traits>
#include <utility>

#include "sm90/forward/tiles.h"
#include "table/choose.h"
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

// Of a CTA: a warpgroup for each 64 rows, and one that loads.
constexpr int registers(const Sm90Forward& row) {
  return 128 * (row.tile.m / 64 * registers_of(row).compute + registers_of(row).load);
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
template <auto kRow>  // Sm80FewRowsForward, or Sm80Fp8SplitForward
struct CheckedSm80FewRows {
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

// ---- the kernels of the tables, as the registry has them, and what calls find there

struct TableKernel {
  KernelKey of;
  Tile tile;
  int smem_bytes;
  std::size_t position, row;
  constexpr const KernelKey& key() const { return of; }
};

// Of a backend. GPU kernels are the same for both dtypes.
class TableKernels {
 public:
  template <class Row, std::size_t kRows, std::size_t kSets>
  constexpr TableKernels& add(Backend backend, const Row (&rows)[kRows], const Features (&sets)[kSets],
                              bool splits_keys = false, bool fp8_kv = false) {
    for (const Features set : sets)
      for (std::size_t i = 0; i < kRows; ++i)
        for (const MaskKind mask : kMaskKinds) {
          const Row& row = rows[i];
          if (!has(row.kernels.of(set), mask)) continue;
          bool any_alignment = false;
          if constexpr (requires { row.any_alignment; }) any_alignment = row.any_alignment;
          int bytes = 0;
          if constexpr (requires { smem_bytes(row); }) bytes = smem_bytes(row);
          add({{backend, "", DType::kBFloat16, row.head_dim.qk, row.head_dim.v, mask, set, any_alignment, splits_keys,
                fp8_kv},
               row.tile,
               bytes,
               count_,
               i});
        }
    return *this;
  }
  constexpr void add(const TableKernel& kernel) {
    all_[count_] = kernel;
    ++count_;
  }
  constexpr std::size_t count() const { return count_; }
  constexpr std::size_t count(MaskKind mask) const {
    std::size_t count = 0;
    for (std::size_t i = 0; i < count_; ++i) count += all_[i].of.mask == mask;
    return count;
  }
  constexpr const TableKernel& operator[](std::size_t i) const { return all_[i]; }

  static constexpr MaskKind kMaskKinds[] = {MaskKind::kDense, MaskKind::kBand, MaskKind::kBlockSparse};

 private:
  std::array<TableKernel, 256> all_{};
  std::size_t count_ = 0;
};

constexpr TableKernels sm80_forward_kernels() {
  return TableKernels()
      .add(Backend::kSm80, kSm80Forward, kSm80Sets)
      .add(Backend::kSm80, kSm80FewRowsForward, kSm80Sets, true)
      .add(Backend::kSm80, kSm80SplitForward, kSm80Sets, true)
      .add(Backend::kSm80, kSm80Fp8Forward, kSm80Sets, false, true)
      .add(Backend::kSm80, kSm80Fp8SplitForward, kSm80Sets, true, true);
}
constexpr TableKernels cpu_kernels() {
  TableKernels kernels;
  for (const DType dtype : kCpuDTypes)
    for (const int head_dim : kCpuHeadDims)
      for (const MaskKind mask : TableKernels::kMaskKinds)
        for (const Features set : kCpuFeatures)
          if (cpu_has(head_dim, set))
            kernels.add({{Backend::kCpu, "", dtype, head_dim, head_dim, mask, set}, {}, 0, kernels.count(), 0});
  return kernels;
}

inline constexpr TableKernels kSm80ForwardKernels = sm80_forward_kernels(), kCpuKernels = cpu_kernels();
inline constexpr TableKernels kSm80BackwardKernels = TableKernels().add(Backend::kSm80, kSm80Backward, kSm80Sets);
inline constexpr TableKernels kSm90ForwardKernels = TableKernels().add(Backend::kSm90, kSm90Forward, kSm90Sets);

// Those of a mask, in the order in which calls ask them.
template <const TableKernels& kKernels, MaskKind kMask>
inline constexpr auto kAsked = [] {
  std::array<const TableKernel*, kKernels.count(kMask)> kernels{};
  for (std::size_t i = 0, n = 0; i < kKernels.count(); ++i)
    if (kKernels[i].of.mask == kMask) kernels[n++] = &kKernels[i];
  std::sort(kernels.begin(), kernels.end(), [](const TableKernel* a, const TableKernel* b) {
    return Asked(a->of, 0, a->position) < Asked(b->of, 0, b->position);
  });
  return kernels;
}();

// The first kernel of those that `takes` a call, of those that have its features compiled in.
template <const TableKernels& kKernels, class Takes>
constexpr const TableKernel* chosen(const Call& call, Takes takes) {
  const auto takes_it = [&](const TableKernel& kernel) {
    return missing(kernel.of.features, call.features) == kNone && takes(kernel);
  };
  switch (call.mask) {
    case MaskKind::kDense:
      return choose(kAsked<kKernels, MaskKind::kDense>, call, takes_it);
    case MaskKind::kBand:
      return choose(kAsked<kKernels, MaskKind::kBand>, call, takes_it);
    case MaskKind::kBlockSparse:
      return choose(kAsked<kKernels, MaskKind::kBlockSparse>, call, takes_it);
  }
  return nullptr;
}

// Whether `holds` of every call with these head_dims.
template <class Holds>
constexpr bool of_every_call(const Call& of, Holds holds) {
  for (unsigned set = 0; set < kFeatureSets; ++set)
    for (const MaskKind mask : TableKernels::kMaskKinds) {
      Call call = of;
      call.features = static_cast<Features>(set);
      call.mask = mask;
      if (!holds(call)) return false;
    }
  return true;
}
constexpr Call sm90_call(HeadDims head_dim) {
  return {DType::kBFloat16, false, head_dim, MaskKind::kDense, kNone, false};
}

// Whether calls of a head_dim have an sm80 kernel whatever their tensors, blocks and device: one that takes all
// features, any alignment and the smallest blocks of a layout, with no more shared memory than every GPU has. Such
// kernels keep no tile of a bias, and need nothing beside smem_bytes().
template <const TableKernels& kKernels>
constexpr bool serves_everything(HeadDims head_dim, bool fp8_kv = false) {
  for (const MaskKind mask : TableKernels::kMaskKinds) {
    const TableKernel* taken =
        chosen<kKernels>({DType::kBFloat16, fp8_kv, head_dim, mask, kAll, false}, [&](const TableKernel& kernel) {
          const bool any_block = mask != MaskKind::kBlockSparse || (kernel.tile.m == 16 && kernel.tile.n == 16);
          return kernel.of.fp8_kv == fp8_kv && !kernel.of.splits_keys && kernel.of.any_alignment && any_block &&
                 kernel.smem_bytes <= kSmallSharedBytes;
        });
    if (taken == nullptr) return false;
  }
  return true;
}
template <int kHeadDim>
struct CheckedSm80Calls {
  static constexpr HeadDims kForward{kHeadDim, std::min(kHeadDim, widest(kSm80Forward).v)};
  static_assert(serves_everything<kSm80ForwardKernels>(kForward),
                "kSm80Forward: no kernel for calls that no other takes");
  static_assert(serves_everything<kSm80BackwardKernels>(std::min(kHeadDim, widest(kSm80Backward).qk)),
                "kSm80Backward: no kernel for calls that no other takes");
  static_assert(kHeadDim > 256 || serves_everything<kSm80ForwardKernels>(kHeadDim, true),
                "kSm80Fp8Forward: no kernel for calls that no other takes");
};

// The sm90 kernel that a call of these lengths is given is the first that has this tile: no other is taken.
constexpr const TableKernel* chosen_sm90(const Call& call, Tile tile) {
  return chosen<kSm90ForwardKernels>(
      call, [&](const TableKernel& kernel) { return kernel.tile.m == tile.m && kernel.tile.n == tile.n; });
}
// Whether `holds` of a tile that choose_forward_tile() gives the call, for some lengths. Each is asked about once.
template <class Holds>
constexpr bool of_some_tile(const Call& call, Holds holds) {
  Tile asked_about[std::size(sm90::kChoiceLengths)];
  std::size_t tiles = 0;
  for (const int seqlen_q : sm90::kChoiceLengths)
    for (const int seqlen_k : sm90::kChoiceLengths) {
      const Tile tile = sm90::choose_forward_tile({call.head_dim, call.features, call.mask, seqlen_q, seqlen_k});
      bool known = false;
      for (std::size_t i = 0; i < tiles; ++i)
        known = known || (asked_about[i].m == tile.m && asked_about[i].n == tile.n);
      if (known) continue;
      if (holds(tile)) return true;
      asked_about[tiles++] = tile;
    }
  return false;
}
// A call is given a tile of the head_dim that it asks first: never one that is in no row, which would leave it to sm80,
// nor one that only rows of a larger head_dim have.
template <int kHeadDim, int kHeadDimV>
struct CheckedSm90Calls {
  static constexpr bool has_its_tiles(const Call& call) {
    const TableKernel* first = chosen<kSm90ForwardKernels>(call, [](const TableKernel&) { return true; });
    return first == nullptr || !of_some_tile(call, [&](Tile tile) {
             const TableKernel* kernel = chosen_sm90(call, tile);
             return kernel == nullptr || kernel->of.head_dim != first->of.head_dim;
           });
  }
  static constexpr bool kHasNone = kHeadDim > widest(kSm90Forward).qk || kHeadDimV > widest(kSm90Forward).v;
  static_assert(kHasNone || of_every_call(sm90_call({kHeadDim, kHeadDimV}), has_its_tiles),
                "choose_forward_tile(): gives calls of these head_dims a tile that no row of theirs has");
};
// Whether some call takes a kernel of this row.
constexpr bool is_chosen(std::size_t row) {
  const Sm90Forward& of = kSm90Forward[row];
  return !of_every_call(sm90_call(of.head_dim), [&](const Call& call) {
    return !has(of.kernels.of(call.features), call.mask) || !of_some_tile(call, [&](Tile tile) {
      const TableKernel* kernel = chosen_sm90(call, tile);
      return kernel != nullptr && kernel->row == row;
    });
  });
}
constexpr bool has_backward(HeadDims head_dim) {
  for (const Sm90Backward& row : kSm90Backward)
    if (row.head_dim == head_dim) return true;
  return false;
}

template <Sm90Forward kRow, std::size_t kIndex>
struct CheckedSm90Forward {
  static_assert(is_compiled(kRow.head_dim.qk), "head_dim: see kGpuHeadDims");
  static_assert(kRow.tile.m % 64 == 0, "tile.m: not a multiple of 64 rows a warpgroup");
  static_assert(kRow.tile.n % 16 == 0, "tile.n: not a multiple of 16");
  static_assert(kRow.stages_k >= 1 && kRow.stages_v >= 1 && kRow.stages_q >= 1, "stages: less than 1");
  static_assert(smem_bytes(kRow) < kSm90SharedBytes, "stages: more shared memory than a CTA has");
  static_assert(kRow.tile.n % 32 == 0 || kRow.kernels.serving(kDropout) == kNoMask,
                "tile.n: dropout is drawn for 32 keys at once");
  static_assert(registers(kRow) <= kRegisters, "tile.m: more warpgroups than there are registers for");
  static_assert(registers_of(kRow).tile < registers_of(kRow).compute,
                "tile: S, P and the output fill a thread's registers");
  static_assert(only(kRow.kernels, kSm90Sets), "kernels: a set of features that sm90 has no code for");
  static_assert(of_every_mask(kRow.kernels), "kernels: an sm90 kernel serves every mask");
  static_assert(has_kernels(kRow.kernels), "kernels: none");
  static_assert(is_chosen(kIndex), "tile: choose_forward_tile() gives it to no call");
  static_assert(has_backward(kRow.head_dim), "head_dim: no row of kSm90Backward has it");
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

constexpr bool cpu_serves_everything(int head_dim) {
  for (const DType dtype : kCpuDTypes)
    if (!of_every_call({dtype, false, head_dim, MaskKind::kDense, kNone, true}, [](const Call& call) {
          const TableKernel* kernel = chosen<kCpuKernels>(call, [](const TableKernel&) { return true; });
          return kernel != nullptr && kernel->of.head_dim == call.head_dim.qk;
        }))
      return false;
  return true;
}
template <int kHeadDim>
struct CheckedCpuHeadDim {
  static_assert(kHeadDim % 64 == 0, "head_dim: not a multiple of 64, of which packed rows are made");
  static_assert(cpu_serves_everything(kHeadDim), "head_dim: no kernel of it takes some calls");
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
// And that no row of a table has a kernel of another. auto: what is wrong with a row is told ahead of what follows from
// it, as the compiler cannot put off a body whose type it has to know.
template <const auto& kTable>
constexpr auto check_rows(auto check_row) {
  each([check_row](auto i) {
    check_row(i);
    CheckedAlone<kTable[i], times(kTable, kTable[i])>();
  })(std::make_index_sequence<std::size(kTable)>());
}
constexpr void check_tables() {
  check_rows<kSm80Forward>([](auto i) { CheckedSm80Forward<kSm80Forward[i]>(); });
  check_rows<kSm80SplitForward>([](auto i) { CheckedSm80Forward<kSm80SplitForward[i]>(); });
  check_rows<kSm80Fp8Forward>([](auto i) { CheckedSm80Fp8Forward<kSm80Fp8Forward[i]>(); });
  check_rows<kSm80FewRowsForward>([](auto i) { CheckedSm80FewRows<kSm80FewRowsForward[i]>(); });
  check_rows<kSm80Fp8SplitForward>([](auto i) { CheckedSm80FewRows<kSm80Fp8SplitForward[i]>(); });
  check_rows<kSm80Backward>([](auto i) { CheckedSm80Backward<kSm80Backward[i]>(); });
  check_rows<kSm90Forward>([](auto i) { CheckedSm90Forward<kSm90Forward[i], i>(); });
  check_rows<kSm90Backward>([](auto i) { CheckedSm90Backward<kSm90Backward[i]>(); });
  constexpr std::size_t kSizes = std::size(kGpuHeadDims);
  each([](auto i) { CheckedSm80Calls<kGpuHeadDims[i]>(); })(std::make_index_sequence<kSizes>());
  each([](auto i) { CheckedSm90Calls<kGpuHeadDims[i / kSizes], kGpuHeadDims[i % kSizes]>(); })(
      std::make_index_sequence<kSizes * kSizes>());
  each([](auto i) { CheckedSm90Calls<8 * (i + 1), 8 * (i + 1)>(); })(  // those between the rows, too
      std::make_index_sequence<widest(kSm90Forward).qk / 8>());
  each([](auto i) {
    CheckedCpuHeadDim<kCpuHeadDims[i]>();
    if constexpr (i > 0) CheckedCpuHeadDims<kCpuHeadDims[i - 1], kCpuHeadDims[i]>();
  })(std::make_index_sequence<std::size(kCpuHeadDims)>());
}

}  // namespace flashsdk::table
