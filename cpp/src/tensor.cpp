#include "flashsdk/tensor.h"

namespace flashsdk {

Error::Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
Error::~Error() = default;

const char* to_string(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return "invalid_argument";
    case ErrorCode::kUnsupported:
      return "unsupported";
    case ErrorCode::kRuntime:
      return "runtime";
  }
  return "unknown";
}

const char* to_string(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kInt32:
      return "int32";
    case DType::kBool:
      return "bool";
    case DType::kInt64:
      return "int64";
    case DType::kUInt64:
      return "uint64";
    case DType::kFloat8E4M3:
      return "float8_e4m3fn";
  }
  return "unknown";
}

std::string to_string(Device device) {
  if (device.type == DeviceType::kCPU) return "cpu";
  const char* name = device.type == DeviceType::kCUDA ? "cuda:" : "unknown:";
  return name + std::to_string(device.index);
}

int size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kInt64:
    case DType::kUInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kBool:
    case DType::kFloat8E4M3:
      return 1;
  }
  return 0;
}

namespace {

// DLPack's type codes. From the first to the last of the narrow ones they are formats of 8, 6 and 4 bits.
enum : int { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBoolean = 6, kFloat8 = 7, kFloat4 = 17 };
constexpr int kFloat8E4M3FN = 10;  // of the narrow ones, whose names end as these
constexpr const char* kNarrow[] = {"_e3m4",     "_e4m3",    "_e4m3b11fnuz", "_e4m3fn", "_e4m3fnuz", "_e5m2",
                                   "_e5m2fnuz", "_e8m0fnu", "_e2m3fn",      "_e3m2fn", "_e2m1fn"};

std::string name_of_dlpack_dtype(int code, int bits, int lanes) {
  const char* kind = code == kInt                         ? "int"
                     : code == kUInt                      ? "uint"
                     : code == kFloat                     ? "float"
                     : code == kBfloat                    ? "bfloat"
                     : code == kComplex                   ? "complex"
                     : code == kBoolean                   ? "bool"
                     : code >= kFloat8 && code <= kFloat4 ? "float"
                                                          : nullptr;
  std::string name = kind != nullptr ? kind : "DLPack type " + std::to_string(code) + " of bits ";
  name += std::to_string(bits);
  if (code >= kFloat8 && code <= kFloat4) name += kNarrow[code - kFloat8];
  return lanes == 1 ? name : name + "x" + std::to_string(lanes);
}

}  // namespace

DType dtype_from_dlpack(int code, int bits, int lanes) {
  if (lanes == 1) {
    if (code == kFloat && bits == 32) return DType::kFloat32;
    if (code == kFloat && bits == 16) return DType::kFloat16;
    if (code == kBfloat && bits == 16) return DType::kBFloat16;
    if (code == kInt && bits == 32) return DType::kInt32;
    if (code == kInt && bits == 64) return DType::kInt64;
    if (code == kUInt && bits == 64) return DType::kUInt64;
    if (code == kBoolean && bits == 8) return DType::kBool;
    if (code == kFloat8E4M3FN && bits == 8) return DType::kFloat8E4M3;
  }
  throw Error(ErrorCode::kInvalidArgument,
              "tensor: dtype " + name_of_dlpack_dtype(code, bits, lanes) +
                  "; float32, float16, bfloat16, float8_e4m3fn, int32, int64, uint64 or bool");
}

Device device_from_dlpack(int device_type, int device_id) {
  constexpr int kCudaManaged = 13;  // reachable from the GPU as any other memory of it
  if (device_type == static_cast<int>(DeviceType::kCPU)) return {DeviceType::kCPU, 0};
  if (device_type == static_cast<int>(DeviceType::kCUDA) || device_type == kCudaManaged)
    return {DeviceType::kCUDA, device_id};
  throw Error(ErrorCode::kInvalidArgument,
              "tensor: on DLPack device type " + std::to_string(device_type) + "; the CPU (1) or CUDA (2, 13)");
}

int TensorView::checked_rank(std::int64_t r) {
  if (r < 0 || r > kMaxTensorRank) {
    throw Error(ErrorCode::kInvalidArgument,
                "tensor: " + std::to_string(r) + " dimensions; at most " + std::to_string(kMaxTensorRank));
  }
  return static_cast<int>(r);
}

}  // namespace flashsdk
