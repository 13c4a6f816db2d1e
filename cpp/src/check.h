// Checks of one argument. Each passes in silence or throws one line: "<argument>: <given>; <allowed>".
//
// Descriptors are not trusted: any rank, dtype, extent or stride may come in, and no check overflows on it.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "flashsdk/tensor.h"

namespace flashsdk {

[[noreturn]] void fail(const std::string& argument, const std::string& given, const std::string& allowed,
                       ErrorCode code = ErrorCode::kInvalidArgument);

// What a caller wrote, for a message: on one line, cut behind 80 bytes. flashsdk._errors.shown is its like in Python.
std::string shown(std::string text);

// A dimension as messages name it, and the extent it must have.
struct Dim {
  const char* name;
  std::int64_t extent = kAny;
  bool or_one = false;  // 1 broadcasts

  static constexpr std::int64_t kAny = -1;
};

// "(2, 0, 8)"; of a broken rank only that.
std::string shape_of(const TensorView& t);
std::string number(double x);  // in as few digits as tell it apart, of a float from other floats

void check_given(const char* name, const TensorView& t);
void check_dtype(const char* name, const TensorView& t, DType expected, const char* whose);
void check_device(const char* name, const TensorView& t, Device expected, const char* whose);
void check_shape(const char* name, const TensorView& t, std::initializer_list<Dim> dims);
void check_last_dim_contiguous(const char* name, const TensorView& t);
void check_row_major(const char* name, const TensorView& t);
void check_extent(const char* name, const char* dim, std::int64_t extent, std::int64_t min, std::int64_t max);
int check_block(const char* name, int block);  // the size of a layout's blocks, which it returns

// Without elements strides mean nothing, and no memory is touched.
inline bool is_empty(const TensorView& t) {
  for (int d = 0; d < t.rank; ++d)
    if (t.shape[d] == 0) return true;
  return false;
}

// The stride of a dimension that has more than one element, else 0: such a stride is never used and may be anything.
inline std::int64_t stride_of(const TensorView& t, int dim) {
  return t.shape[dim] > 1 && !is_empty(t) ? t.stride[dim] : 0;
}

// The memory that the tensors of one call touch. Checks addresses as tensors are added, and in the end that no output
// shares a byte with an input or with another output.
class MemoryMap {
 public:
  enum class Access : std::uint8_t { kRead, kWrite };

  // The view's shape, dtype and rank have been checked. Names and views must outlive the map.
  void add(const char* name, const TensorView& t, Access access);
  void check_overlap() const;

 private:
  struct Region {
    const char* name;
    const TensorView* view;
    std::uintptr_t begin, end;  // the bytes spanned
    Access access;
  };
  void check_distinct_elements(const Region& r) const;

  static constexpr int kMaxRegions = 28;
  std::array<Region, kMaxRegions> region_;
  int size_ = 0;
};

// Whether two tensors share a byte: exact for tensors whose dimensions nest, as slices of one array do, and true where
// the answer would take too long. Both tensors have elements, and their spans fit in an address space.
bool share_memory(const TensorView& a, const TensorView& b);

}  // namespace flashsdk
