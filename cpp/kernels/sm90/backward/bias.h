// A tile of the bias in the SM90 backward: where dS will be.
#pragma once

#include <cstdint>

#include <cute/arch/copy_sm75.hpp>

#include "cuda/tile/bias_tile.h"
#include "sm90/traits.h"

namespace flashsdk::sm90 {

// A warp's 16 keys of the bias take the 32 bytes of each row in which it will store dS of the same keys
// (store_transposed): the buffer is free until then, and no warp waits for another. Of bool they take half of these.
template <class Element, int kBlockM>
class BackwardBias {
  static constexpr int kKeys = 16, kVectorBytes = 16, kPitch = 128;  // of a warp; of a row of a slab

 public:
  // slab: of the dS of a warpgroup, whose first key is n0. thread: of the warpgroup.
  __device__ BackwardBias(const ScoreParam& score, const SeqlenInfo& seq, int batch, int head, int n0, void* slab,
                          int thread)
      : rows_(score, seq, batch, head),
        n0_(n0 + thread / 32 * kKeys),
        slab_(cute::cast_smem_ptr_to_uint(slab)),
        warp_(thread / 32),
        lane_(thread % 32) {}

  // Starts the copy of the rows from query m0 on. What lies beyond the last query and key is zero.
  __device__ void load(int m0) const {
    rows_.with_size([&](auto size) { copy<size.value>(m0); });
  }

  // Adds the tile, which has arrived for the warp, to the scores (keys, queries) times a scale; false hides.
  template <class Scores, class Coordinates>
  __device__ void add(Scores& scores, const Coordinates&, float scale) const {
    if (rows_.is_bool()) {
      scale_and_hide(scores, scale);
    } else {
      add_words(scores, scale);
    }
  }

 private:
  // Of a vector of 16 bytes in shared memory, as SmemTile swizzles slabs.
  __device__ std::uint32_t address(int row, int vector) const {
    return slab_ + row * kPitch + ((2 * warp_ + vector) ^ (row % 8)) * kVectorBytes;
  }

  template <int kSize>
  __device__ void copy(int m0) const {
    constexpr int kVectors = kKeys * kSize / kVectorBytes, kRowsAtOnce = 32 / kVectors;  // of a warp's row
    static_assert(kBlockM % kRowsAtOnce == 0 && kRowsAtOnce % 8 == 0);
    const int row = lane_ / kVectors, vector = lane_ % kVectors, key = n0_ + vector * (kVectorBytes / kSize);
    const int bytes = rows_.template bytes_from<kSize, kVectorBytes>(key);
    const char* from = rows_.template at<kSize>(m0 + row, key);
    const std::uint32_t to = address(row, vector);
    CUTE_UNROLL
    for (int pass = 0; pass < kBlockM / kRowsAtOnce; ++pass) {
      cuda::copy_vector_async(to + pass * kRowsAtOnce * kPitch, from,
                              rows_.has(m0 + row + pass * kRowsAtOnce) ? bytes : 0);
      from += kRowsAtOnce * rows_.template row_bytes<kSize>();
    }
  }

  // A warp's 16 keys x 16 queries are four matrices of ldmatrix, which transposes them.
  template <class Scores>
  __device__ void add_words(Scores& scores, float scale) const {
    const std::uint32_t first = address(lane_ % 8 + lane_ / 16 * 8, lane_ / 8 % 2);
    CUTE_UNROLL
    for (int j = 0; j < cuda::kExtent<Scores, 1>; j += 4) {
      std::uint32_t words[4];
      asm volatile("ldmatrix.sync.aligned.x4.trans.m8n8.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                   : "r"(first + j * 4 * kPitch)
                   : "memory");
      cuda::add_pairs<Element>(words, [&](int w, int e, float bias) {
        float& s = scores(w % 2, j + w / 2 * 2 + e);
        s = cuda::biased(s, scale, bias);
      });
    }
  }
  // Of bool: scales what is visible, too. A lane's keys are lane / 4 and 8 more, its queries pairs, eight apart.
  template <class Scores>
  __device__ void scale_and_hide(Scores& scores, float scale) const {
    CUTE_UNROLL
    for (int e = 0; e < 2; ++e) {
      const std::uint32_t first = address(lane_ % 4 * 2 + e, 0) + lane_ / 4;
      CUTE_UNROLL
      for (int j = 0; j < cuda::kExtent<Scores, 1>; j += 2) {
        CUTE_UNROLL
        for (int i = 0; i < 2; ++i) {
          std::uint32_t visible;
          asm volatile("ld.shared.u8 %0, [%1];" : "=r"(visible) : "r"(first + j * 4 * kPitch + i * 8) : "memory");
          scores(i, j + e) = visible != 0 ? scores(i, j + e) * scale : -INFINITY;
        }
      }
    }
  }

  cuda::BiasRows<Element> rows_;
  int n0_;
  std::uint32_t slab_;
  int warp_, lane_;
};

}  // namespace flashsdk::sm90
