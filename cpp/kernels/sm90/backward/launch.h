// A row of the kernel table from the backward's templates: what it takes, its workspace, its launches.
#pragma once

#include <algorithm>

#include "cuda/host/batch_parts.h"
#include "cuda/pass/backward_passes.h"
#include "cuda/pass/sink_gradient.h"
#include "cuda/pass/unused_rows.h"
#include "cuda/tile/builtin_policy.h"
#include "sm90/backward/backward.h"
#include "sm90/backward/row_scores.h"
#include "sm90/launch.h"

namespace flashsdk::sm90 {

template <class Traits>
cuda::BackwardWorkspace backward_workspace(const ForwardParams& p, void* base) {
  return cuda::BackwardWorkspace(p, Traits::kBlockM, Traits::kHeadDimQ, base, Traits::kDqPieces);
}

template <class Traits>
constexpr flashsdk::Tile kBackwardTile{Traits::kBlockM, Traits::kBlockN};

template <class Traits>
std::size_t backward_workspace_size(const ForwardParams& p) {
  const cuda::Workers workers = cuda::workers_of(p.device.index, Traits::kClusterSize);
  return backward_workspace<Traits>(cuda::largest_part(p, kBackwardTile<Traits>, workers), nullptr).size;
}

// Tiles of keys that thread blocks take off the schedule, at most.
template <class Traits>
std::int64_t key_tiles(const ForwardParams& p) {
  std::int64_t of_head = std::int64_t{ceil_div(p.seqlen_k, Traits::kBlockN)} * p.batch;
  if (p.packed()) of_head = std::min<std::int64_t>(of_head, first_packed_tile(p.total_k, Traits::kBlockN, p.batch));
  return of_head * p.num_heads_kv;
}

template <class Traits, cuda::Features kFeatures>
const char* refuse_backward(const BackwardParams& p) {
  if (const char* reason = refuse<Traits, kFeatures>(p)) return reason;
  if constexpr (Traits::kClusterSize > 1) {
    if (p.deterministic) return "clusters add to dq in no fixed order";
    const int keys = p.packed() ? min_of(p.seqlen_k, p.total_k / max_of(1, p.batch)) : p.seqlen_k;
    if (keys <= Traits::kCtaKeys) return "sequences have no more keys than one CTA of a cluster takes";
  }
  if (const char* reason = tensor_map_refusal(p.dout, query_extent(p, p.head_dim_v))) return reason;
  for (const TensorParam* t : {&p.out, &p.dq, &p.dk, &p.dv})
    if (!cuda::vector_aligned(*t)) return "a tensor's address or strides are not multiples of 16 bytes";
  if (key_tiles<Traits>(p) > INT32_MAX / 2) return "there are too many tiles of keys";
  return nullptr;
}

template <class Traits>
BackwardMaps backward_maps(const BackwardParams& p) {
  auto map = [&](const TensorParam& t, const TensorExtent& extent, auto tile) {
    return make_tensor_map(t, extent, p.dtype, decltype(tile)::kRows, decltype(tile)::kSlabColumns);
  };
  return {map(p.q, query_extent(p, p.head_dim), typename Traits::SmemQ{}),
          map(p.k, key_extent(p, p.head_dim), typename Traits::SmemK{}),
          map(p.v, key_extent(p, p.head_dim_v), typename Traits::SmemV{}),
          map(p.dout, query_extent(p, p.head_dim_v), typename Traits::SmemDo{})};
}

template <class Traits, class Policy, cuda::Features kFeatures, bool kRagged>
void launch_backward_kernels(const BackwardParams& p, const LaunchContext& context) {
  static std::atomic<std::uint64_t> prepared{0};
  using Element = typename Traits::Element;
  auto stream = static_cast<cudaStream_t>(context.stream);
  constexpr auto kernel = [] {
    if constexpr (Traits::kClusterSize == 1)
      return backward_kernel<Traits, Policy, kFeatures, kRagged>;
    else
      return backward_cluster_kernel<Traits, Policy, kFeatures, kRagged>;
  }();
  cuda::allow_shared_memory(kernel, Traits::kSmemBytes, p.device.index, prepared);
  const cuda::BackwardWorkspace ws = backward_workspace<Traits>(p, context.workspace);

  const dim3 query_tiles = cuda::query_tile_grid(p, Traits::kBlockM);
  constexpr int kPrepareThreads = 256;
  using Product = RowScores<Element, Traits::kHeadDim, kPrepareThreads / kWarpgroup>;
  using Sums = cuda::RowSums<Product, Traits::kBlockM, Traits::kBlockN, Policy, kFeatures>;
  // In these passes only packed sequences are found by their places.
  const bool packed = kRagged && p.packed();
  cuda::launch("launching the backward's first pass",
               packed ? cuda::backward_prepare_kernel<Element, kPrepareThreads, true, Traits::kClearsDq, true, Sums>
                      : cuda::backward_prepare_kernel<Element, kPrepareThreads, true, Traits::kClearsDq, false, Sums>,
               query_tiles, kPrepareThreads, 0, stream, p, ws);
  cuda::add_sink_gradient(p, ws, stream);

  const cuda::Workers workers = cuda::workers_of(p.device.index, Traits::kClusterSize);
  const cuda::BackwardSchedule schedule = cuda::backward_schedule(p, Traits::kBlockN, sizeof(Element), workers);
  const int blocks = min_of(static_cast<int>(key_tiles<Traits>(p)), workers.count) * Traits::kClusterSize;
  if (blocks != 0) {
    cuda::launch("launching the backward kernel", cuda::Start::kDuring, kernel, dim3(static_cast<unsigned>(blocks)),
                 Traits::kThreads, Traits::kSmemBytes, stream, p, backward_maps<Traits>(p), ws, schedule);
  }

  cuda::launch("launching the backward's last pass", blocks != 0 ? cuda::Start::kDuring : cuda::Start::kAfter,
               packed ? backward_convert_dq_kernel<Traits, true> : backward_convert_dq_kernel<Traits, false>,
               query_tiles, Traits::kDqPieces * kWarpgroup, 0, stream, p, ws);
}

// Calls whose sequences have lengths of their own, packed or in part of their rows, have kernels of their own: compiled
// into one, what these do more, though never done in other calls, cost those 1 to 4 % (docs/dev/log-sm90-backward.md).
template <class Traits, cuda::Features kFeatures, class Policy = cuda::BuiltinPolicy>
void launch_backward(const BackwardParams& p, const LaunchContext& context) {
  cuda::DeviceGuard guard(p.device.index);
  const cuda::Workers workers = cuda::workers_of(p.device.index, Traits::kClusterSize);
  auto stream = static_cast<cudaStream_t>(context.stream);
  cuda::clear_sink_gradient(p, stream);
  cuda::for_each_part(p, kBackwardTile<Traits>, workers, [&](const BackwardParams& part) {
    if (part.ragged())
      launch_backward_kernels<Traits, Policy, kFeatures, true>(part, context);
    else
      launch_backward_kernels<Traits, Policy, kFeatures, false>(part, context);
  });
  cuda::clear_unused_rows<typename Traits::Element>(p, stream);
}

template <class Traits, cuda::Features kFeatures, class Policy = cuda::BuiltinPolicy>
BackwardEntry backward_entry(MaskKind mask) {
  return {key_of<Traits, kFeatures>(mask), flashsdk::Tile{Traits::kBlockM, Traits::kBlockN},
          refuse_backward<Traits, kFeatures>,
          [](const BackwardParams& p, int) { return backward_workspace_size<Traits>(p); },
          launch_backward<Traits, kFeatures, Policy>};
}

}  // namespace flashsdk::sm90
