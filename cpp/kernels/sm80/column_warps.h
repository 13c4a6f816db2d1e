// The forward of heads wider than 256. 16 rows of their output take more registers than a warp has, so that warps side
// by side have some columns each. They need all scores of these rows, and share them out: each computes those of some
// keys of a tile, and the others read them from shared memory. From there on each does the same softmax for itself.
#pragma once

#include "sm80/gemm.h"

namespace flashsdk::sm80 {

template <class Traits>
class ColumnWarps {
  using Element = typename Traits::Element;
  static constexpr int kBlockM = Traits::kBlockM, kBlockN = Traits::kBlockN;
  static constexpr int kWarps = Traits::kColumnWarps, kRowThreads = 32 * Traits::kRowWarps;
  static_assert(kBlockM == 16 * Traits::kRowWarps, "a warp has 16 rows");

 public:
  static constexpr int kPiece = 32 * kWarps;  // columns of the output that are computed at a time, 32 a warp

  // The scores of a tile, of which the warps side by side compute some each: those of others are in `acc` once all
  // threads have waited for each other and called collect(). A block of 16 keys is two atoms of an accumulator, a
  // float4 each: shared (atoms of the tile, threads of the rows).
  template <class Accumulator>
  static __device__ void multiply(Accumulator& acc, Element* q, Element* k, int head_dim, float4* shared) {
    if constexpr (Traits::kSharesScores) {
      typename Traits::MmaOut mma;
      auto own = cute::partition_fragment_C(mma, Shape<Int<kBlockM>, Int<kBlockN>>{});
      cute::clear(own);
      gemm_by_slabs<kBlockM, kBlockN>(mma, own, q, k, head_dim, threadIdx.x);
      const int warp = static_cast<int>(threadIdx.x) / kRowThreads;
      CUTE_UNROLL
      for (int block = 0; block < kBlockN / 16 / kWarps; ++block) {
        auto atoms = cute::make_tensor(own.data() + 8 * block, Layout<cute::_8>{});
        write_atoms<kRowThreads>(atoms, shared + 2 * (block * kWarps + warp) * kRowThreads, row_thread());
      }
    } else {
      gemm_by_slabs<kBlockM, kBlockN>(WarpMma<Element, Traits::kRowWarps, 1>{}, acc, q, k, head_dim, row_thread());
    }
  }
  template <class Accumulator>
  static __device__ void collect(Accumulator& acc, const float4* shared) {
    if constexpr (Traits::kSharesScores) {
      read_atoms<kRowThreads>(acc, shared, row_thread());
    }
  }

 private:
  static __device__ int row_thread() { return static_cast<int>(threadIdx.x) % kRowThreads; }
};

}  // namespace flashsdk::sm80
