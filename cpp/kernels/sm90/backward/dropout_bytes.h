// Dropout of the backward: what Philox yields for a warpgroup's tile of scores, in shared memory.
//
// Scores are transposed there, 16 keys to a warp, and a Philox call is for 32 keys (common/philox.h): drawn where it is
// needed, half of each call would be drawn for nothing. So the warps of a warpgroup share the calls, and read what they
// need of each other's.
#pragma once

#include <cstdint>

#include "cuda/tile/dropout.h"
#include "sm90/traits.h"

namespace flashsdk::sm90 {

// Of 64 keys x kQueries, which begin at multiples of 32 and 16.
//
// Drawn: warp s has a quarter of the queries, its lane l one of two strips of 32 keys, l / 16. A call is for queries q
// and q + 8, q = 2·(l % 4) + {0, 1} in a group of 16, and keys 2·(l % 16 / 4) + {0, 1} + {0, 8, 16, 24} of the strip.
//
// Read: a thread of warp w holds keys k and k + 8, k = 16·w + lane / 4, so the two words of its warp's half of a strip,
// w % 2, in the calls of strip w / 2 and lane lane / 8 · 4 + lane % 4; and of each word the bytes of its key, k % 2.
template <int kQueries>
class DropoutBytes {
  static constexpr int kWarps = kWarpgroup / 32, kStrips = kWarpgroupRows / 32;
  static constexpr int kWarpQueries = kQueries / kWarps, kCalls = kWarpQueries / 8;  // of a lane
  static_assert(kCalls == 2 || kCalls == 4);

 public:
  struct Shared {
    alignas(16) PhiloxBytes calls[kWarps][kCalls][kStrips][16];
  };

  // m0, n0: first query, and first key of the warpgroup; thread: of the warpgroup.
  static __device__ __forceinline__ void draw(Shared& shared, const DropoutRng& rng, int m0, int n0, int thread) {
    const int warp = thread / 32, strip = thread % 32 / 16, lane = thread % 16;
    const int query = m0 + warp * kWarpQueries + lane % 4 * 2, key = n0 + strip * 32 + lane / 4 * 2;
    CUTE_UNROLL
    for (int n = 0; n < kCalls; ++n) {
      const PhiloxBytes bytes = rng.group(query + n / 2 * 16 + n % 2, key);
      reinterpret_cast<uint4&>(shared.calls[warp][n][strip][lane]) =
          make_uint4(bytes.word[0], bytes.word[1], bytes.word[2], bytes.word[3]);
    }
  }

  __device__ DropoutBytes(const Shared& shared, int threshold, int thread) : factors_(threshold) {
    const int warp = thread / 32, lane = thread % 32;
    from_ = reinterpret_cast<const uint2*>(&shared.calls[0][0][warp / 2][lane / 8 * 4 + lane % 4]) + warp % 2;
    selector_ = lane / 4 % 2 ? 0x0602 : 0x0400;  // of the odd key, or of the even one
  }
  // f(i, j, factors) for all pairs of elements (i, j) and (i, j + 1) of the matrix view of the thread's accumulator,
  // (keys, queries): see cuda::DropFactors.
  template <class F>
  __device__ __forceinline__ void for_each_pair(F&& f) const {
    CUTE_UNROLL
    for (int call = 0; call < kWarps * kCalls; call += 2) {  // of queries q and q + 1
      const uint2 first = from_[call * kCallStride], second = from_[(call + 1) * kCallStride];
      CUTE_UNROLL
      for (int half = 0; half < 2; ++half) {  // … and 8 behind
        const int j = 2 * (call + half);
        f(0, j, factors(first.x, second.x, half));
        f(1, j, factors(first.y, second.y, half));
      }
    }
  }

 private:
  static constexpr int kCallStride = kStrips * 16 * 2;  // in halves of what a lane has drawn

  __device__ __forceinline__ std::uint32_t factors(std::uint32_t first, std::uint32_t second, int half) const {
    const std::uint32_t bytes = cuda::pick_bytes(first, second, selector_ + half * 0x0101);
    std::uint32_t numbers;  // bytes & 0x00ff00ff | 0x64006400, which takes two instructions where both are constants
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(numbers) : "r"(bytes), "r"(mask_), "r"(exponent_));
    return factors_(numbers);
  }

  cuda::DropFactors factors_;
  const uint2* from_;
  unsigned selector_, mask_ = 0x00ff00ff, exponent_ = 0x64006400;
};

// In shared memory, for each warpgroup; nothing in a kernel that does not draw.
template <class Bytes, int kWarpgroups>
struct SharedDropoutBytes {
  typename Bytes::Shared of[kWarpgroups];
};
template <class Bytes>
struct SharedDropoutBytes<Bytes, 0> {};

}  // namespace flashsdk::sm90
