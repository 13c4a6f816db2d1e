// Scores for sums that are taken anew (cuda/pass/row_sums.h), by one warp on mma.sync.
#pragma once

#include "cuda/pass/row_sums.h"
#include "sm80/traits.h"

namespace flashsdk::sm80 {

// Sᵀ of 16 keys and eight queries, whose fragments come straight from device memory.
template <class Element_>
class RowScores {
 public:
  using Element = Element_;
  static constexpr int kKeys = 16, kThreads = 32;

  __device__ RowScores(const Element* q, std::int64_t row_stride, int rows, int head_dim)
      : q_(row() < rows ? q + row() * row_stride : nullptr), head_dim_(head_dim) {}

  __device__ void compute(const Element* k, std::int64_t row_stride, int rows, float (&acc)[4]) const {
    const Element* upper = row() < rows ? k + row() * row_stride : nullptr;
    const Element* lower = row() + 8 < rows ? k + (row() + 8) * row_stride : nullptr;
    acc[0] = acc[1] = acc[2] = acc[3] = 0.f;
#pragma unroll 1
    for (int first = 0; first < head_dim_; first += 16) {
      auto pair = [&, c = first + static_cast<int>(threadIdx.x) % 4 * 2](const Element* row, int column) {
        return cuda::load_pair(row, c + column, head_dim_);
      };
      MmaInstruction<Element>::type::fma(acc[0], acc[1], acc[2], acc[3], pair(upper, 0), pair(lower, 0), pair(upper, 8),
                                         pair(lower, 8), pair(q_, 0), pair(q_, 8), acc[0], acc[1], acc[2], acc[3]);
    }
  }
  template <class F>
  static __device__ void for_each_other_warp(const float (&)[2], const float (&)[2], F&&) {}

 private:
  static __device__ int row() { return threadIdx.x % 32 / 4; }

  const Element* q_;
  int head_dim_;
};

}  // namespace flashsdk::sm80
