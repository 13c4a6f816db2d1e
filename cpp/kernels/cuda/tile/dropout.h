// Which elements of an mma accumulator dropout keeps (common/philox.h), a Philox call for many of them at once.
//
// No compare or select an element. In the forward, and where the backward shares bytes (dropout_bytes.h of sm90), pairs
// are multiplied by 0 or 1 (DropFactors). Elsewhere in the backward the four bytes of a Philox word are compared with
// the threshold together, and what is kept is a mask that is and-ed to pairs and to the bits of floats.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cutlass/numeric_types.h>
#include <cute/tensor.hpp>

#include "common/philox.h"
#include "cuda/tile/math.h"

namespace flashsdk::cuda {

// Sets the top bit of every byte of a word that is at least the threshold.
class ByteTest {
 public:
  __device__ explicit ByteTest(int threshold)
      : add_((0x80u - (threshold & 0x7f)) * 0x01010101u), either_(threshold < 0x80 ? ~0u : 0u) {}
  __device__ std::uint32_t operator()(std::uint32_t bytes) const {
    const std::uint32_t low_reaches = (bytes & 0x7f7f7f7fu) + add_;  // the seven low bits of each
    std::uint32_t reaches;  // two of the three: the top bit, the low ones, and that one of the two is enough
    asm("lop3.b32 %0, %1, %2, %3, 0xe8;" : "=r"(reaches) : "r"(bytes), "r"(low_reaches), "r"(either_));
    return reaches;
  }

 private:
  std::uint32_t add_, either_;
};

// prmt: picks bytes of {low, high}; 8 added to a byte's number spreads its top bit over the byte.
__device__ __forceinline__ std::uint32_t pick_bytes(std::uint32_t low, std::uint32_t high, std::uint32_t selector) {
  std::uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(selector));
  return result;
}

// Of two bytes b, each given as 0x6400 + b, the factors of what they decide on: 0 below the threshold, else 1, in fp16.
// Made and applied in floating point, as its pipes have less to do than the one of integers: 0x6400 + b is the number
// 1024 + b, and 1023 + threshold, subtracted with saturation, leaves 0 or 1.
class DropFactors {
 public:
  __device__ explicit DropFactors(int threshold) {
    asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(base_) : "f"(-1023.f - threshold));
  }
  __device__ std::uint32_t operator()(std::uint32_t bytes) const {
    std::uint32_t factors;
    asm("add.rn.sat.f16x2 %0, %1, %2;" : "=r"(factors) : "r"(bytes), "r"(base_));
    return factors;
  }

 private:
  std::uint32_t base_;
};

// A pair of elements times its factors. Read as bf16, the 1 of fp16 is 2⁻⁷: of what is kept that much is left, which
// scale_of_kept() makes up for, as for what is dropped.
template <class Element>
__device__ __forceinline__ void apply_factors(std::uint32_t& pair, std::uint32_t factors) {
  if constexpr (!std::is_same_v<Element, cutlass::bfloat16_t>) {
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(pair) : "r"(factors));
  } else {
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(pair) : "r"(factors));
#else  // has no product of bf16 but with a sum: plus −0
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(pair) : "r"(factors), "r"(0x80008000u));
#endif
  }
}
template <class Element>
__device__ float scale_of_kept(const DropoutParam& dropout) {
  constexpr float kOne = std::is_same_v<Element, cutlass::bfloat16_t> ? 128.f : 1.f;
  return dropout.threshold > 0 ? dropout.scale() * kOne : 1.f;
}

__device__ __forceinline__ std::uint32_t select_word(const PhiloxBytes& bytes, int word) {
  const std::uint32_t low = word & 1 ? bytes.word[1] : bytes.word[0];
  const std::uint32_t high = word & 1 ? bytes.word[3] : bytes.word[2];
  return word & 2 ? high : low;
}

// Rows are queries: applies the factors to a 16-bit accumulator fragment ((2, 2), M, N). coordinates(i, j) is the
// (query, key) in the tile of its matrix view. m0 and n0 are multiples of 16; the four 8-column atoms of a Philox call
// are neighbours when the tile is 32 columns or wider.
template <class Fragment, class Coordinates>
__device__ void drop_elements(Fragment& fragment, const Coordinates& coordinates, const DropoutRng& rng, int threshold,
                              int m0, int n0) {
  constexpr int kRowPairs = kExtent<Coordinates, 0> / 2, kAtoms = kExtent<Coordinates, 1> / 2;
  constexpr int kPerCall = kAtoms % 4 == 0 ? 4 : 1;
  using Element = typename Fragment::value_type;
  const DropFactors factors(threshold);
  auto pairs = cute::recast<std::uint32_t>(fragment);  // ((1, 2), M, N): columns c and c + 1 of row r, then of r + 8
  CUTE_UNROLL
  for (int m = 0; m < kRowPairs; ++m) {
    const int row = m0 + cute::get<0>(coordinates(2 * m, 0));
    CUTE_UNROLL
    for (int c = 0; c < kAtoms; c += kPerCall) {
      const int column = n0 + cute::get<1>(coordinates(0, 2 * c));
      const PhiloxBytes bytes = rng.group(row, column);
      CUTE_UNROLL
      for (int n = 0; n < kPerCall; ++n) {
        const std::uint32_t word = kPerCall == 4 ? bytes.word[n] : select_word(bytes, DropoutRng::word_of(column));
        // Byte e is row r + 8·(e % 2), column c + e / 2.
        const std::uint32_t rows[] = {pick_bytes(word, 0x64646464u, 0x4240), pick_bytes(word, 0x64646464u, 0x4341)};
        apply_factors<Element>(pairs(cute::make_coord(0, 0), m, c + n), factors(rows[0]));
        apply_factors<Element>(pairs(cute::make_coord(0, 1), m, c + n), factors(rows[1]));
      }
    }
  }
}

