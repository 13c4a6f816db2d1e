#include "_arrays.h"

#include <nanobind/ndarray.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "gil.h"

namespace flashsdk::python {
namespace {

// ---- the parts of two C interfaces that are used here

// https://dmlc.github.io/dlpack, version 1
struct DlTensor {
  void* data;
  struct {
    std::int32_t device_type, device_id;
  } device;
  std::int32_t ndim;
  struct {
    std::uint8_t code, bits;
    std::uint16_t lanes;
  } dtype;
  std::int64_t *shape, *strides;
  std::uint64_t byte_offset;
};
struct DlVersion {
  std::uint32_t major, minor;
};
struct DlManagedTensorVersioned {
  DlVersion version;
  void* manager_context;
  void (*deleter)(DlManagedTensorVersioned*);
  std::uint64_t flags;
  DlTensor tensor;
};
constexpr std::uint64_t kDlReadOnly = 1, kDlCopied = 2;
constexpr std::uint8_t kDlFloat8E4M3FN = 10;
struct DlExchangeApi {
  DlVersion version;
  void* previous;
  void *allocate, *export_managed, *import_managed;
  int (*export_tensor)(void* object, void* dl_tensor);  // lends the tensor until the interpreter runs on; may be null
  int (*current_stream)(int device_type, std::int32_t device, void** stream);
};

// https://numpy.org/doc/stable/reference/arrays.interface.html
struct ArrayStruct {
  int two, nd;
  char typekind;
  int itemsize, flags;
  Py_intptr_t *shape, *strides;  // strides in bytes
  void* data;
};
enum : int { kAligned = 0x100, kNotSwapped = 0x200, kWriteable = 0x400 };

[[noreturn]] void fail(const std::string& name, const std::string& rest) {
  throw Error(ErrorCode::kInvalidArgument, name + ": " + rest);
}

[[noreturn]] void fail_dtype(ArrayImporter::Role role, const std::string& given) {
  fail(role.name, "dtype " + given + "; " + role.dtypes);
}

// The library's own conversion, whose messages are about "tensor: …".
TensorView view_of(ArrayImporter::Role role, const DlTensor& tensor) {
  try {
    return TensorView(tensor);
  } catch (const Error& e) {
    const std::string rest = std::string(e.what()).substr(std::strlen("tensor: "));
    if (rest.rfind("dtype ", 0) != 0) fail(role.name, rest);
    const std::size_t begin = std::strlen("dtype ");
    fail_dtype(role, rest.substr(begin, rest.find(';') - begin));
  }
}

[[noreturn]] void refuse(const char* name, nb::handle array, const nb::python_error& error) {
  if (!error.matches(PyExc_Exception)) throw error;  // Ctrl-C says nothing of the array
  // What jax.jit, grad and vmap pass to a function: it is there to be asked for its shape.
  const std::string type = class_name(array);
  if (type.rfind("jax.", 0) == 0 && type.find("Tracer") != std::string::npos)
    fail(name, "traced by jax.jit, jax.grad or jax.vmap; an array, or the functions of flashsdk.jax");
  fail(name, class_name(array) + " does not lend its memory (" + describe(error) + "); an array that holds data");
}

TensorView check_rank(const char* name, const TensorView& t) {
  if (t.rank == 0) fail(name, "shape (); an array of at least one dimension");
  return t;
}

// What a caller's type raised means "no" here, but for Ctrl-C and the like.
void forget_exception() {
  if (PyErr_Occurred() != nullptr && PyErr_ExceptionMatches(PyExc_Exception) == 0) throw nb::python_error();
  PyErr_Clear();
}

nb::object attribute(nb::handle object, const char* name) {
  nb::object value = nb::steal(PyObject_GetAttrString(object.ptr(), name));
  if (!value.is_valid()) forget_exception();
  return value;
}

// numpy.ma's, whose mask their memory does not show.
bool is_masked(nb::handle type) {
  const nb::object module = nb::steal(PyImport_GetModule(nb::str("numpy.ma").ptr()));
  if (!module.is_valid()) PyErr_Clear();  // nobody has made one
  const nb::object masked = module.is_valid() ? attribute(module, "MaskedArray") : nb::object();
  return masked.is_valid() && PyObject_IsSubclass(type.ptr(), masked.ptr()) == 1;
}

// Of PyTorch, whose views may say that their values are yet to be negated; that, too, their memory does not show.
bool is_negative_view(nb::handle array) {
  static constinit MadeOnce name;
  PyObject* const is_neg = name.get([] { return PyUnicode_InternFromString("is_neg"); });
  const nb::object answer = nb::steal(PyObject_CallMethodObjArgs(array.ptr(), is_neg, nullptr));
  if (!answer.is_valid()) forget_exception();
  return answer.ptr() == Py_True;
}

Protocol protocol_kind(PyTypeObject* type) {
  const nb::handle of = reinterpret_cast<PyObject*>(type);
  if (nb::object capsule = attribute(of, "__dlpack_c_exchange_api__"); capsule.is_valid()) {
    auto* api = static_cast<DlExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (api == nullptr) PyErr_Clear();
    if (api != nullptr && api->version.major == 1 && api->export_tensor != nullptr)
      return {Protocol::kExchange, api->export_tensor, api->current_stream};
  }
  if (attribute(of, "__array_struct__").is_valid()) return {is_masked(of) ? Protocol::kMasked : Protocol::kArrayStruct};
  if (attribute(of, "__dlpack__").is_valid()) return {Protocol::kDlpack};
  return {};
}

Protocol find_protocol(PyTypeObject* type) {
  Protocol protocol = protocol_kind(type);
  protocol.lazy_sign = attribute(reinterpret_cast<PyObject*>(type), "is_neg").is_valid();
  return protocol;
}

// Looking the protocol up costs more than using it, so each thread remembers the types it saw last.
const Protocol& protocol_of(PyTypeObject* type) {
  struct Known {
    PyTypeObject* type = nullptr;  // owned, so that no other type gets its address
    Protocol protocol;
  };
  thread_local std::array<Known, 8> known;
  thread_local std::size_t oldest = 0;
  for (const Known& k : known)
    if (k.type == type) return k.protocol;
  const Protocol protocol = find_protocol(type);
  Known& slot = known[oldest++ % known.size()];
  Py_INCREF(reinterpret_cast<PyObject*>(type));
  Py_XDECREF(reinterpret_cast<PyObject*>(slot.type));
  slot = {type, protocol};
  return slot.protocol;
}

DType dtype_of(ArrayImporter::Role role, nb::handle array, const ArrayStruct& a) {
  if (a.flags & kNotSwapped || a.typekind == 'V') {
    if (a.typekind == 'f' && a.itemsize == 4) return DType::kFloat32;
    if (a.typekind == 'f' && a.itemsize == 2) return DType::kFloat16;
    if (a.typekind == 'i' && a.itemsize == 4) return DType::kInt32;
    if (a.typekind == 'i' && a.itemsize == 8) return DType::kInt64;
    if (a.typekind == 'u' && a.itemsize == 8) return DType::kUInt64;
    if (a.typekind == 'b' && a.itemsize == 1) return DType::kBool;
  }
  const nb::object dtype = array.attr("dtype");
  // NumPy calls those of the package ml_dtypes void, and spelling a dtype out costs microseconds.
  static std::atomic<PyObject*> bfloat16{nullptr}, float8{nullptr};  // owned
  if (a.typekind == 'V' && dtype.ptr() == bfloat16.load(std::memory_order_relaxed)) return DType::kBFloat16;
  if (a.typekind == 'V' && dtype.ptr() == float8.load(std::memory_order_relaxed)) return DType::kFloat8E4M3;
  const std::string given = text_of(dtype);
  const bool is_bfloat16 = given == "bfloat16";
  if (a.typekind != 'V' || (!is_bfloat16 && given != "float8_e4m3fn")) fail_dtype(role, given);
  Py_INCREF(dtype.ptr());
  (is_bfloat16 ? bfloat16 : float8).store(dtype.ptr(), std::memory_order_relaxed);
  return is_bfloat16 ? DType::kBFloat16 : DType::kFloat8E4M3;
}

// Whether a producer says that its memory is a CUDA device's, or managed by CUDA. Whatever else is wrong with it shows
// elsewhere.
bool on_gpu(nb::handle array) {
  const nb::object method = attribute(array, "__dlpack_device__");
  if (!method.is_valid()) return false;
  const nb::object device = nb::steal(PyObject_CallNoArgs(method.ptr()));
  const nb::object type = device.is_valid() ? nb::steal(PySequence_GetItem(device.ptr(), 0)) : nb::object();
  const long number = type.is_valid() ? PyLong_AsLong(type.ptr()) : -1;
  forget_exception();
  constexpr long kCuda = 2, kCudaManaged = 13;  // DLPack's, which device_from_dlpack() takes for the same
  return number == kCuda || number == kCudaManaged;
}

}  // namespace

bool ArrayImporter::current_stream(nb::handle array, Device device, void** stream) {
  const Protocol& protocol = protocol_of(Py_TYPE(array.ptr()));
  if (protocol.current_stream == nullptr) return false;
  if (protocol.current_stream(static_cast<int>(device.type), device.index, stream) == 0) return true;
  PyErr_Clear();
  return false;
}

bool ArrayImporter::tells_stream(nb::handle array) {
  return protocol_of(Py_TYPE(array.ptr())).current_stream != nullptr;
}

std::string text_of(nb::handle object) {
  return nb::cast<std::string>(nb::module_::import_("flashsdk._errors").attr("first_line")(object));
}

std::string class_name(nb::handle object) {
  return nb::cast<std::string>(nb::module_::import_("flashsdk._errors").attr("type_name")(object));
}

std::string describe(const nb::python_error& error) {
  return class_name(error.value()) + ": " + text_of(error.value());
}

const nb::object& ArrayImporter::keep(nb::object capsule) {
  return capsule_.at(static_cast<std::size_t>(capsules_++)) = std::move(capsule);
}

TensorView ArrayImporter::take(Role role, nb::handle array, Access access) {
  if (array.is_none()) return {};
  const Protocol protocol = protocol_of(Py_TYPE(array.ptr()));
  if (protocol.lazy_sign && is_negative_view(array)) fail(role.name, "a view with is_neg(); resolve_neg() of it");
  switch (protocol.kind) {
    case Protocol::kExchange:
      return check_rank(role.name, from_exchange(role, array, protocol));
    case Protocol::kArrayStruct:
      return check_rank(role.name, from_array_struct(role, array, access));
    case Protocol::kDlpack:
      return check_rank(role.name, from_dlpack(role, array, access));
    case Protocol::kMasked:
      fail(role.name, "a masked array; an array without a mask, such as filled() of it");
    case Protocol::kNone:
      break;
  }
  fail(role.name, class_name(array) + "; an array of NumPy, PyTorch, JAX, CuPy or another framework with __dlpack__");
}

TensorView ArrayImporter::from_exchange(Role role, nb::handle array, const Protocol& protocol) {
  DlTensor tensor;
  if (protocol.export_tensor(array.ptr(), &tensor) != 0) refuse(role.name, array, nb::python_error());
  return view_of(role, tensor);
}

TensorView ArrayImporter::from_array_struct(Role role, nb::handle array, Access access) {
  const nb::object& capsule = keep(nb::steal(PyObject_GetAttrString(array.ptr(), "__array_struct__")));
  auto* a = capsule.is_valid() ? static_cast<ArrayStruct*>(PyCapsule_GetPointer(capsule.ptr(), nullptr)) : nullptr;
  if (a == nullptr) refuse(role.name, array, nb::python_error());
  if (access == Access::kWrite && (a->flags & kWriteable) == 0) fail(role.name, "read-only; a writable array");
  if (a->nd > kMaxTensorRank) fail(role.name, std::to_string(a->nd) + " dimensions; at most 5");
  TensorView t;
  t.dtype = dtype_of(role, array, *a);
  t.data = a->data;
  t.rank = a->nd;
  for (int d = 0; d < a->nd; ++d) {
    t.shape[d] = a->shape[d];
    if (a->shape[d] > 1 && a->strides[d] % a->itemsize != 0)
      fail(role.name, "a stride of " + std::to_string(a->strides[d]) + " bytes; multiples of the element size, " +
                          std::to_string(a->itemsize));
    t.stride[d] = a->strides[d] / a->itemsize;
  }
  return t;
}

nb::object ArrayImporter::dlpack_capsule(nb::handle array) const {
  const nb::object method = array.attr("__dlpack__");
  nb::dict keywords;
  if (gpu_stream && on_gpu(array)) {
    // The producer makes this stream wait for its work. 0 is not allowed there: the default stream is 1.
    const auto stream = reinterpret_cast<std::uintptr_t>(gpu_stream());
    keywords["stream"] = stream != 0 ? stream : 1;
  }
  try {
    keywords["max_version"] = nb::make_tuple(1, 0);
    return method(**keywords);
  } catch (nb::python_error& e) {
    if (!e.matches(PyExc_TypeError)) throw;
    PyDict_DelItemString(keywords.ptr(), "max_version");
    return method(**keywords);  // a producer older than version 1
  }
}

TensorView ArrayImporter::from_dlpack(Role role, nb::handle array, Access access) {
  nb::object capsule;
  std::string float8;  // the dtype of an array that was lent as bytes
  try {
    capsule = dlpack_capsule(array);
  } catch (nb::python_error& e) {
    if (!e.matches(PyExc_Exception)) throw;
    try {
      const nb::object other = nb::module_::import_("flashsdk._frameworks").attr("lendable")(array);
      if (other.is_none()) refuse(role.name, array, e);
      capsule = dlpack_capsule(other[0]);
      float8 = nb::cast<std::string>(other[1]);
    } catch (nb::python_error& other_error) {
      refuse(role.name, array, other_error);
    }
  }
  DlTensor* tensor = nullptr;
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    auto* managed = static_cast<DlManagedTensorVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    if (managed->version.major != 1)
      fail(role.name, "DLPack version " + std::to_string(managed->version.major) + "; 1");
    if (access == Access::kWrite && (managed->flags & kDlReadOnly) != 0) fail(role.name, "read-only; a writable array");
    if (access == Access::kWrite && (managed->flags & kDlCopied) != 0)
      fail(role.name, "its __dlpack__ lends a copy; an array that lends its own memory");
    tensor = &managed->tensor;
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    tensor = static_cast<DlTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));  // the first member
  } else {
    fail(role.name, "__dlpack__ returned " + class_name(capsule) + "; a DLPack capsule");
  }
  keep(capsule);  // not consumed: it frees what it lends when it goes
  if (float8.empty()) return view_of(role, *tensor);
  if (float8 != "float8_e4m3fn") fail_dtype(role, float8);
  DlTensor narrow = *tensor;
  narrow.dtype.code = kDlFloat8E4M3FN;
  return view_of(role, narrow);
}

