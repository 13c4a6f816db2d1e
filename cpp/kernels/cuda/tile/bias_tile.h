// A tile of the bias on its way through shared memory.
//
// Read where it is added, each of its elements takes an address and a bound, and every few of them a trip to memory. So
// it is copied while the first product runs: whole vectors of 16 bytes, asynchronously. That takes rows made of such
// vectors; what else there may be sm80 reads where it is added (ScoreFeatures), and sm90 leaves to it.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cute/arch/copy_sm75.hpp>
#include <cute/tensor.hpp>

#include "common/seqlen_info.h"
#include "cuda/tile/element.h"
#include "cuda/tile/score_features.h"

namespace flashsdk::cuda {

template <class Element>
FLASHSDK_HD bool has_type(const BiasParam& bias) {
  return bias.dtype == DType::kBool || bias.dtype == kDType<Element>;
}
// Whether there is one that comes in vectors of 16 bytes, as bool or as the 16-bit type of q.
template <class Element>
FLASHSDK_HD bool has_vectors(const BiasParam& bias) {
  constexpr int kVectorBytes = 16;
  const std::int64_t size = bias.dtype == DType::kBool ? 1 : sizeof(Element);
  const std::int64_t strides = bias.batch | bias.head | bias.row;
  return bias.ptr != nullptr && has_type<Element>(bias) && bias.col == 1 &&
         reinterpret_cast<std::uintptr_t>(bias.ptr) % kVectorBytes == 0 && strides * size % kVectorBytes == 0;
}
// Null, or why has_vectors() is false.
template <class Element>
const char* refuse_bias(const BiasParam& bias) {
  if (has_vectors<Element>(bias)) return nullptr;
  if (bias.ptr == nullptr) return "there is no bias";
  return has_type<Element>(bias) ? "a bias's rows are not whole vectors of 16 bytes"
                                 : "a bias is of another type than q";
}

// The bias of one head, of bool or of the 16-bit type of q, in device memory. Rows are queries.
template <class Element>
class BiasRows {
 public:
  __device__ BiasRows(const ScoreParam& score, const SeqlenInfo& seq, int batch, int head)
      : bias_(score.bias), seq_(seq), offset_(batch * bias_.batch + head * bias_.head) {}

  __device__ const BiasParam& bias() const { return bias_; }
  __device__ bool is_bool() const { return bias_.dtype == DType::kBool; }
  // f(size of an element), known at compile time.
  template <class F>
  __device__ void with_size(F&& f) const {
    if (is_bool()) {
      f(cute::Int<1>{});
    } else {
      f(cute::Int<sizeof(Element)>{});
    }
  }
  template <int kSize>
  __device__ const char* at(int query, int key) const {
    return static_cast<const char*>(bias_.ptr) + (offset_ + query * bias_.row + key) * kSize;
  }
  template <int kSize>
  __device__ std::int64_t row_bytes() const {
    return bias_.row * kSize;
  }
  // Of a vector of kVectorBytes, which are of keys that exist.
  template <int kSize, int kVectorBytes>
  __device__ int bytes_from(int key) const {
    return clamp_index(seq_.seqlen_k - key, kVectorBytes / kSize) * kSize;
  }
  __device__ bool has(int query) const {  // before the first: beyond the last
    return static_cast<unsigned>(query) < static_cast<unsigned>(seq_.seqlen_q);
  }

 private:
  const BiasParam& bias_;
  const SeqlenInfo& seq_;
  std::int64_t offset_;
};

// 16 bytes to shared memory, asynchronously; those from `valid` on are zero.
__device__ __forceinline__ void copy_vector_async(std::uint32_t to, const void* from, int valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid) : "memory");
}

// f(w, e, value) of both elements of each of four words.
template <class Element, class F>
__device__ __forceinline__ void add_pairs(const std::uint32_t (&words)[4], F&& f) {
  CUTE_UNROLL
  for (int w = 0; w < 4; ++w) {
    const auto pair = reinterpret_cast<const cutlass::AlignedArray<Element, 2>&>(words[w]);
    CUTE_UNROLL
    for (int e = 0; e < 2; ++e) f(w, e, static_cast<float>(pair[e]));
  }
}

