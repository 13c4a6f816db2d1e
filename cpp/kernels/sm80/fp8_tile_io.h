// Brings a (rows, head_dim) tile of float8_e4m3fn from device memory to its swizzled place of 16 bits in shared memory.
// A thread copies vectors of 16 bytes and converts those that it has copied: between the two it waits for itself alone.
#pragma once

#include <cstdint>

#include <cute/tensor.hpp>

#include "cuda/tile/bias_tile.h"
#include "cuda/tile/fp8.h"
#include "cuda/tile/vector_io.h"
#include "sm80/traits.h"

namespace flashsdk::sm80 {

// kAnyAlignment: rows that are not made of whole vectors go element by element.
template <class Element, int kRows, int kHeadDim, int kThreads, bool kAnyAlignment>
class Fp8TileIo {
  static constexpr int kVector = cuda::kFp8Vector;
  static constexpr int kSlab = slab_columns(kHeadDim), kSlabs = kHeadDim / kSlab;
  static constexpr int kThreadsPerRow = kSlab / kVector;
  static constexpr int kRowStep = kThreads / kThreadsPerRow;
  static constexpr int kPasses = kRows / kRowStep;
  static_assert(kRows % kRowStep == 0, "more threads than the tile has vectors");

 public:
  // copied: kRows · kHeadDim bytes for what is copied.
  __device__ Fp8TileIo(int thread, int columns, unsigned char* copied)
      : row_(thread / kThreadsPerRow),
        column_(thread % kThreadsPerRow * kVector),
        columns_(columns),
        copied_(copied + thread * kVector) {}

  // Starts the copy of `rows` rows from `first` on; what lies beyond them or beyond the head dimension becomes zero.
  __device__ void load(const KeyRows<const std::uint8_t>& from, int first, int rows) const {
    const std::uint8_t* sources[kPasses];  // all are asked where they are before the first copy, as in TileIo
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = row_ + pass * kRowStep;
      sources[pass] = row < rows ? from.at(first + row) : from.any();
    }
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool row_valid = row_ + pass * kRowStep < rows;
      const bool vectors = !kAnyAlignment || cuda::fp8_vector_row(sources[pass], columns_);
      CUTE_UNROLL
      for (int slab = 0; slab < kSlabs; ++slab) {
        const int left = columns_ - column_ - slab * kSlab;  // elements of the row; may be negative
        const std::uint8_t* source = sources[pass] + column_ + slab * kSlab;
        if constexpr (kAnyAlignment) {
          if (!vectors) {
            *place(pass, slab) = cuda::gather_fp8(source, row_valid ? left : 0);
            continue;
          }
        }
        const bool there = row_valid && left > 0;
        cuda::copy_vector_async(cute::cast_smem_ptr_to_uint(place(pass, slab)), source, there ? kVector : 0);
      }
    }
  }

  // Converts what this thread has copied, and which has arrived.
  template <class SmemTensor>  // (kRows, kHeadDim)
  __device__ void convert(SmemTensor&& smem) const {
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      CUTE_UNROLL
      for (int slab = 0; slab < kSlabs; ++slab) {
        const uint4 vector = *place(pass, slab);
        const std::uint32_t words[] = {vector.x, vector.y, vector.z, vector.w};
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          const std::uint32_t first = words[2 * half], second = words[2 * half + 1];
          const int column = column_ + slab * kSlab + half * cuda::kVectorElements;
          *reinterpret_cast<uint4*>(&smem(row_ + pass * kRowStep, column)) = {
              cuda::pair_from_fp8<Element, 0>(first), cuda::pair_from_fp8<Element, 1>(first),
              cuda::pair_from_fp8<Element, 0>(second), cuda::pair_from_fp8<Element, 1>(second)};
        }
      }
    }
  }

 private:
  __device__ uint4* place(int pass, int slab) const {
    return reinterpret_cast<uint4*>(copied_ + (pass * kSlabs + slab) * kThreads * kVector);
  }

  int row_, column_, columns_;
  unsigned char* copied_;
};

}  // namespace flashsdk::sm80
