// The table of sm80 kernels on GPUs that are not here: one that fits is found for every call, whatever the card has.
// Entries are made of the table's rows. Of a device they ask what those in sm80/launch.h ask, of one made up here.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "kernel_registry.h"
#include "table/sm80.h"

namespace flashsdk::testing {
namespace {

using namespace table;

struct Card {
  int capability;    // its name: all of them are 8.0 or newer, which is what sm80's kernels ask
  int shared_bytes;  // that a thread block may opt in to
};
constexpr Card kCards[] = {{80, 163 * 1024},  {86, 99 * 1024},   {89, 99 * 1024},
                           {100, 227 * 1024}, {103, 227 * 1024}, {120, 99 * 1024}};
constexpr Features kSets[] = {kNone, kDropout, kSoftcap, kCapped, kBias, kBiasDropout, kAlibi, kAll};

// What the entries are asked of: a function of theirs knows its row and the call alone.
struct {
  Card card;
  bool aligned;  // whether the call's tensors are
} g_asked;

// A tile of a bias comes on top of the others; kernels that take any alignment keep none.
template <class Row>
const char* refuse(const Row& row, Features features, const ForwardParams& p) {
  if (missing(features, p.score.features()) != kNone) return "features";
  if (p.mask.kind == MaskKind::kBlockSparse && (p.mask.block_q % row.tile.m != 0 || p.mask.block_k % row.tile.n != 0))
    return "blocks";
  if (!row.any_alignment && !g_asked.aligned) return "alignment";
  const bool keeps_bias = !row.any_alignment && has_bias(p.score.features());
  const int bytes = smem_bytes(row) + (keeps_bias ? 2 * row.tile.m * row.tile.n : 0);
  return bytes > g_asked.card.shared_bytes ? "shared memory" : nullptr;
}

template <class Params, const auto& kTable, std::size_t kIndex, Features kFeatures>
void add_entries(std::vector<KernelEntry<Params>>& entries, bool fp8_kv) {
  constexpr auto kRow = kTable[kIndex];
  for (const MaskKind mask : {MaskKind::kDense, MaskKind::kBand, MaskKind::kBlockSparse})
    for (const DType dtype : kGpuDTypes)
      if (has(kRow.kernels.of(kFeatures), mask))
        entries.push_back({{Backend::kSm80, "sm_80", dtype, kRow.head_dim.qk, kRow.head_dim.v, mask, kFeatures,
                            kRow.any_alignment, false, fp8_kv},
                           kRow.tile,
                           [](const Params& p) { return refuse(kTable[kIndex], kFeatures, p); },
                           nullptr,
                           nullptr});
}
// Of all rows of a table.
template <class Params, const auto& kTable>
void add_table(std::vector<KernelEntry<Params>>& entries, bool fp8_kv = false) {
  [&]<std::size_t... kIndices>(std::index_sequence<kIndices...>) {
    const auto add_row = [&]<std::size_t kIndex>(std::integral_constant<std::size_t, kIndex>) {
      add_entries<Params, kTable, kIndex, kNone>(entries, fp8_kv);
      add_entries<Params, kTable, kIndex, kDropout>(entries, fp8_kv);
      add_entries<Params, kTable, kIndex, kAlibi>(entries, fp8_kv);
      add_entries<Params, kTable, kIndex, kBias>(entries, fp8_kv);
      add_entries<Params, kTable, kIndex, kAll>(entries, fp8_kv);
    };
    (add_row(std::integral_constant<std::size_t, kIndices>()), ...);
  }(std::make_index_sequence<std::size(kTable)>());
}

const KernelRegistry& registry() {
  static const KernelRegistry made = [] {
    KernelEntries entries;
    add_table<ForwardParams, kSm80Forward>(entries.forward);
    add_table<ForwardParams, kSm80Fp8Forward>(entries.forward, true);
    add_table<BackwardParams, kSm80Backward>(entries.backward);
    return KernelRegistry(entries, "");
  }();
  return made;
}

template <class Params>
Params problem(int head_dim, DType dtype, MaskKind mask, Features features, int block = 64) {
  static const float some = 0;
  Params p;
  p.device = {DeviceType::kCUDA, 0};
  p.dtype = p.dtype_kv = dtype;
  p.head_dim = head_dim;
  p.head_dim_v = std::min(head_dim, 512);
  p.mask.kind = mask;
  p.mask.block_q = p.mask.block_k = block;
  if (has_softcap(features)) p.score.softcap = 1;
  if (has_bias(features)) p.score.bias.ptr = &some;
  if (has_alibi(features)) p.score.alibi_slopes = &some;
  if (has_dropout(features)) p.score.dropout.threshold = 1;
  return p;
}

// Every call of a head_dim on every card has a kernel.
template <class Params>
void expect_kernels(int head_dim, bool fp8_kv = false) {
  for (const Card& card : kCards)
    for (const bool aligned : {false, true})
      for (const DType dtype : kGpuDTypes)
        for (const MaskKind mask : {MaskKind::kDense, MaskKind::kBand, MaskKind::kBlockSparse})
          for (const Features features : kSets)
            for (const int block : {16, 64, 128}) {
              g_asked = {card, aligned};
              Params p = problem<Params>(head_dim, dtype, mask, features, block);
              if (fp8_kv) p.dtype_kv = DType::kFloat8E4M3;
              ASSERT_NE(registry().explain(p, {}).kernel, "")
                  << "capability " << card.capability << ", head_dim " << head_dim << ", mask "
                  << static_cast<int>(mask) << ", blocks of " << block << ", features "
                  << static_cast<unsigned>(features) << (aligned ? ", aligned" : "");
            }
}

TEST(SmallGpus, EveryForwardHasAKernel) {
  for (const int head_dim : {1, 32, 33, 64, 80, 96, 128, 160, 192, 256, 257, 512, 576})
    expect_kernels<ForwardParams>(head_dim);
}

TEST(SmallGpus, EveryBackwardHasAKernel) {
  for (const int head_dim : {1, 32, 33, 64, 80, 96, 128, 160, 192, 256, 257, 512})
    expect_kernels<BackwardParams>(head_dim);
}

TEST(SmallGpus, EveryForwardWithFp8KeysHasAKernel) {
  for (const int head_dim : {1, 64, 65, 128, 192, 256}) expect_kernels<ForwardParams>(head_dim, true);
}

template <class Params>
std::string taken(const Card& card, int head_dim, Features features = kNone) {
  g_asked = {card, true};
  return registry().explain(problem<Params>(head_dim, DType::kBFloat16, MaskKind::kDense, features), {}).kernel;
}

TEST(SmallGpus, ThoseWithLessSharedMemoryTakeSmallerTiles) {
  const Card small{120, 99 * 1024}, large{100, 227 * 1024};
  EXPECT_EQ(taken<ForwardParams>(small, 256), "sm80_bf16_d256_dense_64x64_fwd");
  EXPECT_EQ(taken<ForwardParams>(small, 256, kBias), "sm80_bf16_d256_dense_features_unaligned_64x64_fwd");
  EXPECT_EQ(taken<ForwardParams>(large, 256, kBias), "sm80_bf16_d256_dense_bias_64x64_fwd");
  EXPECT_EQ(taken<BackwardParams>(small, 256), "sm80_bf16_d256_dense_features_unaligned_16x32_bwd");
  EXPECT_EQ(taken<BackwardParams>(large, 256), "sm80_bf16_d256_dense_64x64_bwd");
  EXPECT_EQ(taken<ForwardParams>(small, 576), "sm80_bf16_d576x512_dense_features_unaligned_16x16_fwd");
}

TEST(SmallGpus, ACardWithLessThanAnyHasNone) {
  EXPECT_EQ(taken<ForwardParams>({120, 48 * 1024}, 576), "");
  EXPECT_EQ(taken<BackwardParams>({120, 48 * 1024}, 256), "");
}

}  // namespace
}  // namespace flashsdk::testing