// kSharers groups of threads share the rows: each copies and adds its own, so that it need not wait for another.
// kAlways: the kernel refuses calls without one.
template <class Element, int kBlockM, int kBlockN, int kThreads, int kSharers, bool kAlways>
class BiasTile {
  static constexpr int kVectorBytes = 16;
  // Bytes from row to row. A vector more than the row has: eight rows of a fragment then lie in different banks.
  static constexpr int kPitch = kBlockN * static_cast<int>(sizeof(Element)) + kVectorBytes;
  static constexpr int kOwnRows = kBlockM / kSharers, kOwners = kThreads / kSharers;  // rows of a group, its threads

 public:
  static constexpr int kBytes = kBlockM * kPitch;

  // Whether a call's bias comes this way.
  static FLASHSDK_HD bool takes(const BiasParam& bias) { return has_vectors<Element>(bias); }

  // Of one head, in kBytes of shared memory, of which there need be none where takes() is false.
  __device__ BiasTile(const ScoreParam& score, const SeqlenInfo& seq, int batch, int head, void* smem)
      : rows_(score, seq, batch, head), smem_(static_cast<char*>(smem)) {}

  // Asked anew each time: kept, the answer takes a register, which backward kernels lack.
  __device__ bool holds() const { return kAlways || takes(rows_.bias()); }

  // Starts the copy of the tile whose first query and key these are. What lies beyond the last ones is zero.
  __device__ void load(int m0, int n0) const {
    if (holds()) rows_.with_size([&](auto size) { copy<size.value>(m0, n0); });
  }

  // Adds the tile, which has arrived for all threads, to the scores times a scale; false hides. kTried: by a maximum
  // that is known and small (OnlineSoftmax::try_exponentiate). A sum that leaves float then weighs nothing, as it
  // should, and a NaN that a bias of −inf should have hidden makes the try fail: nothing is asked of either.
  template <bool kTried = false, bool kTransposed, class Scores, class Coordinates>
  __device__ void add(Scores& scores, const TileCoordinates<kTransposed, Coordinates>& at, float scale) const {
    if (rows_.is_bool()) {
      scale_and_hide(scores, at, scale);
    } else if constexpr (kTried) {
      add_words(scores, at, [&](float s, float bias) { return fmaf(s, scale, bias); });
    } else {
      add_words<true>(scores, at, [&](float s, float bias) { return biased(s, scale, bias); });
    }
  }

 private:
  template <int kSize>
  __device__ void copy(int m0, int n0) const {
    constexpr int kVectors = kBlockN * kSize / kVectorBytes, kRowsAtOnce = kOwners / kVectors;  // of a row
    static_assert(kBlockN * kSize % kVectorBytes == 0 && kOwners % kVectors == 0 && kOwnRows % kRowsAtOnce == 0);
    const int thread = kSharers == 1 ? threadIdx.x : threadIdx.x % kThreads;
    const int row = thread / kOwners * kOwnRows + thread % kOwners / kVectors;
    const int column = thread % kVectors * kVectorBytes;
    const int key = n0 + column / kSize, bytes = rows_.template bytes_from<kSize, kVectorBytes>(key);
    const char* from = rows_.template at<kSize>(m0 + row, key);
    const std::uint32_t to = cute::cast_smem_ptr_to_uint(smem_ + row * kPitch + column);
    CUTE_UNROLL
    for (int pass = 0; pass < kOwnRows / kRowsAtOnce; ++pass) {
      copy_vector_async(to + pass * kRowsAtOnce * kPitch, from, rows_.has(m0 + row + pass * kRowsAtOnce) ? bytes : 0);
      from += kRowsAtOnce * rows_.template row_bytes<kSize>();
    }
  }

