// A tensor somebody else owns: pointer, dtype, device, shape and strides. Same meaning as DLPack's DLTensor.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "flashsdk/export.h"
#include "flashsdk/status.h"

namespace flashsdk {

enum class DType : std::uint8_t { kFloat32, kFloat16, kBFloat16, kInt32, kBool, kInt64, kUInt64, kFloat8E4M3 };

// Numbering of DLPack's DLDeviceType.
enum class DeviceType : std::int32_t { kCPU = 1, kCUDA = 2 };

struct Device {
  DeviceType type = DeviceType::kCPU;
  std::int32_t index = 0;
  friend bool operator==(Device a, Device b) { return a.type == b.type && a.index == b.index; }
  friend bool operator!=(Device a, Device b) { return !(a == b); }
};

FLASHSDK_API const char* to_string(DType dtype) noexcept;  // "float32", "bfloat16", …
FLASHSDK_API std::string to_string(Device device);         // "cpu", "cuda:0"
FLASHSDK_API int size_of(DType dtype) noexcept;            // bytes of one element

// DLPack's (type code, bits, lanes) and device numbers as ours; throws kInvalidArgument on any other.
FLASHSDK_API DType dtype_from_dlpack(int code, int bits, int lanes);
FLASHSDK_API Device device_from_dlpack(int device_type, int device_id);

inline constexpr int kMaxTensorRank = 5;

struct TensorView {
  void* data = nullptr;  // address of element (0, …, 0); what is only read may be const_cast
  DType dtype = DType::kFloat32;
  Device device;
  int rank = 0;  // 0, and no data: not given
  std::array<std::int64_t, kMaxTensorRank> shape{};
  std::array<std::int64_t, kMaxTensorRank> stride{};  // in elements; zero and negative strides are fine

  TensorView() = default;

  // A row-major (C-contiguous) tensor.
  TensorView(void* data_, DType dtype_, std::initializer_list<std::int64_t> shape_, Device device_ = {})
      : data(data_), dtype(dtype_), device(device_), rank(checked_rank(static_cast<std::int64_t>(shape_.size()))) {
    int d = 0;
    for (std::int64_t extent : shape_) shape[d++] = extent;
    set_contiguous_strides();
  }

  // A view of any struct laid out like DLPack's DLTensor, whichever dlpack.h it came from; honours byte_offset.
  template <class DLTensorLike, class = decltype(DLTensorLike::byte_offset)>
  explicit TensorView(const DLTensorLike& t)
      : data(reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(t.data) + t.byte_offset)),
        dtype(dtype_from_dlpack(t.dtype.code, t.dtype.bits, t.dtype.lanes)),
        device(device_from_dlpack(static_cast<int>(t.device.device_type), t.device.device_id)),
        rank(checked_rank(t.ndim)) {
    for (int d = 0; d < rank; ++d) shape[d] = t.shape[d];
    if (t.strides == nullptr) {
      set_contiguous_strides();
    } else {
      for (int d = 0; d < rank; ++d) stride[d] = t.strides[d];
    }
  }
  template <class DLTensorLike, class = decltype(DLTensorLike::byte_offset)>
  explicit TensorView(const DLTensorLike* t) : TensorView(*t) {}

  bool given() const noexcept { return rank != 0 || data != nullptr; }
  std::int64_t numel() const noexcept {
    std::int64_t n = 1;
    for (int d = 0; d < rank; ++d) n = wrapping_product(n, shape[d]);
    return n;
  }

 private:
  // Not inline, as it throws: these headers compile under -fno-exceptions.
  FLASHSDK_API static int checked_rank(std::int64_t r);
  void set_contiguous_strides() {
    std::int64_t step = 1;
    for (int d = rank - 1; d >= 0; --d) {
      stride[d] = step;
      step = wrapping_product(step, shape[d]);
    }
  }
  // Sizes beyond 64 bits are for the checks of a call to refuse, not for a descriptor to fail on.
  static std::int64_t wrapping_product(std::int64_t a, std::int64_t b) noexcept {
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  }
};

}  // namespace flashsdk
