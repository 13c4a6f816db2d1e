// Which probabilities dropout keeps: a fixed function of (seed, offset, batch·num_heads + head, row, column).
//
// Philox4x32 (Salmon et al., SC'11) with 7 rounds, the fewest that pass BigCrush. One call yields 16 bytes, one per
// element of {r, r + 8} x {c, c + 1} + {0, 8, 16, 24} columns: what one thread holds of a 16 x 32 tile in the
// accumulator of mma.m16n8 and wgmma, so a GPU kernel wastes no bit of it, and every backend drops the same elements.
#pragma once

#include <cstdint>

#include "common/params.h"

namespace flashsdk {

struct PhiloxBytes {
  std::uint32_t word[4];
};

FLASHSDK_HD std::uint64_t wide_product(std::uint32_t a, std::uint32_t b) {
#if defined(__CUDA_ARCH__)
  std::uint64_t product;  // of 64-bit factors, the compiler adds what the upper halves give, zero, to each
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
  return product;
#else
  return std::uint64_t{a} * b;
#endif
}

FLASHSDK_HD PhiloxBytes philox4x32_7(std::uint32_t c0, std::uint32_t c1, std::uint32_t c2, std::uint32_t c3,
                                     std::uint32_t k0, std::uint32_t k1) {
  for (int round = 0; round < 7; ++round) {
    std::uint64_t p0 = wide_product(c0, 0xD2511F53u), p1 = wide_product(c2, 0xCD9E8D57u);
    std::uint32_t n0 = static_cast<std::uint32_t>(p1 >> 32) ^ c1 ^ k0;
    std::uint32_t n2 = static_cast<std::uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<std::uint32_t>(p1);
    c3 = static_cast<std::uint32_t>(p0);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

class DropoutRng {
 public:
  DropoutRng() = default;
  // Of head 0 of a sequence. A seed that lies in memory is read here: kernels do so once for a tile of work. Read for
  // each tile of scores the backward took 2 to 12 % longer on an H100 (benchmarks/results/dropout_seeds.csv).
  FLASHSDK_HD DropoutRng(const DropoutParam& p, int batch) {
    std::uint64_t seed = p.seed, offset = p.offset;
    if (p.state != nullptr) {
      const std::uint64_t* state = p.state + batch * p.state_batch;
      seed = state[0];
      offset = state[1];
    }
    key0_ = static_cast<std::uint32_t>(seed);
    key1_ = static_cast<std::uint32_t>(seed >> 32) ^ static_cast<std::uint32_t>(offset >> 32);
    offset_ = static_cast<std::uint32_t>(offset);
    batch_head_ = static_cast<std::uint32_t>(p.first_head + batch * p.heads_each);
  }
  FLASHSDK_HD DropoutRng of(int head) const {
    DropoutRng rng = *this;
    rng.batch_head_ += static_cast<std::uint32_t>(head);
    return rng;
  }

  // The 16 bytes of the group that holds (row, col); byte `byte_of` of word `word_of` is that element's.
  FLASHSDK_HD PhiloxBytes group(int row, int col) const {
    std::uint32_t r = static_cast<std::uint32_t>((row / 16) * 8 + row % 8);
    std::uint32_t c = static_cast<std::uint32_t>((col / 32) * 4 + (col % 8) / 2);
    return philox4x32_7(r, c, batch_head_, offset_, key0_, key1_);
  }
  static FLASHSDK_HD int word_of(int col) { return (col % 32) / 8; }
  static FLASHSDK_HD int byte_of(int row, int col) { return (row % 16) / 8 + 2 * (col % 2); }

  FLASHSDK_HD bool keep(int row, int col, int threshold) const {
    std::uint32_t word = group(row, col).word[word_of(col)];
    return static_cast<int>((word >> (8 * byte_of(row, col))) & 0xFF) >= threshold;
  }

 private:
  std::uint32_t key0_, key1_, batch_head_, offset_;
};

}  // namespace flashsdk