  // f(i, j) of each 2 x 4 elements of a thread, which are a warp's 16 x 16. kPieces: in pieces, each behind a branch:
  // the values of all would take the registers of a tile of scores.
  template <bool kPieces, class Scores, class F>
  __device__ void for_each_piece(F&& f) const {
    constexpr int kColumns = 16 / kExtent<Scores, 0>;
    static_assert(kColumns % 4 == 0 && kExtent<Scores, 1> % kColumns == 0);
    CUTE_UNROLL
    for (int first = 0; first < kExtent<Scores, 1>; first += kColumns) {
      const auto piece = [&] {
        CUTE_UNROLL
        for (int j = first; j < first + kColumns; j += 4) {
          CUTE_UNROLL
          for (int i = 0; i < kExtent<Scores, 0>; i += 2) f(i, j);
        }
      };
      if constexpr (kPieces)
        branch_if(rows_.bias().ptr != nullptr, piece);
      else
        piece();
    }
  }

  // Of 16 bits: a warp's 16 x 16 scores are four matrices of ldmatrix, which brings neighbours in a row of the
  // accumulator to their thread as one word, also where that is a column of the bias.
  template <bool kPieces = false, bool kTransposed, class Scores, class Coordinates, class Sum>
  __device__ void add_words(Scores& scores, const TileCoordinates<kTransposed, Coordinates>& at, Sum&& sum) const {
    const int lane = threadIdx.x % 32, query = at.local_query(0, 0), key = at.local_key(0, 0);
    // The row of a matrix whose address a lane gives; (lane / 4, lane % 4 * 2) is its first element's row and column.
    const int upper = lane / 8 % 2 * 8, right = lane / 16 * 8;
    const int first_query = query - (kTransposed ? lane % 4 * 2 : lane / 4) + lane % 8 + (kTransposed ? right : upper);
    const int first_key = key - (kTransposed ? lane / 4 : lane % 4 * 2) + (kTransposed ? upper : right);
    const char* first = smem_ + opaque(first_query * kPitch + first_key * static_cast<int>(sizeof(Element)));
    for_each_piece<kPieces, Scores>([&](int i, int j) {
      const char* from = first + (at.local_query(i, j) - query) * kPitch +
                         (at.local_key(i, j) - key) * static_cast<int>(sizeof(Element));
      std::uint32_t words[4];
      using Load = std::conditional_t<kTransposed, cute::SM75_U16x8_LDSM_T, cute::SM75_U32x4_LDSM_N>;
      Load::copy(*reinterpret_cast<const cute::uint128_t*>(from), words[0], words[1], words[2], words[3]);
      add_pairs<Element>(words, [&](int w, int e, float bias) {
        float& s = scores(i + w % 2, j + w / 2 * 2 + e);
        s = sum(s, bias);
      });
    });
  }
  // Of bool: scales what is visible, too.
  template <bool kTransposed, class Scores, class Coordinates>
  __device__ void scale_and_hide(Scores& scores, const TileCoordinates<kTransposed, Coordinates>& at,
                                 float scale) const {
    const int query = at.local_query(0, 0), key = at.local_key(0, 0);
    const char* first = smem_ + opaque(query * kPitch + key);
    const auto byte = [&](int i, int j) {
      return first + (at.local_query(i, j) - query) * kPitch + at.local_key(i, j) - key;
    };
    const auto set = [&](float& s, bool visible) { s = visible ? s * scale : -INFINITY; };
    for_each_piece<true, Scores>([&](int i, int j) {
      CUTE_UNROLL
      for (int e = 0; e < 4; ++e) {
        const int row = i + e % 2, column = j + e / 2 * 2;  // and the next one, which is the next key or query
        if constexpr (kTransposed) {
          set(scores(row, column), *byte(row, column));
          set(scores(row, column + 1), *byte(row, column + 1));
        } else {
          const unsigned both = *reinterpret_cast<const std::uint16_t*>(byte(row, column));
          set(scores(row, column), both & 0xff);
          set(scores(row, column + 1), both >> 8);
        }
      }
    });
  }

  BiasRows<Element> rows_;
  char* smem_;
};

}  // namespace flashsdk::cuda