namespace {

nb::dlpack::dtype dlpack_dtype(const char* dtype) {
  if (std::strcmp(dtype, "float32") == 0) return {static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float), 32, 1};
  if (std::strcmp(dtype, "float16") == 0) return {static_cast<std::uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
  if (std::strcmp(dtype, "bfloat16") == 0) return {static_cast<std::uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};
  fail("dtype", std::string(dtype) + "; float32, float16 or bfloat16");
}

std::vector<std::size_t> extents_of(nb::handle shape) {
  std::vector<std::size_t> extents;
  for (nb::handle extent : shape) extents.push_back(nb::cast<std::size_t>(extent));
  return extents;
}

}  // namespace

nb::object empty(const char* dtype, nb::handle shape) {
  const nb::dlpack::dtype of = dlpack_dtype(dtype);
  const std::vector<std::size_t> extents = extents_of(shape);
  constexpr std::size_t kAlignment = 64;
  std::size_t bytes = of.bits / 8;
  for (std::size_t extent : extents)
    if (__builtin_mul_overflow(bytes, extent, &bytes)) throw std::bad_alloc();
  void* data = std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment);
  if (data == nullptr) throw std::bad_alloc();
  nb::capsule owner(data, [](void* p) noexcept { std::free(p); });
  return nb::cast(nb::ndarray<nb::array_api>(data, extents.size(), extents.data(), owner, nullptr, of,
                                             nb::device::cpu::value, 0, 'C'));
}

nb::object gpu_view(const char* dtype, nb::handle shape, std::uintptr_t address, int device) {
  const std::vector<std::size_t> extents = extents_of(shape);
  return nb::cast(nb::ndarray<nb::array_api>(reinterpret_cast<void*>(address), extents.size(), extents.data(),
                                             nb::none(), nullptr, dlpack_dtype(dtype), nb::device::cuda::value, device,
                                             'C'));
}

}  // namespace flashsdk::python
