// The dropout pattern, against Philox4x32 written a second time from its paper (Salmon et al., SC'11).
#include "common/philox.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <random>
#include <set>
#include <tuple>
#include <vector>

namespace flashsdk {
namespace {

using Words = std::array<std::uint32_t, 4>;

// Any number of rounds: 10 are published with known answers, 7 are what the kernels use.
Words philox4x32(Words counter, std::array<std::uint32_t, 2> key, int rounds) {
  constexpr std::uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  for (int round = 0; round < rounds; ++round) {
    const std::uint64_t product0 = kMultiplier0 * counter[0], product1 = kMultiplier1 * counter[2];
    counter = {static_cast<std::uint32_t>(product1 >> 32) ^ counter[1] ^ key[0], static_cast<std::uint32_t>(product1),
               static_cast<std::uint32_t>(product0 >> 32) ^ counter[3] ^ key[1], static_cast<std::uint32_t>(product0)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};  // golden ratio, sqrt(3) - 1
  }
  return counter;
}

Words words(const PhiloxBytes& b) { return {b.word[0], b.word[1], b.word[2], b.word[3]}; }

TEST(Philox, TenRoundsGiveTheKnownAnswers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}, 10), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr std::uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox4x32({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}, 10),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}, 10),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, SevenRoundsGiveTheKnownAnswers) {
  constexpr std::uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(words(philox4x32_7(0, 0, 0, 0, 0, 0)), (Words{0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}));
  EXPECT_EQ(words(philox4x32_7(kOnes, kOnes, kOnes, kOnes, kOnes, kOnes)),
            (Words{0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}));
}

TEST(Philox, MatchesTheSecondImplementation) {
  std::mt19937 rng(1);
  for (int round = 0; round < 10000; ++round) {
    std::uint32_t c[4], k[2];
    for (auto& x : c) x = static_cast<std::uint32_t>(rng());
    for (auto& x : k) x = static_cast<std::uint32_t>(rng());
    ASSERT_EQ(words(philox4x32_7(c[0], c[1], c[2], c[3], k[0], k[1])),
              philox4x32({c[0], c[1], c[2], c[3]}, {k[0], k[1]}, 7));
  }
}

// The random byte of one element, as docs/semantics.md defines it. Not inlined: where GCC 12 sees both implementations
// at -O3 it computes them as one, and then reads the result before it is stored.
__attribute__((noinline)) int reference_byte(std::uint64_t seed, std::uint64_t offset, std::uint32_t batch_head,
                                             int row, int col) {
  const auto low = [](std::uint64_t x) { return static_cast<std::uint32_t>(x & 0xffffffff); };
  const Words counter{static_cast<std::uint32_t>(row / 16 * 8 + row % 8),
                      static_cast<std::uint32_t>(col / 32 * 4 + col % 8 / 2), batch_head, low(offset)};
  const Words out = philox4x32(counter, {low(seed), low(seed >> 32) ^ low(offset >> 32)}, 7);
  const int byte = row % 16 / 8 + 2 * (col % 2) + 4 * (col % 32 / 8);  // of 16, little-endian
  return static_cast<int>(out[byte / 4] >> (8 * (byte % 4)) & 0xff);
}

DropoutRng rng_of(const DropoutParam& p, int batch, int head) { return DropoutRng(p, batch).of(head); }

