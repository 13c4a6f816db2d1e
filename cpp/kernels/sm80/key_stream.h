// Keys and values of one warp on their way from device memory, for kernels of few rows (few_rows.h).
#pragma once

#include <cstdint>

#include <cute/tensor.hpp>

#include "common/seqlen_info.h"
#include "cuda/tile/bias_tile.h"
#include "sm80/traits.h"

namespace flashsdk::sm80 {

// The places in shared memory of a warp's keys: rows whose vectors of 16 bytes are permuted such that eight lanes reach
// all banks, whether they copy neighbours or read a vector of each of eight rows; of fp8 keys also half of each of two.
template <class Traits>
struct KeyPlaces {
  static constexpr int kVectorBytes = 16;
  static constexpr int kRowBytes = Traits::kHeadDim * static_cast<int>(sizeof(typename Traits::Kv));
  static constexpr int kVectors = kRowBytes / kVectorBytes;  // of a row
  static_assert(kVectors >= (Traits::kFp8Kv ? 4 : 8) && (kVectors & (kVectors - 1)) == 0);

  // What a row's vectors are permuted by. Of sums of rows without common bits it is the sum.
  static __device__ constexpr int mix(int row) {
    return Traits::kFp8Kv ? ((row & 1) << 2 | (row >> 1 & 3)) & (kVectors - 1) : row & 7;
  }
  static __device__ constexpr int at(int row, int vector) {
    return row * kRowBytes + (vector ^ mix(row)) * kVectorBytes;
  }
};

// Tiles of kKeys keys, in kStages places that take turns.
template <class Traits>
class KeyStream {
  using Kv = typename Traits::Kv;
  using Places = KeyPlaces<Traits>;
  static constexpr int kKeys = Traits::kBlockN, kRowBytes = Places::kRowBytes;
  static constexpr int kVector = Places::kVectorBytes / static_cast<int>(sizeof(Kv));  // elements
  static constexpr int kRowStep = 32 / Places::kVectors, kPasses = kKeys / kRowStep, kKeysOfLane = ceil_div(kKeys, 32);
  static constexpr int kStageBytes = 2 * Traits::kCopiedBytes;
  // Neighbouring keys that lie in one page where its size is a multiple of as many: the fewest that a tile has.
  static constexpr int kRun = 16;
  static_assert(kKeys % kRun == 0 && kRun % kRowStep == 0);

 public:
  __device__ KeyStream(const ForwardParams& p, const SeqlenInfo& seq, int batch, int head_kv, unsigned char* smem)
      : p_(p),
        batch_(batch),
        seqlen_k_(seq.seqlen_k),
        row_(threadIdx.x % 32 / Places::kVectors),
        k_(seq.head_k<const Kv>(p.k, p.pages.table != nullptr ? 0 : batch, head_kv) + column()),
        v_(seq.head_k<const Kv>(p.v, p.pages.table != nullptr ? 0 : batch, head_kv) + column()),
        smem_(smem),
        place_(cute::cast_smem_ptr_to_uint(smem) + Places::at(row_, column() / kVector)) {}

  // Where the keys and values of a stage are.
  __device__ const unsigned char* k(int stage) const { return smem_ + stage * kStageBytes; }
  __device__ const unsigned char* v(int stage) const { return k(stage) + Traits::kCopiedBytes; }

  // Asks which pages a tile's keys are in: well ahead of its load(), as tables lie in memory.
  __device__ void ask_pages(int tile) {
    if (p_.pages.table == nullptr) return;
    CUTE_UNROLL
    for (int i = 0; i < kKeysOfLane; ++i) {
      const int key = tile * kKeys + i * 32 + static_cast<int>(threadIdx.x) % 32;
      const std::int64_t place = batch_ * p_.pages.batch + PagePlace::of(key, p_.pages.size).page;
      pages_[i] = key < seqlen_k_ ? p_.pages.table[place] : 0;
    }
  }
  // Starts the copy of a tile. What lies beyond the last key or beyond the head dimension becomes zero.
  __device__ void load(int tile, int stage) const {
    const int first = tile * kKeys, rows = seqlen_k_ - first - row_;
    const int k_rows = column() < p_.head_dim ? rows : 0, v_rows = column() < p_.head_dim_v ? rows : 0;
    const std::uint32_t place = place_ + stage * kStageBytes;
    const int size = p_.pages.size;
    if (p_.pages.table == nullptr || size % kRun == 0) {
      CUTE_UNROLL
      for (int run = 0; run < kKeys; run += kRun) {
        // 0 without pages, and behind the last key, where nothing is read.
        const std::int64_t page = __shfl_sync(kAllLanes, pages_[run / 32], run % 32);
        const int row = row_ + (p_.pages.table == nullptr ? first + run : PagePlace::of(first + run, size).row);
        const Kv *k = k_ + page * p_.k.batch + row * p_.k.row, *v = v_ + page * p_.v.batch + row * p_.v.row;
        CUTE_UNROLL
        for (int pass = run / kRowStep; pass < (run + kRun) / kRowStep; ++pass) {
          copy(place, pass, k, k_rows);
          copy(place + Traits::kCopiedBytes, pass, v, v_rows);
          k += kRowStep * p_.k.row;
          v += kRowStep * p_.v.row;
        }
      }
    } else {
      // One after the other: addresses of both would take registers that there are not.
#pragma unroll 1
      for (int i = 0; i < 2; ++i) {
        const TensorParam& t = i == 0 ? p_.k : p_.v;
        load_pages(place + i * Traits::kCopiedBytes, i == 0 ? k_ : v_, t, first + row_, i == 0 ? k_rows : v_rows);
      }
    }
  }

 private:
  static constexpr unsigned kAllLanes = 0xffffffffu;

  // Of this lane's vectors, in elements.
  static __device__ int column() { return static_cast<int>(threadIdx.x) % Places::kVectors * kVector; }

  // Row row_ + pass · kRowStep. These two have no bits in common, so that they are mixed one by one (KeyPlaces::at).
  static __device__ void copy(std::uint32_t place, int pass, const Kv* from, int rows) {
    const int row = pass * kRowStep;
    const std::uint32_t to =
        (place ^ static_cast<std::uint32_t>(Places::mix(row) * Places::kVectorBytes)) + row * kRowBytes;
    cuda::copy_vector_async(to, from, row < rows ? Places::kVectorBytes : 0);
  }
  // From pass to pass a row moves on by as much in its page, or in the next. first: this lane's.
  __device__ void load_pages(std::uint32_t place, const Kv* from, const TensorParam& t, int first, int rows) const {
    const int size = p_.pages.size, step = PagePlace::of(kRowStep, size).row;
    int row = PagePlace::of(first, size).row;
    CUTE_UNROLL
    for (int pass = 0; pass < kPasses; ++pass) {
      const int lane = (row_ + pass * kRowStep) % 32;
      const std::int64_t page = __shfl_sync(kAllLanes, pages_[pass * kRowStep / 32], lane);
      copy(place, pass, from + page * t.batch + row * t.row, rows);
      row += step;
      if (row >= size) row -= size;
    }
  }

  const ForwardParams& p_;
  int batch_, seqlen_k_;
  int row_;  // of this lane's first vector of a tile
  const Kv *k_, *v_;
  unsigned char* smem_;
  std::uint32_t place_;          // of that vector in the first stage
  int pages_[kKeysOfLane] = {};  // of keys lane, 32 + lane, … of the tile that is loaded next
};

}  // namespace flashsdk::sm80
