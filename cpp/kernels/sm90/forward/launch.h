// Rows of the kernel table for the SM90 forward.
#pragma once

#include <atomic>

#include "cuda/pass/unused_rows.h"
#include "cuda/tile/builtin_policy.h"
#include "sm90/forward/forward.h"
#include "sm90/forward/tiles.h"
#include "sm90/launch.h"

namespace flashsdk::sm90 {

// Says so to `explain` when the choice fell on another tile.
template <class Traits, cuda::Features kFeatures, class Policy>
const char* refuse_forward(const ForwardParams& p) {
  if (const char* reason = refuse<Traits, kFeatures>(p)) return reason;
  if (Traits::kFromEnd && p.mask.kind == MaskKind::kBlockSparse)
    return "tiles counted from the end of a sequence do not lie in the mask's blocks";
  if (rows_of_box(p.pages, Traits::kBlockN) % 8 != 0) return "pages do not have a multiple of 8 keys";
  const std::int64_t tiles = std::int64_t{ceil_div(p.seqlen_q, Traits::kBlockM)} * p.num_heads * p.batch;
  if (tiles > INT32_MAX / 2) return "there are too many tiles";
  if constexpr (std::is_same_v<Policy, cuda::BuiltinPolicy>) {  // others have one tile
    const flashsdk::Tile best = forward_tile(p);
    if (best.m != Traits::kBlockM || best.n != Traits::kBlockN) return "another tile is faster for these lengths";
  }
  return nullptr;
}

// Whether all tiles of queries cost the same: where a mask hides nothing, or where sequences have one each.
template <class Traits>
bool uniform_tiles(const ForwardParams& p) {
  const bool one_each = p.mask.kind == MaskKind::kBand && p.seqlen_q <= Traits::kBlockM;
  return (p.mask.kind == MaskKind::kDense || one_each) && !p.ragged();
}

// Whether blocks draw tiles from a counter: where these differ in cost, and a block is not done after its first. Small
// calls then need no workspace, whose making takes microseconds on the host.
template <class Traits>
bool draws_tiles(const ForwardParams& p) {
  const std::int64_t tiles = std::int64_t{ceil_div(p.seqlen_q, Traits::kBlockM)} * p.num_heads * p.batch;
  return !uniform_tiles<Traits>(p) && tiles > cuda::device_limits(p.device.index).multiprocessors;
}

template <class Traits, cuda::Features kFeatures, class Policy = cuda::BuiltinPolicy>
void launch_forward(const ForwardParams& p, const LaunchContext& context) {
  static std::atomic<std::uint64_t> prepared{0};
  constexpr DType kType = cuda::kDType<typename Traits::Element>;
  cuda::DeviceGuard guard(p.device.index);
  auto kernel = forward_kernel<Traits, Policy, kFeatures>;
  constexpr int kSmemBytes = sizeof(ForwardSmem<Traits, kFeatures>);
  static_assert(kSmemBytes <= 227 * 1024);
  cuda::allow_shared_memory(kernel, kSmemBytes, p.device.index, prepared);

  const ForwardSchedule schedule{
      cuda::forward_schedule(p, Traits::kBlockM, sizeof(typename Traits::Element), uniform_tiles<Traits>(p)),
      {draws_tiles<Traits>(p) ? static_cast<TicketCounter*>(context.workspace) : nullptr, cuda::launch_name()}};
  const int blocks =
      min_of(cuda::device_limits(p.device.index).multiprocessors, static_cast<int>(schedule.tiles.size()));
  const int key_rows = rows_of_box(p.pages, Traits::kBlockN);
  const ForwardMaps maps{
      make_tensor_map(p.q, query_extent(p, p.head_dim), kType, Traits::kBlockM, Traits::SmemQ::kSlabColumns),
      make_tensor_map(p.k, key_extent(p, p.head_dim), kType, key_rows, Traits::SmemK::kSlabColumns),
      make_tensor_map(p.v, key_extent(p, p.head_dim_v), kType, key_rows, Traits::SmemV::kSlabColumns), key_rows};
  auto stream = static_cast<cudaStream_t>(context.stream);
  if (blocks > 0) {  // packed rows may all lie behind the last sequence
    cuda::launch("launching the forward kernel", kernel, dim3(static_cast<unsigned>(blocks)), Traits::kThreads,
                 kSmemBytes, stream, p, maps, schedule);
  }
  cuda::clear_unused_rows<typename Traits::Element>(p, stream);
}

// Policy: common/mask_policy.h; mask is the kind that calls of it have.
template <class Traits, cuda::Features kFeatures, class Policy = cuda::BuiltinPolicy>
ForwardEntry forward_entry(MaskKind mask) {
  return {key_of<Traits, kFeatures>(mask), flashsdk::Tile{Traits::kBlockM, Traits::kBlockN},
          refuse_forward<Traits, kFeatures, Policy>,
          [](const ForwardParams& p, int) { return draws_tiles<Traits>(p) ? sizeof(TicketCounter) : 0; },
          launch_forward<Traits, kFeatures, Policy>};
}

}  // namespace flashsdk::sm90