TEST(DropoutRng, KeepsExactlyTheBytesAtOrAboveTheThreshold) {
  std::mt19937_64 rng(2);
  for (int round = 0; round < 20000; ++round) {
    DropoutParam p;
    const std::uint64_t seed = rng(), offset = round % 2 == 0 ? rng() : rng() % 100;
    const int batch = static_cast<int>(rng() % 70), head = static_cast<int>(rng() % 70), num_heads = 70;
    std::vector<std::uint64_t> state(2 * 70);
    std::uint32_t batch_head = static_cast<std::uint32_t>(batch * num_heads + head);
    p.heads_each = num_heads;
    p.seed = rng();
    switch (round % 4) {
      case 0:  // in the arguments; of the second part of a batch
        p.seed = seed;
        p.offset = offset;
        p.first_head = 5;
        batch_head += 5;
        break;
      case 1:  // in memory, of all sequences
        p.state = state.data();
        state[0] = seed;
        state[1] = offset;
        break;
      default:  // in memory, of each
        p.state = state.data();
        p.state_batch = 2;
        p.heads_each = 0;
        state[2 * static_cast<std::size_t>(batch)] = seed;
        state[2 * static_cast<std::size_t>(batch) + 1] = offset;
        batch_head = static_cast<std::uint32_t>(head);
    }
    const int row = static_cast<int>(rng() % (round % 3 == 0 ? 2147483647u : 200u));
    const int col = static_cast<int>(rng() % (round % 5 == 0 ? 2147483647u : 200u));
    const int byte = reference_byte(seed, offset, batch_head, row, col);
    const DropoutRng dropout = rng_of(p, batch, head);
    ASSERT_TRUE(dropout.keep(row, col, byte)) << "row " << row << " col " << col;
    ASSERT_FALSE(dropout.keep(row, col, byte + 1)) << "row " << row << " col " << col;
    ASSERT_TRUE(dropout.keep(row, col, 0));
  }
}

TEST(DropoutRng, EveryByteOfEveryCallServesExactlyOneElement) {
  // Two calls with the same four words are the same call, as far as a test can see.
  DropoutParam p;
  p.seed = 12345;
  const DropoutRng dropout = rng_of(p, 0, 7);
  constexpr int kRows = 64, kCols = 128;
  std::set<std::tuple<Words, int, int>> used;
  std::set<Words> calls;
  for (int row = 0; row < kRows; ++row) {
    for (int col = 0; col < kCols; ++col) {
      const int word = DropoutRng::word_of(col), byte = DropoutRng::byte_of(row, col);
      ASSERT_TRUE(0 <= word && word < 4 && 0 <= byte && byte < 4);
      calls.insert(words(dropout.group(row, col)));
      ASSERT_TRUE(used.insert({words(dropout.group(row, col)), word, byte}).second) << row << ", " << col;
    }
  }
  EXPECT_EQ(calls.size(), kRows * kCols / 16u);
}

TEST(DropoutRng, KeepsTheRightShareAndDependsOnEveryInput) {
  auto pattern = [](std::uint64_t seed, std::uint64_t offset, int batch_head) {
    DropoutParam p;
    p.seed = seed;
    p.offset = offset;
    const DropoutRng dropout = rng_of(p, 0, batch_head);
    std::vector<bool> keep;
    for (int row = 0; row < 128; ++row) {
      for (int col = 0; col < 128; ++col) keep.push_back(dropout.keep(row, col, 64));
    }
    return keep;
  };
  const auto base = pattern(1, 0, 0);
  const double kept = static_cast<double>(std::count(base.begin(), base.end(), true)) / base.size();
  EXPECT_NEAR(kept, 0.75, 4 * std::sqrt(0.75 * 0.25 / base.size()));  // four standard deviations
  const std::uint64_t high = std::uint64_t{1} << 32;
  for (const auto& other :
       {pattern(2, 0, 0), pattern(1 + high, 0, 0), pattern(1, 1, 0), pattern(1, high, 0), pattern(1, 0, 1)}) {
    EXPECT_NE(base, other);
  }
}

TEST(DropoutParam, ScaleRestoresTheExpectation) {
  DropoutParam p;
  EXPECT_EQ(p.scale(), 1.f);
  p.threshold = 64;
  EXPECT_FLOAT_EQ(p.scale(), 1.f / 0.75f);
  p.threshold = 255;
  EXPECT_EQ(p.scale(), 256.f);
}

}  // namespace
}  // namespace flashsdk
