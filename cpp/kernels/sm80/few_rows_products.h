// The two products of a warp that has all rows of a tile and keys of its own (few_rows.h): 16 rows, kKeys keys.
#pragma once

#include <cstdint>

#include <cute/tensor.hpp>

#include "cuda/tile/fp8.h"
#include "sm80/key_stream.h"

namespace flashsdk::sm80 {

// Where a lane's two rows of the queries lie, of which there are `rows`, the first of them from.at(first).
template <class Element>
class QueryPair {
 public:
  template <class QueryRows>
  __device__ QueryPair(const QueryRows& from, int first, int rows) {
    CUTE_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int row = static_cast<int>(threadIdx.x) % 32 / 4 + 8 * half;
      rows_[half] = row < rows ? from.at(first + row) : nullptr;
    }
  }
  // A Word of elements from a column on; of rows and columns that are not there zeros.
  template <class Word>
  __device__ Word read(int half, int column, int columns) const {
    return rows_[half] != nullptr && column < columns ? *reinterpret_cast<const Word*>(rows_[half] + column) : Word{};
  }

 private:
  const Element* rows_[2];
};

// What both kinds of keys have: Q in shared memory, as lanes need it, and m16n8k16.
template <class Traits>
class RowProducts {
 public:
  using Element = typename Traits::Element;

  // queries: of 16 rows, which all warps share, as each needs all of them.
  __device__ explicit RowProducts(unsigned char* queries) : q_(reinterpret_cast<uint4*>(queries) + threadIdx.x % 32) {}

  // Of this lane: its row of eight, and its place among the four lanes that share that.
  static __device__ int group() { return threadIdx.x % 32 / 4; }
  static __device__ int quarter() { return threadIdx.x % 4; }

 protected:
  template <class Accumulator>
  static __device__ void multiply(Accumulator& acc, int n, const uint4& a, std::uint32_t b0, std::uint32_t b1) {
    float &c0 = acc(4 * n), &c1 = acc(4 * n + 1), &c2 = acc(4 * n + 2), &c3 = acc(4 * n + 3);
    MmaInstruction<Element>::type::fma(c0, c1, c2, c3, a.x, a.y, a.z, a.w, b0, b1, c0, c1, c2, c3);
  }
  // What this lane holds of Q in a step of the first product.
  __device__ uint4* query(int step) const { return q_ + step * 32; }

 private:
  uint4* q_;
};

// Keys and values of q's type: ldmatrix brings the operands.
template <class Traits>
class PlainProducts : public RowProducts<Traits> {
  using Base = RowProducts<Traits>;
  using Element = typename Traits::Element;
  using Places = KeyPlaces<Traits>;
  static constexpr int kKeys = Traits::kBlockN, kHeadDim = Traits::kHeadDim, kSteps = kHeadDim / 16;

 public:
  using Base::Base, Base::group, Base::quarter;

  // This warp's share of the queries: rows from `first` on, where from.at(row) says. There are `rows` of them.
  template <class QueryRows>
  __device__ void load_queries(const QueryRows& from, int first, int rows, int columns) const {
    const QueryPair<Element> own(from, first, rows);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    constexpr int kOwn = kSteps / Traits::kWarps;
    uint4 of[kOwn];
    CUTE_UNROLL
    for (int i = 0; i < kOwn; ++i) {
      const int column = 16 * (i * Traits::kWarps + warp) + 2 * quarter();
      const auto pair = [&](int half, int at) { return own.template read<std::uint32_t>(half, column + at, columns); };
      of[i] = {pair(0, 0), pair(1, 0), pair(0, 8), pair(1, 8)};
    }
    CUTE_UNROLL
    for (int i = 0; i < kOwn; ++i) *this->query(i * Traits::kWarps + warp) = of[i];
  }

