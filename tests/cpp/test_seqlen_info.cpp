// Batched and packed problems address the same rows through one type.
#include "common/seqlen_info.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace flashsdk {
namespace {

// Addresses are computed, never read: any tensor size can be tested.
template <class T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}
constexpr std::uintptr_t kBase = std::uintptr_t{1} << 44;

std::int64_t elements(const float* p) {
  return (static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(p)) - static_cast<std::int64_t>(kBase)) / 4;
}

TEST(SeqlenInfo, Batched) {
  ForwardParams p;
  p.batch = 3;
  p.seqlen_q = 10;
  p.seqlen_k = 7;
  for (int batch = 0; batch < 3; ++batch) {
    const SeqlenInfo s(p, batch);
    EXPECT_EQ(s.seqlen_q, 10);
    EXPECT_EQ(s.seqlen_k, 7);
    EXPECT_EQ(s.offset_q, 0);
    EXPECT_EQ(s.offset_k, 0);
  }
  const TensorParam t{at<float>(kBase), 1000, 100, 10};
  EXPECT_EQ(elements(SeqlenInfo(p, 2).head_q<float>(t, 2, 3)), 2 * 1000 + 3 * 10);
  EXPECT_EQ(elements(SeqlenInfo(p, 2).head_k<float>(t, 2, 3)), 2 * 1000 + 3 * 10);
  const RowParam lse{at<float>(kBase), 40, 10, 1};
  EXPECT_EQ(elements(SeqlenInfo(p, 2).rows(lse, 2, 3)), 2 * 40 + 3 * 10);
}

TEST(SeqlenInfo, PackedIncludingEmptySequences) {
  const std::vector<std::int32_t> cu_q{0, 4, 4, 9}, cu_k{0, 0, 6, 8};
  ForwardParams p;
  p.batch = 3;
  p.seqlen_q = 100;  // upper bounds: not used
  p.seqlen_k = 100;
  p.cu_seqlens_q = cu_q.data();
  p.cu_seqlens_k = cu_k.data();
  const int length_q[] = {4, 0, 5}, length_k[] = {0, 6, 2};
  const TensorParam t{at<float>(kBase), 0, 100, 10};
  const RowParam lse{at<float>(kBase), 0, 9, 1};
  for (int batch = 0; batch < 3; ++batch) {
    const SeqlenInfo s(p, batch);
    EXPECT_EQ(s.seqlen_q, length_q[batch]);
    EXPECT_EQ(s.seqlen_k, length_k[batch]);
    EXPECT_EQ(elements(s.head_q<float>(t, batch, 2)), cu_q[batch] * 100 + 20);
    EXPECT_EQ(elements(s.head_k<float>(t, batch, 2)), cu_k[batch] * 100 + 20);
    EXPECT_EQ(elements(s.rows(lse, batch, 2)), 2 * 9 + cu_q[batch]);
  }
}

TEST(SeqlenInfo, UsedLengthsAreThoseOfTheFirstRows) {
  const std::vector<std::int32_t> used_q{3, 0, 10}, used_k{7, 1, 0};
  ForwardParams p;
  p.batch = 3;
  p.seqlen_q = 10;
  p.seqlen_k = 7;
  p.seqused_k = used_k.data();
  const TensorParam t{at<float>(kBase), 1000, 100, 10};
  for (int batch = 0; batch < 3; ++batch) {
    EXPECT_EQ(SeqlenInfo(p, batch).seqlen_q, 10);
    EXPECT_EQ(SeqlenInfo(p, batch).seqlen_k, used_k[batch]);
    EXPECT_EQ(elements(SeqlenInfo(p, batch).head_k<float>(t, batch, 2)), batch * 1000 + 20);
  }
  p.seqused_q = used_q.data();
  for (int batch = 0; batch < 3; ++batch) EXPECT_EQ(SeqlenInfo(p, batch).seqlen_q, used_q[batch]);
}

TEST(SeqlenInfo, OffsetsAre64Bit) {
  const std::vector<std::int32_t> cu{0, 2000000000, 2000000001};
  ForwardParams p;
  p.cu_seqlens_q = p.cu_seqlens_k = cu.data();
  const TensorParam packed{at<float>(kBase), 0, 4096, 128};
  EXPECT_EQ(elements(SeqlenInfo(p, 1).head_q<float>(packed, 1, 31)), 2000000000ll * 4096 + 31 * 128);
  EXPECT_EQ(elements(SeqlenInfo(p, 1).head_k<float>(packed, 1, 31)), 2000000000ll * 4096 + 31 * 128);
  const TensorParam batched{at<float>(kBase), 3000000000ll, 4096, -5000000000ll};
  EXPECT_EQ(elements(SeqlenInfo(ForwardParams{}, 100).head_q<float>(batched, 100, 2)),
            100 * 3000000000ll - 2 * 5000000000ll);
}

}  // namespace
}  // namespace flashsdk
