// Tile products on wgmma: B in shared memory, A there or in registers, accumulators in registers, one warpgroup each.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cute/tensor.hpp>

#include "cuda/tile/fragments.h"
#include "cuda/tile/math.h"
#include "sm90/traits.h"

namespace flashsdk::sm90 {

using cuda::convert;

// Operands in shared memory: (64 | columns of the product, sum, …) tensors; index further modes to pick a buffer.
template <class Mma, class SmemTensor>
__device__ __forceinline__ auto operand_a(const SmemTensor& smem) {
  return Mma{}.get_thread_slice(threadIdx.x % kWarpgroup).partition_fragment_A(smem);
}
template <class Mma, class SmemTensor>
__device__ __forceinline__ auto operand_b(const SmemTensor& smem) {
  return Mma{}.get_thread_slice(threadIdx.x % kWarpgroup).partition_fragment_B(smem);
}
template <class Mma, int kColumns>
__device__ __forceinline__ auto accumulator() {
  return cute::partition_fragment_C(Mma{}, Shape<Int<kWarpgroupRows>, Int<kColumns>>{});
}

template <class Mma>
inline constexpr bool kRegisterA = !std::is_base_of_v<cute::GMMA::DescriptorIterator, typename Mma::FrgTypeA>;

// Starts acc = A·Bᵀ, or acc += A·Bᵀ, as one group of products; wait with cute::warpgroup_wait<groups still running>().
// Until then neither acc nor an A in registers may be touched.
template <class Mma, class A, class B, class Accumulator>
__device__ __forceinline__ void start_gemm(const A& a, const B& b, Accumulator& acc, bool accumulate) {
  constexpr int kSteps = decltype(cute::size<2>(b))::value;
  Mma mma;
  cute::warpgroup_fence_operand(acc);
  if constexpr (kRegisterA<Mma>) cute::warpgroup_fence_operand(const_cast<A&>(a));
  cute::warpgroup_arrive();
  mma.accumulate_ = accumulate ? cute::GMMA::ScaleOut::One : cute::GMMA::ScaleOut::Zero;
  CUTE_UNROLL
  for (int k = 0; k < kSteps; ++k) {
    cute::gemm(mma, a(cute::_, cute::_, k), b(cute::_, cute::_, k), acc);
    mma.accumulate_ = cute::GMMA::ScaleOut::One;
  }
  cute::warpgroup_commit_batch();
  cute::warpgroup_fence_operand(acc);
  if constexpr (kRegisterA<Mma>) cute::warpgroup_fence_operand(const_cast<A&>(a));
}

// Tells the compiler that a product is done: its registers may be read. After the wait.
template <class Accumulator>
__device__ __forceinline__ void finished(Accumulator& acc) {
  cute::warpgroup_fence_operand(acc);
}

// An accumulator ((2, 2, N), M, 1) as the 16x8 atoms ((2, 2), M, N) that mma.m16n8 has too: what cuda/*.h work on.
template <class AccLayout>
__host__ __device__ constexpr auto atom_layout(const AccLayout& l) {
  return cute::make_layout(cute::make_layout(cute::get<0, 0>(l), cute::get<0, 1>(l)), cute::get<1>(l),
                           cute::get<0, 2>(l));
}
template <class Accumulator>
__device__ __forceinline__ auto as_atoms(Accumulator&& acc) {
  return cute::make_tensor(acc.data(), atom_layout(acc.layout()));
}
// … and as a matrix ((2, M), (2, N)) of a thread's rows and columns.
template <class Accumulator>
__device__ __forceinline__ auto as_matrix(Accumulator&& acc) {
  return cute::make_tensor(acc.data(), cuda::matrix_layout(atom_layout(acc.layout())));
}

// The (row, column) inside the warpgroup's 64 x kColumns tile of each element of as_matrix(acc).
template <class Mma, int kColumns>
__device__ __forceinline__ auto matrix_coordinates() {
  auto c = Mma{}
               .get_thread_slice(threadIdx.x % kWarpgroup)
               .partition_C(cute::make_identity_tensor(Shape<Int<kWarpgroupRows>, Int<kColumns>>{}));
  return as_matrix(c);
}

// A 16-bit accumulator as operand A of the next product: two neighbouring 16x8 atoms are one 16x16 operand.
template <class Fragment>  // ((2, 2, N), M, 1) -> ((2, 2, 2), M, N / 2)
__device__ __forceinline__ auto as_operand_a(Fragment&& acc) {
  auto l = atom_layout(acc.layout());
  auto n = cute::logical_divide(cute::get<2>(l), _2{});
  auto layout = cute::make_layout(cute::make_layout(cute::get<0, 0>(l), cute::get<0, 1>(l), cute::get<0>(n)),
                                  cute::get<1>(l), cute::get<1>(n));
  return cute::make_tensor(acc.data(), layout);
}

// Four lanes share a row of an accumulator, two columns each of every atom. Turns the words of four atoms from "my
// columns of each" into "all eight columns of one": lane l of the quad gets atom l, 16 bytes to store at once.
__device__ __forceinline__ void transpose_quad(std::uint32_t (&word)[4]) {
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {  // within pairs of lanes, words i and i + 1
    const std::uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? word[i] : word[i + 1], 1);
    word[i] = odd ? got : word[i];
    word[i + 1] = odd ? word[i + 1] : got;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // between the pairs, words i and i + 2
    const std::uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? word[i] : word[i + 2], 2);
    word[i] = upper ? got : word[i];
    word[i + 2] = upper ? word[i + 2] : got;
  }
}

