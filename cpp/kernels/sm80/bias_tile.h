// A tile of the bias on its way through shared memory.
//
// Read where it is added, each of its elements takes an address and a bound, and every few of them a trip to memory. So
// it is copied as K and V are, while the first product runs: whole vectors of 16 bytes, asynchronously. That takes rows
// made of such vectors; what else there may be is read where it is added (cuda::ScoreFeatures).
#pragma once

#include <cstdint>

#include <cute/tensor.hpp>

#include "common/seqlen_info.h"
#include "cuda/launch.h"
#include "cuda/score_features.h"

namespace flashsdk::sm80 {

// Of bool, or of the 16-bit type of q. Rows are queries.
template <class Element, int kBlockM, int kBlockN, int kThreads>
class BiasTile {
  static constexpr int kVectorBytes = 16;
  // Bytes from row to row. A vector more than the row has: eight rows of a fragment then lie in different banks.
  static constexpr int kPitch = kBlockN * static_cast<int>(sizeof(Element)) + kVectorBytes;

 public:
  static constexpr int kBytes = kBlockM * kPitch;

  // Whether a call's bias comes this way.
  static FLASHSDK_HD bool takes(const BiasParam& bias) {
    const bool is_bool = bias.dtype == DType::kBool;
    const std::int64_t size = is_bool ? 1 : sizeof(Element), strides = bias.batch | bias.head | bias.row;
    return bias.ptr != nullptr && (is_bool || bias.dtype == cuda::kDType<Element>) && bias.col == 1 &&
           reinterpret_cast<std::uintptr_t>(bias.ptr) % kVectorBytes == 0 && strides * size % kVectorBytes == 0;
  }

  // Of one head, in kBytes of shared memory, of which there need be none where takes() is false.
  __device__ BiasTile(const ScoreParam& score, const SeqlenInfo& seq, int batch, int head, void* smem)
      : bias_(score.bias),
        seq_(seq),
        offset_(batch * bias_.batch + head * bias_.head),
        smem_(static_cast<char*>(smem)) {}

  // Asked anew each time: kept, the answer takes a register, which backward kernels lack.
  __device__ bool holds() const { return takes(bias_); }

  // Starts the copy of the tile whose first query and key these are. What lies beyond the last ones is zero.
  __device__ void load(int m0, int n0) const {
    if (!holds()) return;
    if (is_bool()) {
      copy<1>(m0, n0);
    } else {
      copy<sizeof(Element)>(m0, n0);
    }
  }

  // Adds the tile, which has arrived for all threads, to the scores; false hides.
  template <bool kTransposed, class Scores, class Coordinates>
  __device__ void add(Scores& scores, const cuda::TileCoordinates<kTransposed, Coordinates>& at) const {
    if (is_bool()) {
      add_elements<std::uint8_t>(scores, at, [](float s, std::uint8_t visible) { return visible ? s : -INFINITY; });
    } else {
      add_elements<Element>(scores, at, [](float s, Element x) { return cuda::biased(s, static_cast<float>(x)); });
    }
  }

 private:
  __device__ bool is_bool() const { return bias_.dtype == DType::kBool; }

  template <int kSize>
  __device__ void copy(int m0, int n0) const {
    constexpr int kVectors = kBlockN * kSize / kVectorBytes, kRowsAtOnce = kThreads / kVectors;  // of a row
    static_assert(kBlockN * kSize % kVectorBytes == 0 && kThreads % kVectors == 0 && kBlockM % kRowsAtOnce == 0);
    const int row = threadIdx.x / kVectors, column = threadIdx.x % kVectors * kVectorBytes;
    const int bytes = clamp_index(seq_.seqlen_k - n0 - column / kSize, kVectorBytes / kSize) * kSize;
    const char* from = static_cast<const char*>(bias_.ptr) + column + (offset_ + (m0 + row) * bias_.row + n0) * kSize;
    const std::uint32_t to = cute::cast_smem_ptr_to_uint(smem_ + row * kPitch + column);
    CUTE_UNROLL
    for (int pass = 0; pass < kBlockM / kRowsAtOnce; ++pass) {
      const int valid = m0 + row + pass * kRowsAtOnce < seq_.seqlen_q ? bytes : 0;
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + pass * kRowsAtOnce * kPitch), "l"(from),
                   "r"(valid)
                   : "memory");
      from += kRowsAtOnce * bias_.row * kSize;
    }
  }

  // By pieces, each behind a branch: the values of all would take the registers of a tile of scores. Where a row is a
  // thread's, two neighbours come at once.
  template <class T, bool kTransposed, class Scores, class Coordinates, class F>
  __device__ void add_elements(Scores& scores, const cuda::TileCoordinates<kTransposed, Coordinates>& at, F&& f) const {
    constexpr int kColumns = 16 / cuda::kExtent<Scores, 0>, kAtOnce = kTransposed ? 1 : 2;
    constexpr int kSize = sizeof(T);
    static_assert(kColumns >= kAtOnce && cuda::kExtent<Scores, 1> % kColumns == 0);
    const int query = at.local_query(0, 0), key = at.local_key(0, 0);
    const char* first = smem_ + cuda::opaque(query * kPitch + key * kSize);
    CUTE_UNROLL
    for (int piece = 0; piece < cuda::kExtent<Scores, 1>; piece += kColumns) {
      cuda::branch_if(bias_.ptr != nullptr, [&] {
        CUTE_UNROLL
        for (int j = piece; j < piece + kColumns; j += kAtOnce) {
          CUTE_UNROLL
          for (int i = 0; i < cuda::kExtent<Scores, 0>; ++i) {
            const char* from = first + (at.local_query(i, j) - query) * kPitch + (at.local_key(i, j) - key) * kSize;
            const auto values = *reinterpret_cast<const cutlass::AlignedArray<T, kAtOnce>*>(from);
            CUTE_UNROLL
            for (int e = 0; e < kAtOnce; ++e) scores(i, j + e) = f(scores(i, j + e), values[e]);
          }
        }
      });
    }
  }

  const BiasParam& bias_;
  const SeqlenInfo& seq_;
  std::int64_t offset_;
  char* smem_;
};

}  // namespace flashsdk::sm80
