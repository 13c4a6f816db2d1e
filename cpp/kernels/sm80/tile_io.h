// Moves a (rows, head_dim) tile between device memory and its swizzled place in shared memory, 16 bytes a thread.
#pragma once

#include <cute/tensor.hpp>

#include "common/seqlen_info.h"
#include "cuda/tile/vector_io.h"
#include "sm80/traits.h"

namespace flashsdk::sm80 {

// Which page each of a thread's rows of a tile of keys lies in.
template <int kPasses>
struct PagesOfRows {
  int of_pass[kPasses];
};

// kAnyAlignment: rows that are not made of whole vectors of 16 bytes go element by element.
template <class Element, int kRows, int kHeadDim, int kThreads, bool kAnyAlignment>
class TileIo {
  static constexpr int kVector = cuda::kVectorElements;
  static constexpr int kThreadsPerRow = slab_columns(kHeadDim) / kVector;
  static constexpr int kRowStep = kThreads / kThreadsPerRow;
  static constexpr int kPasses = kRows / kRowStep;
  static constexpr int kSlabs = kHeadDim / slab_columns(kHeadDim);
  static_assert(kRows % kRowStep == 0, "more threads than the tile has vectors");

  using Partition = decltype(cute::make_tiled_copy(
      cute::Copy_Atom<cute::UniversalCopy<cute::uint128_t>, Element>{},
      Layout<Shape<Int<kRowStep>, Int<kThreadsPerRow>>, Stride<Int<kThreadsPerRow>, _1>>{},
      Layout<Shape<_1, Int<kVector>>>{}));

 public:
  __device__ TileIo(int thread, int columns)
      : thread_(thread), row_(thread / kThreadsPerRow), column_(thread % kThreadsPerRow * kVector), columns_(columns) {}

  // Starts the copy of `rows` rows; what lies beyond them or beyond the head dimension becomes zero.
  template <class SmemTensor>  // (kRows, kHeadDim)
  __device__ void load(SmemTensor&& smem, const Element* source, std::int64_t row_stride, int rows) const {
    auto dst = Partition{}.get_thread_slice(thread_).partition_D(smem);
    const bool vectors = !kAnyAlignment || cuda::vector_rows(source, row_stride, columns_);
    source += row_ * row_stride + column_;
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      load_row(dst, pass, source, row_ + pass * kRowStep < rows, vectors);
      source += kRowStep * row_stride;
    }
  }
  using Pages = PagesOfRows<kPasses>;
  // Asked a tile ahead, as tables lie in memory. `first` is the tile's first key, and `rows` what is left from there.
  __device__ Pages ask_pages(const PageParam& pages, int batch, int first, int rows) const {
    Pages found;
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = row_ + pass * kRowStep;
      const std::int64_t place = batch * pages.batch + PagePlace::of(first + row, pages.size).page;
      found.of_pass[pass] = row < rows ? pages.table[place] : 0;
    }
    return found;
  }
  // The same of keys in pages; `source` is row 0 of page 0.
  template <class SmemTensor>
  __device__ void load(SmemTensor&& smem, const Element* source, const TensorParam& t, const Pages& pages,
                       int page_size, int first, int rows) const {
    auto dst = Partition{}.get_thread_slice(thread_).partition_D(smem);
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = row_ + pass * kRowStep;
      const Element* at = source + pages.of_pass[pass] * t.batch + PagePlace::of(first + row, page_size).row * t.row;
      const bool vectors = !kAnyAlignment || cuda::vector_rows(at, 0, columns_);
      load_row(dst, pass, at + column_, row < rows, vectors);
    }
  }
  // The same of rows from `first` on, wherever they are: KeyRows, or what is like it.
  template <class SmemTensor, class Rows>
  __device__ void load(SmemTensor&& smem, const Rows& from, int first, int rows) const {
    auto dst = Partition{}.get_thread_slice(thread_).partition_D(smem);
    // All are asked where they are before the first copy: behind one, the next question would wait for the answer.
    const Element* sources[kPasses];
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = row_ + pass * kRowStep;
      sources[pass] = row < rows ? from.at(first + row) : from.any();  // of one that is not there, nobody asks
    }
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      const bool vectors = !kAnyAlignment || cuda::vector_rows(sources[pass], 0, columns_);
      load_row(dst, pass, sources[pass] + column_, row_ + pass * kRowStep < rows, vectors);
    }
  }

  template <class SmemTensor>
  __device__ void store(SmemTensor&& smem, Element* target, std::int64_t row_stride, int rows) const {
    auto src = Partition{}.get_thread_slice(thread_).partition_S(smem);
    const bool vectors = !kAnyAlignment || cuda::vector_rows(target, row_stride, columns_);
    target += row_ * row_stride + column_;
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      bool row_valid = row_ + pass * kRowStep < rows;
      CUTE_UNROLL
      for (int slab = 0; slab < kSlabs; ++slab) {
        if constexpr (kAnyAlignment) {
          if (!vectors) {
            cuda::scatter_vector(target + slab * slab_columns(kHeadDim),
                                 *reinterpret_cast<const uint4*>(&src(0, pass, slab)), row_valid ? left(slab) : 0);
            continue;
          }
        }
        if (row_valid && column_ + slab * slab_columns(kHeadDim) < columns_) {
          *reinterpret_cast<cute::uint128_t*>(target + slab * slab_columns(kHeadDim)) =
              *reinterpret_cast<const cute::uint128_t*>(&src(0, pass, slab));
        }
      }
      target += kRowStep * row_stride;
    }
  }

 private:
  // One row of a pass, whose first column for this thread is at `source`. vectors: it is made of whole ones.
  template <class Destination>
  __device__ void load_row(Destination& dst, int pass, const Element* source, bool row_valid, bool vectors) const {
    CUTE_UNROLL
    for (int slab = 0; slab < kSlabs; ++slab) {
      bool valid = row_valid && column_ + slab * slab_columns(kHeadDim) < columns_;
      const Element* from = source + slab * slab_columns(kHeadDim);
      if constexpr (kAnyAlignment) {
        if (!vectors) {
          *reinterpret_cast<uint4*>(&dst(0, pass, slab)) = cuda::gather_vector(from, row_valid ? left(slab) : 0);
          continue;
        }
      }
      cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
          *reinterpret_cast<const cute::uint128_t*>(from), *reinterpret_cast<cute::uint128_t*>(&dst(0, pass, slab)),
          valid);
    }
  }
  // Columns of the head dimension from this thread's first one of a slab on; may be negative.
  __device__ int left(int slab) const { return columns_ - column_ - slab * slab_columns(kHeadDim); }

  int thread_, row_, column_, columns_;
};

}  // namespace flashsdk::sm80
