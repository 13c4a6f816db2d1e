// TensorView: contiguous tensors, and structs laid out like DLPack's DLTensor from any version of dlpack.h.
#include "flashsdk/tensor.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <vector>

namespace flashsdk {
namespace {

// dlpack.h as C sees it: device_type is an enum. Since 0.6 its underlying type is fixed for C++.
namespace dlpack_c {
enum DLDeviceType { kDLCPU = 1, kDLCUDA = 2, kDLMetal = 8 };
struct DLDevice {
  DLDeviceType device_type;
  int device_id;
};
struct DLDataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  int ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
}  // namespace dlpack_c

namespace dlpack_v1 {
enum DLDeviceType : std::int32_t { kDLCPU = 1, kDLCUDA = 2, kDLCUDAHost = 3 };
struct DLDevice {
  DLDeviceType device_type;
  std::int32_t device_id;
};
struct DLDataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};
struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
}  // namespace dlpack_v1

template <class DLTensor>
class DlpackTensor : public ::testing::Test {
 protected:
  using DeviceType = decltype(DLTensor{}.device.device_type);
  DLTensor make(int code = 2, int bits = 32, int lanes = 1) {
    DLTensor t{};
    t.data = storage_;
    t.device = {static_cast<DeviceType>(1), 0};
    t.ndim = 3;
    t.dtype = {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(bits), static_cast<std::uint16_t>(lanes)};
    t.shape = shape_;
    t.strides = strides_;
    return t;
  }
  float storage_[64] = {};
  std::int64_t shape_[6] = {2, 3, 4, 1, 1, 1};
  std::int64_t strides_[6] = {-20, 0, 1, 1, 1, 1};
};
using Versions = ::testing::Types<dlpack_c::DLTensor, dlpack_v1::DLTensor>;
TYPED_TEST_SUITE(DlpackTensor, Versions);

TYPED_TEST(DlpackTensor, TakesShapeAndStrides) {
  const TypeParam t = this->make();
  for (const TensorView& view : {TensorView(t), TensorView(&t)}) {
    EXPECT_EQ(view.data, this->storage_);
    EXPECT_EQ(view.dtype, DType::kFloat32);
    EXPECT_EQ(view.device, Device{});
    ASSERT_EQ(view.rank, 3);
    EXPECT_EQ((std::vector<std::int64_t>(view.shape.begin(), view.shape.begin() + 3)),
              (std::vector<std::int64_t>{2, 3, 4}));
    EXPECT_EQ((std::vector<std::int64_t>(view.stride.begin(), view.stride.begin() + 3)),
              (std::vector<std::int64_t>{-20, 0, 1}));
    EXPECT_EQ(view.numel(), 24);
    EXPECT_TRUE(view.given());
  }
}

TYPED_TEST(DlpackTensor, NullStridesMeanContiguous) {
  TypeParam t = this->make();
  t.strides = nullptr;
  const TensorView view(t);
  EXPECT_EQ(view.stride[0], 12);
  EXPECT_EQ(view.stride[1], 4);
  EXPECT_EQ(view.stride[2], 1);
}

TYPED_TEST(DlpackTensor, ByteOffsetMovesTheFirstElement) {
  TypeParam t = this->make();
  t.byte_offset = 8;
  EXPECT_EQ(TensorView(t).data, this->storage_ + 2);
}

TYPED_TEST(DlpackTensor, EveryDtype) {
  EXPECT_EQ(TensorView(this->make(2, 32)).dtype, DType::kFloat32);
  EXPECT_EQ(TensorView(this->make(2, 16)).dtype, DType::kFloat16);
  EXPECT_EQ(TensorView(this->make(4, 16)).dtype, DType::kBFloat16);
  EXPECT_EQ(TensorView(this->make(0, 32)).dtype, DType::kInt32);
  EXPECT_EQ(TensorView(this->make(0, 64)).dtype, DType::kInt64);
  EXPECT_EQ(TensorView(this->make(1, 64)).dtype, DType::kUInt64);
  EXPECT_EQ(TensorView(this->make(6, 8)).dtype, DType::kBool);
  EXPECT_EQ(TensorView(this->make(10, 8)).dtype, DType::kFloat8E4M3);
}

TYPED_TEST(DlpackTensor, OtherDtypesAndVectorLanesAreErrors) {
  const int wrong[][3] = {{2, 64, 1}, {2, 8, 1},  {2, 32, 2}, {4, 16, 4}, {0, 16, 1}, {0, 8, 1},
                          {1, 32, 1}, {1, 8, 1},  {5, 64, 1}, {3, 64, 1}, {6, 1, 1},  {17, 16, 1},
                          {9, 8, 1},  {11, 8, 1}, {10, 8, 2}, {10, 16, 1}};
  for (const auto& [code, bits, lanes] : wrong) {
    try {
      TensorView view(this->make(code, bits, lanes));
      ADD_FAILURE() << "accepted code " << code << ", bits " << bits << ", lanes " << lanes;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
      EXPECT_EQ(std::string(e.what()).find('\n'), std::string::npos) << e.what();
      EXPECT_NE(std::string(e.what()).find("float32"), std::string::npos)
          << "does not say what is allowed: " << e.what();
    }
  }
}

TYPED_TEST(DlpackTensor, NarrowFloatsAreNamed) {
  const std::pair<std::pair<int, int>, const char*> named[] = {{{7, 8}, "dtype float8_e3m4;"},
                                                               {{12, 8}, "dtype float8_e5m2;"},
                                                               {{14, 8}, "dtype float8_e8m0fnu;"},
                                                               {{15, 6}, "dtype float6_e2m3fn;"},
                                                               {{17, 4}, "dtype float4_e2m1fn;"}};
  for (const auto& [type, name] : named) {
    try {
      TensorView view(this->make(type.first, type.second));
      ADD_FAILURE() << "accepted " << name;
    } catch (const Error& e) {
      EXPECT_NE(std::string(e.what()).find(name), std::string::npos) << e.what();
    }
  }
}

TYPED_TEST(DlpackTensor, Devices) {
  using DeviceType = typename DlpackTensor<TypeParam>::DeviceType;
  TypeParam t = this->make();
  t.device = {static_cast<DeviceType>(2), 3};
  EXPECT_EQ(TensorView(t).device, (Device{flashsdk::DeviceType::kCUDA, 3}));
  t.device = {static_cast<DeviceType>(8), 0};
  EXPECT_THROW(TensorView{t}, Error);
}

TYPED_TEST(DlpackTensor, RankIsBounded) {
  TypeParam t = this->make();
  t.ndim = 6;
  EXPECT_THROW(TensorView{t}, Error);
  t.ndim = -1;
  EXPECT_THROW(TensorView{t}, Error);
  t.ndim = 5;
  EXPECT_EQ(TensorView(t).rank, 5);
  t.ndim = 0;
  EXPECT_TRUE(TensorView(t).given());  // for the checks of a call to refuse
  EXPECT_FALSE(TensorView().given());
}

TEST(TensorView, Contiguous) {
  float data[24];
  const TensorView view(data, DType::kBFloat16, {2, 3, 4});
  EXPECT_EQ(view.rank, 3);
  EXPECT_EQ(view.stride[0], 12);
  EXPECT_EQ(view.stride[1], 4);
  EXPECT_EQ(view.stride[2], 1);
  EXPECT_EQ(view.numel(), 24);
  EXPECT_TRUE(view.given());
}

TEST(TensorView, EmptyAndNotGiven) {
  EXPECT_FALSE(TensorView().given());
  const TensorView empty(nullptr, DType::kFloat32, {2, 0, 4});
  EXPECT_TRUE(empty.given());
  EXPECT_EQ(empty.numel(), 0);
  EXPECT_EQ(empty.stride[2], 1);
}

TEST(TensorView, TooManyDimensions) {
  try {
    TensorView view(nullptr, DType::kFloat32, {1, 1, 1, 1, 1, 1});
    ADD_FAILURE() << "accepted rank 6";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
    EXPECT_STREQ(e.what(), "tensor: 6 dimensions; at most 5");
  }
}

TEST(TensorView, NamesAndSizes) {
  EXPECT_STREQ(to_string(DType::kFloat32), "float32");
  EXPECT_STREQ(to_string(DType::kFloat16), "float16");
  EXPECT_STREQ(to_string(DType::kBFloat16), "bfloat16");
  EXPECT_STREQ(to_string(DType::kInt32), "int32");
  EXPECT_STREQ(to_string(DType::kBool), "bool");
  EXPECT_EQ(size_of(DType::kFloat32), 4);
  EXPECT_EQ(size_of(DType::kFloat16), 2);
  EXPECT_EQ(size_of(DType::kBFloat16), 2);
  EXPECT_EQ(size_of(DType::kInt32), 4);
  EXPECT_EQ(size_of(DType::kBool), 1);
  EXPECT_EQ(to_string(Device{}), "cpu");
  EXPECT_EQ(to_string(Device{DeviceType::kCUDA, 2}), "cuda:2");
}

TEST(Error, CarriesItsCode) {
  const Error e(ErrorCode::kUnsupported, "head_dim: 300; at most 256");
  EXPECT_EQ(e.code(), ErrorCode::kUnsupported);
  EXPECT_STREQ(e.what(), "head_dim: 300; at most 256");
  EXPECT_STREQ(to_string(ErrorCode::kInvalidArgument), "invalid_argument");
  EXPECT_STREQ(to_string(ErrorCode::kUnsupported), "unsupported");
  EXPECT_STREQ(to_string(ErrorCode::kRuntime), "runtime");
}

}  // namespace
}  // namespace flashsdk
