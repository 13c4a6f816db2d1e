// Dropout of the backward: what Philox yields for a warpgroup's tile of scores, in shared memory.
//
// Scores are transposed there, 16 keys to a warp, and a Philox call is for 32 keys (common/philox.h): drawn where it is
// needed, half of each call would be drawn for nothing. So the warps of a warpgroup share the calls, and take what they
// need from each other's.
#pragma once

#include <cstdint>

#include "cuda/dropout.h"
#include "sm90/traits.h"

namespace flashsdk::sm90 {

// Of 64 keys x kQueries. A lane's calls are of one pair of keys and of kCalls queries q, q + 1, q + 16, …; 16 lanes, of
// which a number counts pairs of queries first, are for a strip of 32 keys and 8·kCalls queries.
template <int kQueries>
class DropoutBytes {
  static constexpr int kStrips = kWarpgroupRows / 32, kSets = 4, kSetQueries = kQueries / kSets;
  static constexpr int kCalls = kSetQueries / 8;
  static_assert(kCalls == 2 || kCalls == 4);
  static constexpr int kPerCall = kStrips * 16 * 2;  // halves of calls

 public:
  struct Shared {
    alignas(16) PhiloxBytes calls[kSets][kCalls][kStrips][16];
  };

  // m0, n0: first query, and first key of the warpgroup; thread: of the warpgroup.
  static __device__ __forceinline__ void draw(Shared& shared, const DropoutRng& rng, int m0, int n0, int thread) {
    const int set = thread / 32, strip = thread % 32 / 16, lane = thread % 16;
    const int query = m0 + set * kSetQueries + lane % 4 * 2, key = n0 + strip * 32 + lane / 4 * 2;
    CUTE_UNROLL
    for (int n = 0; n < kCalls; ++n) {
      const PhiloxBytes bytes = rng.group(query + n / 2 * 16 + n % 2, key);
      reinterpret_cast<uint4&>(shared.calls[set][n][strip][lane]) =
          make_uint4(bytes.word[0], bytes.word[1], bytes.word[2], bytes.word[3]);
    }
  }

  // For a thread that holds keys k and k + 8.
  __device__ DropoutBytes(const Shared& shared, int threshold, int thread) : factors_(threshold) {
    const int warp = thread / 32, lane = thread % 32;
    own_ = reinterpret_cast<const uint2*>(&shared.calls[0][0][warp / 2][lane / 8 * 4 + lane % 4]) + warp % 2;
    selector_ = lane / 4 % 2 ? 0x0602 : 0x0400;  // of the odd key, or of the even one
  }
  // f(i, j, factors) for all pairs of elements (i, j) and (i, j + 1) of the matrix view of its accumulator, (keys,
  // queries): 0 for what is dropped, else 1, in fp16.
  template <class F>
  __device__ __forceinline__ void for_each_pair(F&& f) const {
    CUTE_UNROLL
    for (int set = 0; set < kSets; ++set) {
      CUTE_UNROLL
      for (int n = 0; n < kCalls; n += 2) {
        const uint2 even = own_[(set * kCalls + n) * kPerCall], odd = own_[(set * kCalls + n + 1) * kPerCall];
        CUTE_UNROLL
        for (int half = 0; half < 2; ++half) {
          const int j = 2 * (set * kCalls + n + half);
          f(0, j, factors(even.x, odd.x, half));
          f(1, j, factors(even.y, odd.y, half));
        }
      }
    }
  }

 private:
  // Of queries q + 8·half and the one behind.
  __device__ __forceinline__ std::uint32_t factors(std::uint32_t even, std::uint32_t odd, int half) const {
    const std::uint32_t bytes = cuda::pick_bytes(even, odd, selector_ + half * 0x0101);
    std::uint32_t numbers;  // bytes & 0x00ff00ff | 0x64006400, which takes two instructions where both are constants
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(numbers) : "r"(bytes), "r"(mask_), "r"(exponent_));
    return factors_(numbers);
  }

  cuda::DropFactors factors_;
  const uint2* own_;
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