  // acc, of (16, kKeys), += Q·Kᵀ. A product waits for the one before it that adds to the same elements: of 16 keys,
  // which are two at a time, every other step has a sum of its own.
  template <class Accumulator>
  __device__ void scores(Accumulator& acc, const unsigned char* k) const {
    constexpr bool kTwoSums = kKeys == 16;
    Accumulator odd;
    cute::clear(odd);
    const int lane = threadIdx.x % 32, row = lane / 16 * 8 + lane % 8, right = lane / 8 % 2;
    CUTE_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      const uint4 a = *this->query(step);
      CUTE_UNROLL
      for (int n = 0; n < kKeys / 8; n += 2) {  // keys 8n to 8n + 7, and the next eight
        std::uint32_t b[4];
        const unsigned char* from = k + 8 * n * Places::kRowBytes + Places::at(row, 2 * step | right);
        cute::SM75_U32x4_LDSM_N::copy(*reinterpret_cast<const cute::uint128_t*>(from), b[0], b[1], b[2], b[3]);
        Accumulator& sum = kTwoSums && step % 2 == 1 ? odd : acc;
        Base::multiply(sum, n, a, b[0], b[1]);
        Base::multiply(sum, n + 1, a, b[2], b[3]);
      }
    }
    if constexpr (kTwoSums) {
      CUTE_UNROLL
      for (int i = 0; i < cute::size(acc); ++i) acc(i) += odd(i);
    }
  }

  // acc_out, of (16, kHeadDim), += P·V.
  template <class Accumulator, class Probabilities>
  __device__ void output(Accumulator& acc_out, const Probabilities& probabilities, const unsigned char* v) const {
    const auto p = cute::recast<const std::uint32_t>(probabilities);
    const int lane = threadIdx.x % 32, row = lane % 16, right = lane / 16;
    CUTE_UNROLL
    for (int step = 0; step < kKeys / 16; ++step) {
      const uint4 a{p(4 * step), p(4 * step + 1), p(4 * step + 2), p(4 * step + 3)};
      CUTE_UNROLL
      for (int n = 0; n < kHeadDim / 8; n += 2) {
        std::uint32_t b[4];
        const unsigned char* from = v + 16 * step * Places::kRowBytes + Places::at(row, n | right);
        cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<const cute::uint128_t*>(from), b[0], b[1], b[2], b[3]);
        Base::multiply(acc_out, n, a, b[0], b[1]);
        Base::multiply(acc_out, n + 1, a, b[2], b[3]);
      }
    }
  }

  // This lane's elements of row group() + 8·half, times factor. row: where it begins.
  template <class Accumulator>
  static __device__ void write(const Accumulator& acc_out, int half, float factor, float* row) {
    CUTE_UNROLL
    for (int n = 0; n < kHeadDim / 8; ++n) {
      const int first = 4 * n + 2 * half;
      *reinterpret_cast<float2*>(row + 8 * n + 2 * quarter()) = {factor * acc_out(first), factor * acc_out(first + 1)};
    }
  }
};

// Keys and values in float8_e4m3fn: operands straight from bytes. Sums run over the head dimension and over keys in an
// order of ours, the same in both operands, in which what a lane needs lies together.
template <class Traits>
class Fp8Products : public RowProducts<Traits> {
  using Base = RowProducts<Traits>;
  using Element = typename Traits::Element;
  using Places = KeyPlaces<Traits>;
  static constexpr int kKeys = Traits::kBlockN, kHeadDim = Traits::kHeadDim, kVector = cuda::kFp8Vector;
  static constexpr int kSlabs = kHeadDim / 64;  // of four vectors, which the four lanes of a row read

 public:
  using Base::Base, Base::group, Base::quarter;

  // This warp's share of the queries: rows from `first` on, where from.at(row) says. There are `rows` of them.
  template <class QueryRows>
  __device__ void load_queries(const QueryRows& from, int first, int rows, int columns) const {
    const QueryPair<Element> own(from, first, rows);
    CUTE_UNROLL
    for (int piece = 0; piece < 2 * kSlabs; ++piece) {
      if (piece % Traits::kWarps != static_cast<int>(threadIdx.x) / 32) continue;
      const int column = 64 * (piece / 2) + kVector * quarter() + cuda::kVectorElements * (piece % 2);
      const uint4 of[] = {own.template read<uint4>(0, column, columns), own.template read<uint4>(1, column, columns)};
      *this->query(2 * piece) = {of[0].x, of[1].x, of[0].y, of[1].y};
      *this->query(2 * piece + 1) = {of[0].z, of[1].z, of[0].w, of[1].w};
    }
  }