// The store of an epilogue. Writes a 16-bit accumulator fragment to device memory: rows from `begin` to `end`, columns
// below `columns` (a multiple of 8). target is the first row of this warpgroup's 64. Left to itself, the compiler would
// take half of the stores apart into words.
template <class Fragment, class Element>  // ((2, 2, N), 1, 1)
__device__ __forceinline__ void store_accumulator(const Fragment& fragment, Element* target, std::int64_t row_stride,
                                                  int begin, int end, int columns) {
  auto words = cute::recast<std::uint32_t>(as_atoms(fragment));  // ((1, 2), 1, N)
  constexpr int kAtoms = decltype(cute::size<2>(words))::value;
  const int thread = threadIdx.x % kWarpgroup, lane_of_quad = thread % 4;
  const int first_row = thread / 32 * 16 + thread % 32 / 4;
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + 8 * half;
    CUTE_UNROLL
    for (int atom = 0; atom < kAtoms; atom += 4) {
      std::uint32_t word[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) word[i] = words(cute::make_coord(0, half), 0, atom + i);
      transpose_quad(word);
      const int column = (atom + lane_of_quad) * 8;
      if (row >= begin && row < end && column < columns) {
        Element* const first = target + row * row_stride + column;
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(first), "r"(word[0]), "r"(word[1]), "r"(word[2]),
                     "r"(word[3])
                     : "memory");
      }
    }
  }
}

// Like store_accumulator() from row 0 on, but all lanes exchange before anything is stored, and stores are predicated
// instead of branched around: there, what is exchanged for one store waits for the branch of the one before. It takes
// more registers; which is faster differs by kernel (docs/dev/log-sm90-backward.md, version 12, and
// docs/dev/log-sm90-forward.md, version 14).
template <class Fragment, class Element>
__device__ __forceinline__ void store_accumulator_at_once(const Fragment& fragment, Element* target,
                                                          std::int64_t row_stride, int end, int columns) {
  auto words = cute::recast<std::uint32_t>(as_atoms(fragment));  // ((1, 2), 1, N)
  constexpr int kAtoms = decltype(cute::size<2>(words))::value;
  const int thread = threadIdx.x % kWarpgroup, lane_of_quad = thread % 4;
  const int first_row = thread / 32 * 16 + thread % 32 / 4;
  static_assert(kAtoms % 4 == 0);
  std::uint32_t word[2][kAtoms / 4][4];
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    CUTE_UNROLL
    for (int four = 0; four < kAtoms / 4; ++four) {
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) word[half][four][i] = words(cute::make_coord(0, half), 0, 4 * four + i);
      transpose_quad(word[half][four]);
    }
  }
  CUTE_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int row = first_row + 8 * half;
    Element* const first = target + row * row_stride + lane_of_quad * 8;
    CUTE_UNROLL
    for (int four = 0; four < kAtoms / 4; ++four) {
      const std::uint32_t (&w)[4] = word[half][four];
      const int there = row < end && (4 * four + lane_of_quad) * 8 < columns;
      asm volatile(
          "{\n"
          ".reg .pred there;\n"
          "setp.ne.b32 there, %5, 0;\n"
          "@there st.global.v4.b32 [%0], {%1, %2, %3, %4};\n"
          "}" ::"l"(first + four * 32),
          "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(there)
          : "memory");
    }
  }
}

}  // namespace flashsdk::sm90
