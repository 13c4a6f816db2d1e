#include "check.h"

#include <algorithm>
#include <charconv>
#include <limits>

namespace flashsdk {

void fail(const std::string& argument, const std::string& given, const std::string& allowed, ErrorCode code) {
  throw Error(code, argument + ": " + given + "; " + allowed);
}

std::string shown(std::string text) {
  constexpr std::size_t kLongest = 80;
  std::replace_if(text.begin(), text.end(), [](unsigned char c) { return c < ' ' || c == 0x7f; }, ' ');
  if (text.size() <= kLongest) return text;
  std::size_t end = kLongest;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;  // between characters of UTF-8
  return text.substr(0, end) + "…";
}

std::string number(double x) {
  char text[32];
  const auto single = static_cast<float>(x);
  const bool is_single = static_cast<double>(single) == x;
  const auto written =
      is_single ? std::to_chars(text, text + sizeof text, single) : std::to_chars(text, text + sizeof text, x);
  return {text, written.ptr};
}

namespace {

std::string tuple_of(const std::int64_t* values, int count) {
  std::string text = "(";
  for (int d = 0; d < count; ++d) text += (d > 0 ? ", " : "") + std::to_string(values[d]);
  return text + (count == 1 ? ",)" : ")");
}

std::string strides_of(const TensorView& t) { return "strides of elements " + tuple_of(t.stride.data(), t.rank); }

// "head_dim 64", "batch + 1 = 3"
std::string extent_of(const std::string& dim, std::int64_t extent) {
  const char* between = dim.empty() ? "" : dim.find(' ') == std::string::npos ? " " : " = ";
  return dim + between + std::to_string(extent);
}

// "(batch 2, seqlen_k, num_heads_kv, head_dim 64)"
std::string describe(std::initializer_list<Dim> dims) {
  std::string text;
  for (const Dim& dim : dims) {
    if (!text.empty()) text += ", ";
    if (dim.or_one) text += "1 or ";
    text += dim.extent == Dim::kAny ? dim.name : extent_of(dim.name, dim.extent);
  }
  return '(' + text + ')';
}

}  // namespace

std::string shape_of(const TensorView& t) {
  if (t.rank < 0 || t.rank > kMaxTensorRank) return "rank " + std::to_string(t.rank);
  return "shape " + tuple_of(t.shape.data(), t.rank);
}

void check_given(const char* name, const TensorView& t) {
  if (!t.given()) fail(name, "not given", "a tensor");
}

void check_dtype(const char* name, const TensorView& t, DType expected, const char* whose) {
  if (t.dtype != expected)
    fail(name, std::string("dtype ") + to_string(t.dtype), std::string(to_string(expected)) + whose);
}

void check_device(const char* name, const TensorView& t, Device expected, const char* whose) {
  if (t.device != expected) fail(name, "on " + to_string(t.device), to_string(expected) + whose);
}

void check_shape(const char* name, const TensorView& t, std::initializer_list<Dim> dims) {
  bool fits = t.rank == static_cast<int>(dims.size());
  int d = 0;
  for (const Dim& dim : dims) {
    if (!fits) break;
    const std::int64_t extent = t.shape[d++];
    fits = extent >= 0 && (dim.extent == Dim::kAny || extent == dim.extent || (dim.or_one && extent == 1));
  }
  if (!fits) fail(name, shape_of(t), describe(dims));
}

void check_last_dim_contiguous(const char* name, const TensorView& t) {
  if (t.shape[t.rank - 1] > 1 && t.stride[t.rank - 1] != 1 && !is_empty(t))
    fail(name, strides_of(t), "the last dimension contiguous (stride 1), as in a contiguous copy");
}

void check_row_major(const char* name, const TensorView& t) {
  if (is_empty(t)) return;
  std::int64_t step = 1;
  for (int d = t.rank - 1; d >= 0; --d) {
    if (t.shape[d] > 1 && t.stride[d] != step) fail(name, strides_of(t), "contiguous, as a contiguous copy is");
    if (__builtin_mul_overflow(step, t.shape[d], &step)) step = 0;
  }
}

void check_extent(const char* name, const char* dim, std::int64_t extent, std::int64_t min, std::int64_t max) {
  if (extent >= min && extent <= max) return;
  // A size that is too large is a fair problem, only not one for these kernels.
  fail(name, extent_of(dim, extent), std::to_string(min) + " to " + std::to_string(max),
       extent > max ? ErrorCode::kUnsupported : ErrorCode::kInvalidArgument);
}

int check_block(const char* name, int block) {
  constexpr int kMost = 1 << 24;
  if (block <= 0 || block % 16 != 0 || block > kMost)
    fail(name, std::to_string(block), "a positive multiple of 16, at most " + std::to_string(kMost));
  return block;
}

void MemoryMap::add(const char* name, const TensorView& t, Access access) {
  if (is_empty(t)) return;
  // Bytes below and above the address of element (0, …, 0).
  std::int64_t below = 0, above = size_of(t.dtype);
  for (int d = 0; d < t.rank; ++d) {
    std::int64_t reach;
    const bool overflow = __builtin_mul_overflow(t.shape[d] - 1, stride_of(t, d), &reach) ||
                          __builtin_mul_overflow(reach, std::int64_t{size_of(t.dtype)}, &reach) ||
                          __builtin_add_overflow(reach < 0 ? below : above, reach, reach < 0 ? &below : &above);
    constexpr std::int64_t kLimit = std::int64_t{1} << 60;
    if (overflow || below < -kLimit || above > kLimit)
      fail(name, shape_of(t) + ", " + strides_of(t), "a tensor that fits in memory");
  }
  if (t.data == nullptr) fail(name, "a null pointer", "the address of " + shape_of(t));
  const auto address = reinterpret_cast<std::uintptr_t>(t.data);
  if (address % static_cast<unsigned>(size_of(t.dtype)) != 0)
    fail(name, "its address is not a multiple of " + std::to_string(size_of(t.dtype)),
         std::string("aligned ") + to_string(t.dtype));
  const auto low = static_cast<std::uintptr_t>(-below), high = static_cast<std::uintptr_t>(above);
  if (low > address || high > std::numeric_limits<std::uintptr_t>::max() - address)
    fail(name, shape_of(t) + ", " + strides_of(t), "a tensor that fits in memory");

  const Region region{name, &t, address - low, address + high, access};
  if (access == Access::kWrite) check_distinct_elements(region);
  region_.at(static_cast<std::size_t>(size_++)) = region;
}

// Sorted by stride, each dimension must step over all that the smaller ones span.
void MemoryMap::check_distinct_elements(const Region& r) const {
  const TensorView& t = *r.view;
  struct Step {
    std::int64_t stride, count;
  };
  std::array<Step, kMaxTensorRank> step;
  int steps = 0;
  for (int d = 0; d < t.rank; ++d) {
    if (t.shape[d] <= 1) continue;
    const Step added{t.stride[d] < 0 ? -t.stride[d] : t.stride[d], t.shape[d] - 1};
    int at = steps++;
    for (; at > 0 && step[at - 1].stride > added.stride; --at) step[at] = step[at - 1];
    step[at] = added;
  }
  std::int64_t span = 0;
  for (int s = 0; s < steps; ++s) {
    if (step[s].stride <= span)
      fail(r.name, shape_of(t) + ", " + strides_of(t), "an output whose elements do not share memory");
    span += step[s].stride * step[s].count;
  }
}

void MemoryMap::check_overlap() const {
  for (int i = 0; i < size_; ++i) {
    const Region& out = region_[i];
    if (out.access != Access::kWrite) continue;
    for (int j = 0; j < size_; ++j) {
      const Region& other = region_[j];
      if (j == i || (other.access == Access::kWrite && j < i)) continue;  // two outputs meet once
      if (out.begin < other.end && other.begin < out.end && share_memory(*out.view, *other.view))
        fail(out.name, std::string("overlaps ") + other.name, "memory of its own");
    }
  }
}

}  // namespace flashsdk
