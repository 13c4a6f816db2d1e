// Scores for sums that are taken anew (cuda/pass/row_sums.h), by one warpgroup on wgmma.
#pragma once

#include "cuda/pass/row_sums.h"
#include "sm90/gemm.h"
#include "sm90/named_barriers.h"

namespace flashsdk::sm90 {

// Sᵀ of 64 keys, whose fragments come straight from device memory, and eight queries in shared memory.
template <class Element_, int kHeadDim, int kWarpgroups>
class RowScores {
 public:
  using Element = Element_;
  static constexpr int kKeys = kWarpgroupRows, kThreads = kWarpgroup;

  __device__ RowScores(const Element* q, std::int64_t row_stride, int rows, int head_dim) : head_dim_(head_dim) {
    meet();  // the last queries' products are done
    for (int i = thread(); i < kQueries * kHeadDim; i += kWarpgroup) {
      const int row = i / kHeadDim, column = i % kHeadDim;
      auto slab = queries(column / kColumns);
      slab(row, column % kColumns) = row < rows && column < head_dim ? q[row * row_stride + column] : Element(0.f);
    }
    cutlass::arch::fence_view_async_shared();
    meet();
  }

  __device__ void compute(const Element* k, std::int64_t row_stride, int rows, float (&sums)[4]) const {
    const int row = thread() / 32 * 16 + thread() % 32 / 4;
    const Element* key[2] = {row < rows ? k + row * row_stride : nullptr,
                             row + 8 < rows ? k + (row + 8) * row_stride : nullptr};
    auto acc = accumulator<Mma, kQueries>();
    auto a = Mma{}.get_thread_slice(thread()).partition_fragment_A(
        cute::make_tensor(static_cast<const Element*>(nullptr), Shape<Int<kKeys>, Int<kColumns>>{}));
    auto words = cute::recast<std::uint32_t>(a);  // ((1, 2, 2), 1, columns / 16): rows r and r + 8, columns c and c + 8
#pragma unroll 1
    for (int s = 0; s < Queries::kSlabs; ++s) {
      CUTE_UNROLL
      for (int i = 0; i < cute::size(words); ++i) {
        const int column = s * kColumns + i / 4 * 16 + i / 2 % 2 * 8 + thread() % 4 * 2;
        words(i) = cuda::load_pair(key[i % 2], column, head_dim_);
      }
      start_gemm<Mma>(a, operand_b<Mma>(queries(s)), acc, s > 0);
      cute::warpgroup_wait<0>();
      finished(acc);
    }
    CUTE_UNROLL
    for (int i = 0; i < 4; ++i) sums[i] = acc(i);
  }

  // f(query of the lane's two, maximum and sum of another warp of the warpgroup, whose keys are others).
  template <class F>
  static __device__ void for_each_other_warp(const float (&max)[2], const float (&sum)[2], F&& f) {
    __shared__ float4 of_warp[kWarpgroups][kWarpgroup / 32][4];
    auto& mine = of_warp[threadIdx.x / kWarpgroup];
    const int warp = thread() / 32, lane = thread() % 32;
    if (lane < 4) mine[warp][lane] = make_float4(max[0], max[1], sum[0], sum[1]);
    meet();
    for (int other = 0; other < kWarpgroup / 32; ++other) {
      if (other == warp) continue;
      const float4 x = mine[other][lane % 4];
      f(0, x.x, x.z);
      f(1, x.y, x.w);
    }
    meet();
  }

 private:
  static constexpr int kQueries = 8;
  using Queries = SmemTile<Element, kQueries, kHeadDim>;
  static constexpr int kColumns = Queries::kSlabColumns;
  using Mma = RegisterMma<Element, kQueries, kColumns, kSumContiguous>;

  static __device__ int thread() { return threadIdx.x % kWarpgroup; }
  static __device__ void meet() {
    barrier_sync(named_barrier::kBackwardRowSums + threadIdx.x / kWarpgroup, kWarpgroup);
  }
  static __device__ auto queries(int slab) {
    __shared__ alignas(1024) Element smem[kWarpgroups][Queries::kElements];
    using Slab = typename SmemTile<Element, kQueries, kColumns>::RowMajor;
    Element* first = smem[threadIdx.x / kWarpgroup] + slab * kQueries * kColumns;
    return cute::make_tensor(cute::make_smem_ptr(first), Slab{})(cute::_, cute::_, 0);
  }

  int head_dim_;
};

}  // namespace flashsdk::sm90