// For each pair of neighbouring elements in a row of an accumulator, whether the one and the other is kept.
template <int kPairs>
class KeptPairs {
 public:
  __device__ void set(int pair, std::uint32_t mask) { words_[pair / 16] |= mask & (0x10001u << (pair % 16)); }
  // 16 bits of ones for each element that is kept.
  __device__ std::uint32_t mask(int pair) const { return ((words_[pair / 16] >> (pair % 16)) & 0x10001u) * 0xffffu; }

 private:
  std::uint32_t words_[(kPairs + 15) / 16] = {};
};

// Rows are keys: a lane holds keys {k, k + 8} and queries {q, q + 1} of each 16 x 8 atom, and atoms 2n and 2n + 1 of
// its columns are the two halves of 16 queries. For those of columns j to j + 3, f(i, j, mask) for each pair of
// elements (i, j) and (i, j + 1) of Matrix, with 16 bits of ones for each of the two that is kept. The lanes of keys k
// and k ^ 1 need the same bytes: one draws those of query q, the other those of q + 1, and they swap. kWholeCalls:
// atoms 2n and 2n + 1 of a lane's rows are the two halves of 32 keys, so that no byte is drawn for nothing.
template <bool kWholeCalls, class Matrix, class Coordinates, class F>
__device__ void for_each_kept_transposed(int j, const Coordinates& coordinates, const DropoutRng& rng, int threshold,
                                         int m0, int n0, F&& f) {
  constexpr int kWords = kWholeCalls ? 4 : 2;  // of a call; each is a row here
  const ByteTest kept(threshold);
  const bool odd = (n0 + cute::get<0>(coordinates(0, 0))) & 1;
  // Bytes of {own, other} for {q, q + 1}: those of this lane's key, which come behind those of the even one.
  const std::uint32_t selector = odd ? 0xaaee : 0xcc88;
  CUTE_UNROLL
  for (int i = 0; i < kExtent<Matrix, 0>; i += kWords) {
    const int key = n0 + cute::get<0>(coordinates(i, 0));
    const bool upper = !kWholeCalls && DropoutRng::word_of(key) != 0;  // key lies in word 0 or 2, key + 8 in the next
    const PhiloxBytes bytes = rng.group(m0 + cute::get<1>(coordinates(0, j)) + odd, key);
    CUTE_UNROLL
    for (int w = 0; w < kWords; ++w) {
      const std::uint32_t own = kept(kWholeCalls ? bytes.word[w] : upper ? bytes.word[2 + w] : bytes.word[w]);
      const std::uint32_t other = __shfl_xor_sync(0xffffffffu, own, 4);
      f(i + w, j, pick_bytes(own, other, selector));
      f(i + w, j + 2, pick_bytes(own, other, selector + 0x1111));
    }
  }
}

// Zeroes two floats but for those that a mask of for_each_kept_transposed() keeps.
__device__ __forceinline__ void drop_floats(float& first, float& second, std::uint32_t mask) {
  first = __uint_as_float(__float_as_uint(first) & pick_bytes(mask, 0, 0x1010));
  second = __uint_as_float(__float_as_uint(second) & pick_bytes(mask, 0, 0x3232));
}

// f(pair of the 16-bit fragment ((2, 2), M, N), 16 bits of ones for each element of it that is kept).
template <class Fragment, int kPairs, class F>
__device__ void for_each_kept(Fragment& fragment, const KeptPairs<kPairs>& kept, F&& f) {
  auto pairs = cute::recast<std::uint32_t>(fragment);  // ((1, 2), M, N)
  constexpr int kKeyPairs = kExtent<Fragment, 1>, kAtoms = kExtent<Fragment, 2>;
  CUTE_UNROLL
  for (int k = 0; k < kKeyPairs; ++k) {
    CUTE_UNROLL
    for (int a = 0; a < 2; ++a) {
      CUTE_UNROLL
      for (int q = 0; q < kAtoms; ++q) f(pairs(cute::make_coord(0, a), k, q), kept.mask((2 * k + a) * kAtoms + q));
    }
  }
}
template <class Fragment, int kPairs>
__device__ void drop_pairs(Fragment& fragment, const KeptPairs<kPairs>& kept) {
  for_each_kept(fragment, kept, [](std::uint32_t& pair, std::uint32_t mask) { pair &= mask; });
}
// What is dropped becomes negative; no element was.
template <class Fragment, int kPairs>
__device__ void negate_dropped(Fragment& fragment, const KeptPairs<kPairs>& kept) {
  for_each_kept(fragment, kept, [](std::uint32_t& pair, std::uint32_t mask) { pair |= ~mask & 0x80008000u; });
}

}  // namespace flashsdk::cuda
