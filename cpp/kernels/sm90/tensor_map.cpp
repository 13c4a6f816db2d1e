#include "sm90/tensor_map.h"

#include <cstdint>
#include <string>

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include "cuda/host/device.h"
#include "flashsdk/status.h"

namespace flashsdk::sm90 {
namespace {

constexpr std::int64_t kElementSize = 2;
constexpr std::int64_t kMaxStride = std::int64_t{1} << 40;  // bytes, exclusive

// cuTensorMapEncodeTiled through the runtime: a library that linked libcuda would not load without a driver.
PFN_cuTensorMapEncodeTiled_v12000 encoder() {
  static const auto function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found{};
    cuda::check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found),
                "asking the driver for cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess)
      throw Error(ErrorCode::kRuntime, "the driver has no cuTensorMapEncodeTiled: CUDA 12.0 or newer is needed");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }();
  return function;
}

// A dimension of extent 1 is never stepped along: any stride will do for it.
std::int64_t stride_bytes(std::int64_t stride, int extent) { return extent == 1 ? 16 : stride * kElementSize; }

bool valid_stride(std::int64_t bytes) { return bytes > 0 && bytes % 16 == 0 && bytes < kMaxStride; }

}  // namespace

const char* tensor_map_refusal(const TensorParam& t, const TensorExtent& extent) {
  if (extent.rows == 0 || extent.heads == 0 || extent.batch == 0) return "a tensor is empty";
  if (reinterpret_cast<std::uintptr_t>(t.ptr) % 16 != 0) return "a tensor's address is not a multiple of 16 bytes";
  if (!valid_stride(stride_bytes(t.row, extent.rows)) || !valid_stride(stride_bytes(t.head, extent.heads)) ||
      !valid_stride(stride_bytes(t.batch, extent.batch)))
    return "a tensor's strides are not positive multiples of 16 bytes";
  return nullptr;
}

CUtensorMap make_tensor_map(const TensorParam& t, const TensorExtent& extent, DType dtype, int box_rows,
                            int box_columns) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(extent.columns), static_cast<cuuint64_t>(extent.rows),
                              static_cast<cuuint64_t>(extent.heads), static_cast<cuuint64_t>(extent.batch)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride_bytes(t.row, extent.rows)),
                                static_cast<cuuint64_t>(stride_bytes(t.head, extent.heads)),
                                static_cast<cuuint64_t>(stride_bytes(t.batch, extent.batch))};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const bool bf16 = dtype == DType::kBFloat16;
  CUtensorMap map;
  const CUresult result = encoder()(&map, bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
                                    t.ptr, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                    box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw Error(ErrorCode::kRuntime,
                "making a TMA descriptor: the driver's error " + std::to_string(static_cast<int>(result)));
  return map;
}

}  // namespace flashsdk::sm90
