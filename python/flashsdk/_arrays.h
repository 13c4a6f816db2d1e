// Arrays of any framework as tensor views, without copies: PyTorch through DLPack's C exchange table, NumPy through
// __array_struct__ (which knows read-only arrays and bfloat16, unlike its __dlpack__), all others through __dlpack__.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>

#include "flashsdk/tensor.h"

namespace flashsdk::python {

namespace nb = nanobind;

// Every file must have included stl/string.h. One without it still compiles, but takes std::string for a class that
// was bound, which no str is: its casts throw std::bad_cast. They have the same name as those of the other files, so
// inlining and the linker decide which ones run.
static_assert(!std::is_base_of_v<nb::detail::type_caster_base<std::string>, nb::detail::type_caster<std::string>>);

// How an array's type hands out its memory.
struct Protocol {
  enum Kind : std::uint8_t { kNone, kExchange, kArrayStruct, kDlpack, kMasked };
  Kind kind = kNone;
  int (*export_tensor)(void* object, void* dl_tensor) = nullptr;                         // kExchange
  int (*current_stream)(int device_type, std::int32_t device, void** stream) = nullptr;  // kExchange, may be null
  bool lazy_sign = false;  // an array may say by is_neg() that its values are yet to be negated
};

// Takes the arrays of one call and keeps what they lend until the call is over.
class ArrayImporter {
 public:
  enum class Access : std::uint8_t { kRead, kWrite };

  // What messages call an array, and the dtypes it may have.
  struct Role {
    const char* name;
    const char* dtypes = kFloats;
  };
  static constexpr const char* kFloats = "float32, float16 or bfloat16";
  static constexpr const char* kFloatsOrFp8 = "float32, float16, bfloat16 or float8_e4m3fn";
  static constexpr const char* kFloatsOrBool = "float32, float16, bfloat16 or bool";
  static constexpr const char* kFloat32 = "float32";
  static constexpr const char* kInt32 = "int32";
  static constexpr const char* kInt64 = "int64 or uint64";

  // The CUDA stream of the call, asked for when an array on a GPU has to be handed over to it.
  std::function<void*()> gpu_stream;

  // The stream that the framework of an array works on now, without a call into Python; false if there is no such way.
  static bool current_stream(nb::handle array, Device device, void** stream);
  static bool tells_stream(nb::handle array);  // whether there is such a way

  // Throws Error under the argument's name. None gives a view that is "not given".
  TensorView take(Role role, nb::handle array, Access access = Access::kRead);

 private:
  TensorView from_exchange(Role role, nb::handle array, const Protocol& protocol);
  TensorView from_array_struct(Role role, nb::handle array, Access access);
  TensorView from_dlpack(Role role, nb::handle array, Access access);
  nb::object dlpack_capsule(nb::handle array) const;

  // What frees the memory it lends, or the description of it, when it goes.
  const nb::object& keep(nb::object capsule);

  static constexpr int kMaxCapsules = 28;
  std::array<nb::object, kMaxCapsules> capsule_;
  int capsules_ = 0;
};

// The first line of str(object), in short, for a message.
std::string text_of(nb::handle object);

// "list", as messages name what was given instead of an array.
std::string class_name(nb::handle object);

// "ValueError: …", its first line.
std::string describe(const nb::python_error& error);

// A new row-major array on the CPU, 64-byte aligned, that exports itself through DLPack.
nb::object empty(const char* dtype, nb::handle shape);

// The row-major array at an address of a GPU, which its owner keeps alive; the same otherwise.
nb::object gpu_view(const char* dtype, nb::handle shape, std::uintptr_t address, int device);

}  // namespace flashsdk::python
