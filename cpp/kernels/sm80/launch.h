// From a kernel template to a row of the kernel table: what it takes, its workspace, its launch.
#pragma once

#include <atomic>
#include <cstdint>

#include <cuda_runtime.h>

#include "common/kernel_entry.h"
#include "cuda/host/batch_parts.h"
#include "cuda/host/device.h"
#include "cuda/host/launch.h"
#include "cuda/pass/sink_gradient.h"
#include "cuda/pass/unused_rows.h"
#include "cuda/tile/element.h"
#include "sm80/backward.h"
#include "sm80/few_rows.h"
#include "sm80/forward.h"
#include "sm80/fp8_forward.h"
#include "sm80/join_parts.h"
#include "sm80/row_scores.h"
#include "sm80/wide_backward.h"

namespace flashsdk::sm80 {

using cuda::allow_shared_memory;
using cuda::kDType;

constexpr const char* kArch = "sm_80";

// Whether all of a call's tensors come in whole vectors of 16 bytes.
inline bool vector_aligned(const ForwardParams& p) {
  bool aligned = true;
  for (const TensorParam* t : {&p.q, &p.k, &p.v, &p.out}) aligned = aligned && cuda::vector_aligned(*t);
  if (p.fp8_kv())
    for (const TensorParam* t : {&p.k, &p.v}) aligned = aligned && cuda::fp8_vector_aligned(*t);
  return aligned;
}
inline bool vector_aligned(const BackwardParams& p) {
  bool aligned = vector_aligned(static_cast<const ForwardParams&>(p));
  for (const TensorParam* t : {&p.dout, &p.dq, &p.dk, &p.dv}) aligned = aligned && cuda::vector_aligned(*t);
  return aligned;
}

// Thread blocks that a call takes, a part of the keys each counted once.
template <class Traits>
std::int64_t grid_size(const ForwardParams& p) {
  return std::int64_t{ceil_div(p.seqlen_q, Traits::kBlockM)} * p.num_heads * p.batch;
}
template <class Traits>
std::int64_t grid_size(const BackwardParams& p) {
  return std::int64_t{ceil_div(p.seqlen_k, Traits::kBlockN)} * p.num_heads_kv * p.batch;
}

// Null, or why kernels of this tile and size do not take the problem.
template <class Traits, cuda::Features kFeatures, class Params>
const char* refuse(const Params& p, int shared_bytes) {
  static_assert(kFeatures != cuda::Features::kBiasDropout, "kernels with all features take these");
  if (const char* reason = cuda::refuse_dtype_kv(p, Traits::kFp8Kv)) return reason;
  if (const char* reason = cuda::refuse_features<kFeatures>(p.score)) return reason;
  if (p.head_dim > Traits::kHeadDim || p.head_dim_v > Traits::kHeadDimV) return "head_dim is larger than the kernel's";
  if (p.mask.kind == MaskKind::kBlockSparse &&
      (p.mask.block_q % Traits::kBlockM != 0 || p.mask.block_k % Traits::kBlockN != 0)) {
    return "the mask's blocks are not multiples of the kernel's tile";
  }
  if constexpr (!Traits::kAnyAlignment) {
    if (p.head_dim % cuda::kVectorElements != 0 || p.head_dim_v % cuda::kVectorElements != 0)
      return "head_dim is not a multiple of 8";
    if (Traits::kFp8Kv && (p.head_dim % cuda::kFp8Vector != 0 || p.head_dim_v % cuda::kFp8Vector != 0))
      return "head_dim is not a multiple of 16, as vectors of float8_e4m3fn are";
    if (!vector_aligned(p)) return "a tensor's address or strides are not multiples of 16 bytes";
  }
  if (grid_size<Traits>(p) > INT32_MAX) return "there are more tiles than a grid has blocks";
  const cuda::DeviceLimits& device = cuda::device_limits(p.device.index);
  if (device.capability < 80) return "the device is older than compute capability 8.0";
  if (device.shared_memory_per_block < shared_bytes) return "the device has too little shared memory";
  // Last: of a call without a bias any other reason says more.
  if constexpr (kFeatures == cuda::Features::kBias) return cuda::refuse_bias<typename Traits::Element>(p.score.bias);
  return nullptr;
}

template <class Traits, class Policy, cuda::Features kFeatures>
KernelKey key_of(bool splits_keys = false) {
  return {Backend::kSm80,
          kArch,
          kDType<typename Traits::Element>,
          Traits::kHeadDim,
          Traits::kHeadDimV,
          Policy::kKind,
          kFeatures,
          Traits::kAnyAlignment,
          splits_keys,
          Traits::kFp8Kv};
}

template <class Traits, class Policy, cuda::Features kFeatures, class Keys>
constexpr auto forward_kernel_of() {
  if constexpr (kDealsKeys<Traits>) {
    return few_rows_forward_kernel<Traits, Policy, kFeatures>;
  } else if constexpr (Traits::kFp8Kv) {
    return fp8_forward_kernel<Traits, Policy, kFeatures, Keys>;
  } else {
    return forward_kernel<Traits, Policy, kFeatures, Keys>;
  }
}

// A bias takes shared memory, calls without one keep it for another thread block.
template <class Traits, cuda::Features kFeatures, class Keys>
int forward_smem_bytes(const ForwardParams& p) {
  using Bias = ForwardBias<Traits, kFeatures, Keys>;
  return Traits::kSmemBytes + (Bias::takes(p.score.bias) ? Bias::kBytes : 0);
}

// Whether calls that ask for no feature take these kernels: those that kernels without features refuse. Of fp8 keys and
// values they are few, and do with what is compiled in.
template <class Traits, class Policy, cuda::Features kFeatures>
inline constexpr bool kTakesPlainCalls = kFeatures == cuda::Features::kAll && !kHasScore<Policy> && !Traits::kFp8Kv &&
                                         (Traits::kAnyAlignment || std::is_same_v<Policy, BlockSparsePolicy>);

// Starts the forward kernel on as many parts of the keys as `keys` says. tiles: p, with the heads and rows of tiles.
template <class Traits, class Policy, cuda::Features kFeatures, class Keys>
void start_forward(const ForwardParams& p, cudaStream_t stream, const ForwardParams& tiles, const Keys& keys,
                   int parts) {
  static std::atomic<std::uint64_t> prepared{0};
  auto kernel = forward_kernel_of<Traits, Policy, kFeatures, Keys>();
  using Bias = ForwardBias<Traits, kFeatures, Keys>;
  allow_shared_memory(kernel, Traits::kSmemBytes + Bias::kBytes, p.device.index, prepared);
  constexpr std::size_t kKeyBytes = Traits::kFp8Kv ? 1 : sizeof(typename Traits::Element);
  const cuda::TileSchedule schedule =
      cuda::forward_schedule(tiles, Traits::kBlockM, kKeyBytes, p.mask.kind == MaskKind::kDense);
  if (schedule.size() == 0) return;
  cuda::launch("launching the forward kernel", kernel,
               dim3(static_cast<unsigned>(schedule.size()), static_cast<unsigned>(parts)), Traits::kThreads,
               forward_smem_bytes<Traits, kFeatures, Keys>(p), stream, p, schedule, keys);
}

template <class Traits, class Policy, cuda::Features kFeatures>
void launch_forward(const ForwardParams& p, const LaunchContext& context) {
  if constexpr (kTakesPlainCalls<Traits, Policy, kFeatures>) {
    // What is compiled in and not asked for still takes registers (docs/dev/gpu.md): such a call does without.
    if (!p.score.any_feature()) return launch_forward<Traits, Policy, cuda::Features::kNone>(p, context);
  }
  cuda::DeviceGuard guard(p.device.index);
  auto stream = static_cast<cudaStream_t>(context.stream);
  start_forward<Traits, Policy, kFeatures>(p, stream, p, AllKeys{}, 1);
  cuda::clear_unused_rows<typename Traits::Element>(p, stream);
}

template <class Traits, class Policy, cuda::Features kFeatures>
ForwardEntry forward_entry() {
  return {key_of<Traits, Policy, kFeatures>(), flashsdk::Tile{Traits::kBlockM, Traits::kBlockN},
          [](const ForwardParams& p) {
            return refuse<Traits, kFeatures>(p, forward_smem_bytes<Traits, kFeatures, AllKeys>(p));
          },
          [](const ForwardParams&, int) { return std::size_t{0}; }, launch_forward<Traits, Policy, kFeatures>};
}

template <class Traits>
SplitDevice split_device(int index) {
  constexpr int kReserved = 1024;  // bytes of shared memory that the driver takes of each thread block's
  const cuda::DeviceLimits& device = cuda::device_limits(index);
  const int each =
      min_of(device.shared_memory_per_multiprocessor / (Traits::kSmemBytes + kReserved), Traits::kMinBlocks);
  return {device.multiprocessors, each, device.memory_rate > 0 ? device.memory_rate : kUsualMemoryRate};
}

// Whether calls with v in the memory of k have a kernel of their own here. Where all that read a key are few rows, none
// other is as fast.
template <class Traits, cuda::Features kFeatures>
inline constexpr bool kHasValuesInKeys =
    Traits::kColumnWarps > 1 && !Traits::kValuesInKeys && kFeatures == cuda::Features::kNone;
template <class Traits, cuda::Features kFeatures>
bool takes_all_of_few_rows(const ForwardParams& p) {
  constexpr int kManyKeys = 512;
  return kHasValuesInKeys<Traits, kFeatures> && values_in_keys(p) && p.seqlen_k >= kManyKeys && p.seqlen_q > 0 &&
         p.batch > 0 && std::int64_t{p.batch} * p.num_heads_kv <= kMostTiles &&
         p.heads_per_group() == heads_sharing(p) && std::int64_t{p.seqlen_q} * heads_sharing(p) <= kMostWideRows;
}

template <class Traits>
inline constexpr flashsdk::Tile kSplitTile{Traits::kBlockM, Traits::kTileKeys};

// Whether the forward kernel itself writes the output, where it has all keys of a query.
template <class Traits>
bool writes_output(const ForwardParams& p, const KeyParts& parts) {
  const bool can = kDealsKeys<Traits> || (Traits::kFp8Kv && heads_sharing(p) == 1);
  return can && parts.planned == 0 && parts.most == 1;
}

template <class Traits, cuda::Features kFeatures>
KeyParts key_parts(const ForwardParams& p) {
  if constexpr (Traits::kAnyAlignment) {
    if (!can_join(p)) return {};
  }
  const float others_key = takes_all_of_few_rows<Traits, kFeatures>(p) ? kNoOthers
                           : Traits::kColumnWarps > 1                  ? kOthersWideKey
                                                                       : kOthersKey;
  return key_parts(p, heads_sharing(p), kSplitTile<Traits>, split_device<Traits>(p.device.index), others_key);
}

// OfEntry: the traits that the parts are counted by, those of the call's row.
template <class Traits, class Policy, cuda::Features kFeatures, class OfEntry = Traits>
void launch_split_forward(const ForwardParams& p, const LaunchContext& context) {
  static_assert(plan_smem_bytes(Traits::kThreads) <= Traits::kSmemBytes, "take_part() plans in the place of the keys");
  if constexpr (kHasValuesInKeys<Traits, kFeatures>) {
    if (values_in_keys(p))
      return launch_split_forward<typename Traits::WithValuesInKeys, Policy, kFeatures, Traits>(p, context);
  }
  cuda::DeviceGuard guard(p.device.index);
  auto stream = static_cast<cudaStream_t>(context.stream);
  const KeyParts parts = key_parts<OfEntry, kFeatures>(p);
  KeySplit split(p, parts, context.workspace);
  ForwardParams tiles = p;
  tiles.num_heads = split.heads;
  tiles.seqlen_q = split.rows_of_head;
  if (parts.planned > 0) {
    constexpr flashsdk::Tile kTile = kSplitTile<Traits>;
    const SplitDevice device = split_device<OfEntry>(p.device.index);
    split.plan = {kTile.n, visible_keys(p, kTile), tiles_of_head(p, split.shared.heads, kTile), kDealsKeys<Traits>,
                  // Of fp8 as if all had a multiprocessor alone: a few are not as fast as many.
                  Traits::kFp8Kv ? SplitDevice{device.slots(), 1, device.memory_rate} : device, FewRowsCosts(device)};
    tiles.batch = 1;  // sequences are in the plan
  }
  if (split.arrivals != nullptr) split.launch = cuda::launch_name();
  start_forward<Traits, Policy, kFeatures>(p, stream, tiles, split, parts.planned > 0 ? parts.planned : parts.most);
  if (!writes_output<Traits>(p, parts) && split.arrivals == nullptr) {
    constexpr auto kJoin = join_parts_kernel<OfEntry, kFeatures>;
    cuda::launch("launching the forward's last pass", cuda::start_during<kJoin>(p.device.index), kJoin,
                 dim3(static_cast<unsigned>(split.rows_of_head * kJoinsOfRow<OfEntry>),
                      static_cast<unsigned>(split.heads * p.batch)),
                 32 * join_warps(split.parts), 0, stream, p, split);
  }
  cuda::clear_unused_rows<typename Traits::Element>(p, stream);
}

template <class Traits, cuda::Features kFeatures>
int split_smem_bytes(const ForwardParams& p) {
  if constexpr (kHasValuesInKeys<Traits, kFeatures>) {
    if (values_in_keys(p)) return Traits::WithValuesInKeys::kSmemBytes;
  }
  return Traits::kSmemBytes;
}

template <class Traits, class Policy, cuda::Features kFeatures>
ForwardEntry split_forward_entry() {
  return {key_of<Traits, Policy, kFeatures>(true), kSplitTile<Traits>,
          [](const ForwardParams& p) {
            const char* reason = refuse<Traits, kFeatures>(p, split_smem_bytes<Traits, kFeatures>(p));
            if constexpr (kDealsKeys<Traits>) {
              const bool few = has_few_rows(p, heads_sharing(p));
              return reason != nullptr || few ? reason : "too many queries for its tile, or too few keys";
            }
            if (reason != nullptr || heads_sharing(p) > 1 || takes_all_of_few_rows<Traits, kFeatures>(p)) return reason;
            const KeyParts parts = key_parts<Traits, kFeatures>(p);
            return parts.planned == 0 && parts.most == 1 ? "too many queries or too few keys to split these" : nullptr;
          },
          [](const ForwardParams& p, int) {
            const KeyParts parts = key_parts<Traits, kFeatures>(p);
            return writes_output<Traits>(p, parts) ? 0 : KeySplit(p, parts, nullptr).size();
          },
          launch_split_forward<Traits, Policy, kFeatures>};
}

// Of fp8 keys, kernels of many queries: those split keys as well, where there are too few tiles of queries for the
// device. Not of layouts, whose tiles need not follow each other.
template <class Traits, class Policy, cuda::Features kFeatures>
ForwardEntry fp8_forward_entry() {
  if constexpr (std::is_same_v<Policy, BlockSparsePolicy>) {
    return forward_entry<Traits, Policy, kFeatures>();
  } else {
    ForwardEntry entry = split_forward_entry<Traits, Policy, kFeatures>();
    entry.key = key_of<Traits, Policy, kFeatures>();
    entry.can_implement = [](const ForwardParams& p) { return refuse<Traits, kFeatures>(p, Traits::kSmemBytes); };
    return entry;
  }
}

// What the backward walks. With all features, a call without a mask takes the kernel of bands, of one that hides
// nothing. Without a mask ptxas spills more, which took 14 to
// 15 % of the time at 64 and, with a staggered tile, 8 to 9 at 96 (sm80_features.csv, run 5, softcap). Not where key
// tiles begin in different places (QueryStream).
template <class Traits, class Policy, cuda::Features kFeatures>
using BackwardPolicy = std::conditional_t<kFeatures == cuda::Features::kAll && !Traits::kAnyAlignment &&
                                              !Traits::kStaggered && std::is_same_v<Policy, DensePolicy>,
                                          BandPolicy, Policy>;

template <class Traits>
constexpr flashsdk::Tile kBackwardTile{Traits::kBlockM, Traits::kBlockN};

template <class Traits, class Policy, cuda::Features kFeatures>
constexpr auto main_backward_kernel() {
  if constexpr (Traits::kHeadDim > 256)
    return wide_backward_kernel<Traits, Policy, kFeatures>;
  else
    return backward_kernel<Traits, Policy, kFeatures>;
}

template <class Traits, class Policy, cuda::Features kFeatures>
void launch_backward_kernels(const BackwardParams& p, const LaunchContext& context) {
  static std::atomic<std::uint64_t> prepared{0};
  using Element = typename Traits::Element;
  auto stream = static_cast<cudaStream_t>(context.stream);
  constexpr auto kernel = main_backward_kernel<Traits, BackwardPolicy<Traits, Policy, kFeatures>, kFeatures>();
  constexpr int kSmemBytes = kBackwardSmemBytes<Traits, kFeatures>;
  allow_shared_memory(kernel, kSmemBytes, p.device.index, prepared);
  const cuda::BackwardWorkspace ws(p, Traits::kBlockM, Traits::kHeadDim, context.workspace);

  const dim3 query_tiles = cuda::query_tile_grid(p, Traits::kBlockM);
  const bool has_queries = p.seqlen_q != 0 && p.batch != 0, packed = p.packed();
  constexpr int kPrepareThreads = 256;
  using Sums = cuda::RowSums<RowScores<Element>, Traits::kBlockM, Traits::kBlockN, Policy, kFeatures>;
  if (has_queries) {
    cuda::launch("launching the backward's first pass",
                 packed ? cuda::backward_prepare_kernel<Element, kPrepareThreads, false, true, true, Sums>
                        : cuda::backward_prepare_kernel<Element, kPrepareThreads, false, true, false, Sums>,
                 query_tiles, kPrepareThreads, 0, stream, p, ws);
    cuda::add_sink_gradient(p, ws, stream);
  }
  const cuda::BackwardSchedule schedule =
      cuda::backward_schedule(p, Traits::kBlockN, sizeof(Element), cuda::workers_of(p.device.index));
  if (schedule.size() != 0) {
    cuda::launch("launching the backward kernel", kernel, dim3(static_cast<unsigned>(schedule.size())),
                 Traits::kThreads, kSmemBytes, stream, p, ws, schedule);
  }
  if (has_queries) {
    constexpr int kTileBytes = Traits::SmemOut::kElements * sizeof(Element);
    static_assert(kTileBytes <= 48 * 1024);
    cuda::launch("launching the backward's last pass",
                 packed ? backward_convert_dq_kernel<Traits, true> : backward_convert_dq_kernel<Traits, false>,
                 query_tiles, Traits::kThreads, kTileBytes, stream, p, ws);
  }
}

template <class Traits, class Policy, cuda::Features kFeatures>
void launch_backward(const BackwardParams& p, const LaunchContext& context) {
  if constexpr (kTakesPlainCalls<Traits, Policy, kFeatures>) {  // as launch_forward()
    if (!p.score.any_feature()) return launch_backward<Traits, Policy, cuda::Features::kNone>(p, context);
  }
  cuda::DeviceGuard guard(p.device.index);
  auto stream = static_cast<cudaStream_t>(context.stream);
  cuda::clear_sink_gradient(p, stream);
  cuda::for_each_part(p, kBackwardTile<Traits>, cuda::workers_of(p.device.index), [&](const BackwardParams& part) {
    launch_backward_kernels<Traits, Policy, kFeatures>(part, context);
  });
  cuda::clear_unused_rows<typename Traits::Element>(p, stream);
}

template <class Traits, class Policy, cuda::Features kFeatures>
BackwardEntry backward_entry() {
  return {key_of<Traits, Policy, kFeatures>(), flashsdk::Tile{Traits::kBlockM, Traits::kBlockN},
          [](const BackwardParams& p) { return refuse<Traits, kFeatures>(p, kBackwardSmemBytes<Traits, kFeatures>); },
          [](const BackwardParams& p, int) {
            const ForwardParams part = cuda::largest_part(p, kBackwardTile<Traits>, cuda::workers_of(p.device.index));
            return cuda::BackwardWorkspace(part, Traits::kBlockM, Traits::kHeadDim, nullptr).size;
          },
          launch_backward<Traits, Policy, kFeatures>};
}

}  // namespace flashsdk::sm80