  // acc, of (16, kKeys), += Q·Kᵀ. Step i of a slab sums over elements 4i to 4i + 3 of each lane's vector.
  template <class Accumulator>
  __device__ void scores(Accumulator& acc, const unsigned char* k) const {
    CUTE_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      // Rows 8n + group() are all mixed as group() is.
      const unsigned char* first = k + Places::at(group(), 4 * slab + quarter());
      uint4 q[4];
      CUTE_UNROLL
      for (int i = 0; i < 4; ++i) q[i] = *this->query(4 * slab + i);
      CUTE_UNROLL
      for (int n = 0; n < kKeys / 8; ++n) {
        const uint4 vector = *reinterpret_cast<const uint4*>(first + 8 * n * kHeadDim);
        const std::uint32_t words[] = {vector.x, vector.y, vector.z, vector.w};
        CUTE_UNROLL
        for (int i = 0; i < 4; ++i) Base::multiply(acc, n, q[i], pairs<0>(words[i]), pairs<1>(words[i]));
      }
    }
  }

  // acc_out, of (16, kHeadDim), += P·V. Its columns are permuted: write().
  template <class Accumulator, class Probabilities>
  __device__ void output(Accumulator& acc_out, const Probabilities& probabilities, const unsigned char* v) const {
    const auto p = cute::recast<const std::uint32_t>(probabilities);
    const int lane = threadIdx.x % 32, matrix = lane / 8;
    // ldmatrix takes pairs of neighbouring columns for elements: of keys to 8 and from 8 on, of two vectors.
    const int row = matrix % 2 * 8 + lane % 8, right = matrix / 2;
    CUTE_UNROLL
    for (int step = 0; step < kKeys / 16; ++step) {
      const uint4 a{p(4 * step), p(4 * step + 1), p(4 * step + 2), p(4 * step + 3)};
      CUTE_UNROLL
      for (int vector = 0; vector < Places::kVectors; vector += 2) {
        const unsigned char* from = v + 16 * step * kHeadDim + Places::at(row, vector | right);
        std::uint32_t words[4];
        cute::SM75_U16x8_LDSM_T::copy(*reinterpret_cast<const cute::uint128_t*>(from), words[0], words[1], words[2],
                                      words[3]);
        // Two keys of the column on the left, then two of the one on the right.
        for (std::uint32_t& word : words) word = cuda::pick_bytes(word, 0, 0x3120);
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          const std::uint32_t low = words[2 * i], high = words[2 * i + 1];
          Base::multiply(acc_out, 2 * (vector + i), a, pairs<0>(low), pairs<0>(high));
          Base::multiply(acc_out, 2 * (vector + i) + 1, a, pairs<1>(low), pairs<1>(high));
        }
      }
    }
  }

  // This lane's elements of row group() + 8·half, times factor: of each vector four neighbours. row: where it
  // begins.
  template <class Accumulator>
  static __device__ void write(const Accumulator& acc_out, int half, float factor, float* row) {
    CUTE_UNROLL
    for (int vector = 0; vector < Places::kVectors; ++vector) {
      const auto at = [&](int right, int i) { return factor * acc_out(4 * (2 * vector + right) + 2 * half + i); };
      *reinterpret_cast<float4*>(row + vector * kVector + quarter() * 4) = {at(0, 0), at(1, 0), at(0, 1), at(1, 1)};
    }
  }

 private:
  template <int kHalf>
  static __device__ std::uint32_t pairs(std::uint32_t word) {
    return cuda::pair_from_fp8<Element, kHalf>(word);
  }
};

}  // namespace flashsdk::sm80
