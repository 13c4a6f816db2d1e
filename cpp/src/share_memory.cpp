// Do two strided tensors share a byte? A bounded linear Diophantine problem, solved by search.
#include <algorithm>
#include <array>
#include <cstdint>

#include "check.h"

namespace flashsdk {
namespace {

struct Term {
  std::int64_t step, count;  // step times any of 0 … count
};

class Search {
 public:
  void add(std::int64_t step, std::int64_t count) {
    if (step == 0 || count == 0) return;
    for (int i = 0; i < size_; ++i)
      if (term_[i].step == step) {
        term_[i].count += count;
        return;
      }
    term_[size_++] = {step, count};
  }

  // Whether some choice of all terms adds up to `target`.
  bool reaches(std::int64_t target) {
    std::sort(term_.begin(), term_.begin() + size_, [](const Term& a, const Term& b) { return a.step > b.step; });
    rest_[size_] = 0;
    for (int i = size_ - 1; i >= 0; --i) rest_[i] = rest_[i + 1] + term_[i].step * term_[i].count;
    return reaches(target, 0);
  }

 private:
  bool reaches(std::int64_t target, int i) {
    if (target < 0 || target > rest_[i]) return false;
    if (target == 0 || --budget_ < 0) return true;  // undecided counts as shared
    const auto [step, count] = term_[i];
    if (step == 1) return true;  // the last term, and target is within it
    const std::int64_t missing = target - rest_[i + 1];
    const std::int64_t first = missing > 0 ? (missing + step - 1) / step : 0;
    for (std::int64_t n = first; n <= std::min(count, target / step); ++n)
      if (reaches(target - n * step, i + 1)) return true;
    return false;
  }

  std::array<Term, 2 * kMaxTensorRank + 1> term_;
  std::array<std::int64_t, 2 * kMaxTensorRank + 2> rest_;
  int size_ = 0;
  int budget_ = 10000;
};

}  // namespace

// Byte addresses of a are low_a + Σ step·n + e, e < size, all terms positive; the same for b. Turned round, n to
// count - n, b's terms change sign, and a byte is shared iff the terms of both add up to high_b - low_a.
bool share_memory(const TensorView& a, const TensorView& b) {
  Search search;
  const std::int64_t size_a = size_of(a.dtype), size_b = size_of(b.dtype);
  auto low_a = reinterpret_cast<std::uintptr_t>(a.data), high_b = reinterpret_cast<std::uintptr_t>(b.data);
  for (int d = 0; d < a.rank; ++d) {
    const std::int64_t step = stride_of(a, d) * size_a, count = a.shape[d] - 1;
    if (step < 0) low_a += static_cast<std::uintptr_t>(step * count);
    search.add(step < 0 ? -step : step, count);
  }
  for (int d = 0; d < b.rank; ++d) {
    const std::int64_t step = stride_of(b, d) * size_b, count = b.shape[d] - 1;
    if (step > 0) high_b += static_cast<std::uintptr_t>(step * count);
    search.add(step < 0 ? -step : step, count);
  }
  search.add(1, size_a - 1 + size_b - 1);
  high_b += static_cast<std::uintptr_t>(size_b - 1);
  return search.reaches(static_cast<std::int64_t>(high_b - low_a));
}

}  // namespace flashsdk
