// flashsdk._bindings: from Python's arguments to flashsdk's, and nothing else. The checks are those of the library.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "_arrays.h"
#include "core_api.h"
#include "flashsdk/c_api.h"
#include "flashsdk/flashsdk.h"
#include "gil.h"
#include "processors.h"
#include "validate.h"

namespace flashsdk::python {
namespace {

using Access = ArrayImporter::Access;

// Every Error of the library is one flashsdk.Error, a subclass of ValueError.
void set_error(const char* line, const char* code) {
  const nb::object error = nb::module_::import_("flashsdk._errors").attr("Error")(line, code);
  PyErr_SetObject(error.type().ptr(), error.ptr());
}

[[noreturn]] void throw_error(const char* line, const char* code) {
  set_error(line, code);
  throw nb::python_error();
}

// ---- numbers: their types; which of them is allowed is the library's to check

[[noreturn]] void fail(const std::string& name, nb::handle given, const std::string& allowed) {
  const nb::object text = nb::module_::import_("flashsdk._errors").attr("shown")(given);
  throw Error(ErrorCode::kInvalidArgument, name + ": " + nb::cast<std::string>(text) + "; " + allowed);
}

constexpr const char* kNumber = "a number that float32 can hold";
constexpr const char* kProbability = "a number, 0 <= dropout_p < 1";

// Of other types than Python's own, and of bools, which are integers to it, flashsdk._errors decides.
double to_double(const char* name, nb::handle value, const char* allowed = kNumber) {
  if (PyFloat_Check(value.ptr())) return PyFloat_AsDouble(value.ptr());
  if (PyLong_CheckExact(value.ptr())) {
    const double x = PyLong_AsDouble(value.ptr());
    if (x != -1.0 || PyErr_Occurred() == nullptr) return x;
    PyErr_Clear();
  }
  return nb::cast<double>(
      nb::module_::import_("flashsdk._errors").attr("real")(name, value, nb::arg("allowed") = allowed));
}

template <class T>
T to_integer(const char* name, nb::handle value, const std::string& allowed) {
  nb::object index = nb::borrow(value);
  if (!PyLong_CheckExact(value.ptr()))
    index = nb::module_::import_("flashsdk._errors").attr("integer")(name, value, nb::arg("allowed") = allowed);
  T result{};
  if constexpr (std::is_unsigned_v<T>) {
    result = PyLong_AsUnsignedLongLong(index.ptr());
  } else {
    result = PyLong_AsLongLong(index.ptr());
  }
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    fail(name, value, allowed);
  }
  return result;
}

// An array of one dimension or more; those of none are numbers.
bool is_array(nb::handle value) {
  if (PyLong_CheckExact(value.ptr())) return false;
  const nb::object shape = nb::getattr(value, "shape", nb::none());
  const Py_ssize_t rank = PyObject_Size(shape.ptr());
  if (rank < 0) PyErr_Clear();  // not a shape
  return rank > 0;
}

constexpr const char* kSeed = "an integer from 0 to 2^64 - 1, or int64 {seed, offset} where q is, (2,) or (batch, 2)";
constexpr const char* kUint64 = "an integer from 0 to 2^64 - 1";
constexpr const char* kInteger = "an integer of 64 bits";
const std::string kSplits = "an integer from 1 to " + std::to_string(kMaxRows) + ", or None";
const std::string kLength = "an integer from 0 to " + std::to_string(kMaxRows);

bool to_bool(const char* name, nb::handle value) {
  if (PyBool_Check(value.ptr())) return value.ptr() == Py_True;
  return nb::cast<bool>(nb::module_::import_("flashsdk._errors").attr("truth")(name, value));
}

// ---- masks, as flashsdk.ops lays them out

std::optional<std::int64_t> to_limit(const char* name, nb::handle value) {
  if (value.is_none()) return std::nullopt;
  return to_integer<std::int64_t>(name, value, kInteger);
}

// (left, right, top_left)
Band to_band(nb::tuple band) {
  return {to_limit("mask.left", band[0]), to_limit("mask.right", band[1]),
          nb::cast<bool>(band[2]) ? Alignment::kTopLeft : Alignment::kBottomRight};
}

// (block_q, block_k, seqlen_q, seqlen_k, band | None, eight arrays)
BlockMask to_block_mask(nb::tuple mask, ArrayImporter& arrays) {
  constexpr const char* kInt32 = ArrayImporter::kInt32;
  BlockMask m;
  m.block_q = nb::cast<int>(mask[0]);
  m.block_k = nb::cast<int>(mask[1]);
  m.seqlen_q = nb::cast<std::int64_t>(mask[2]);
  m.seqlen_k = nb::cast<std::int64_t>(mask[3]);
  if (!mask[4].is_none()) m.band = to_band(nb::cast<nb::tuple>(mask[4]));
  m.row_partial = {arrays.take({"mask.row_partial.offsets", kInt32}, mask[5]),
                   arrays.take({"mask.row_partial.indices", kInt32}, mask[6])};
  m.row_full = {arrays.take({"mask.row_full.offsets", kInt32}, mask[7]),
                arrays.take({"mask.row_full.indices", kInt32}, mask[8])};
  m.col_partial = {arrays.take({"mask.col_partial.offsets", kInt32}, mask[9]),
                   arrays.take({"mask.col_partial.indices", kInt32}, mask[10])};
  m.col_full = {arrays.take({"mask.col_full.offsets", kInt32}, mask[11]),
                arrays.take({"mask.col_full.indices", kInt32}, mask[12])};
  return m;
}

// What check_layout() returns, and calls take in the place of the eight arrays.
struct CheckedLayout {
  static constexpr const char* kName = "flashsdk.checked_layout";

  nb::tuple fields;  // not all that an importer takes is kept by it
  ArrayImporter arrays;
  CheckedBlockMask mask;
  explicit CheckedLayout(nb::tuple given) : fields(std::move(given)), mask(to_block_mask(fields, arrays)) {}
};

// A capsule, as those may outlive the module without a word.
nb::capsule check_layout(nb::tuple fields) {
  auto layout = std::make_unique<CheckedLayout>(std::move(fields));
  nb::capsule capsule(layout.get(), CheckedLayout::kName,
                      [](void* p) noexcept { delete static_cast<CheckedLayout*>(p); });
  layout.release();
  return capsule;
}

Mask to_mask(nb::handle mask, ArrayImporter& arrays) {
  if (mask.is_none()) return Dense{};
  nb::tuple fields = nb::cast<nb::tuple>(mask);
  if (fields.size() == 3) return to_band(fields);
  if (nb::capsule checked; nb::try_cast(fields[5], checked))
    return static_cast<const CheckedLayout*>(checked.data(CheckedLayout::kName))->mask;
  return to_block_mask(fields, arrays);
}

// ---- calls

// The stream of a call: the one given, else that on which the framework of one of its arrays works now.
class CallStream {
 public:
  CallStream(nb::handle array, nb::handle given) : array_(array), given_(given) {}

  // view: of the array, which need not be known yet.
  void* get(const TensorView& view) {
    if (known_) return stream_;
    if (!given_.is_none()) {
      const auto address = to_integer<std::uint64_t>("stream", given_, "a stream's address");
      stream_ = reinterpret_cast<void*>(address);
    } else if (!view.given() || !ArrayImporter::current_stream(array_, view.device, &stream_)) {
      const auto address = nb::cast<std::uintptr_t>(frameworks().attr("gpu_stream")(array_));
      stream_ = reinterpret_cast<void*>(address);
    }
    known_ = true;
    return stream_;
  }
  // Whether a call has to wait for its end: frameworks that tell their stream without Python keep memory in the order
  // of streams.
  bool must_wait(const TensorView& view) const {
    return view.device.type == DeviceType::kCUDA && !ArrayImporter::tells_stream(array_) &&
           nb::cast<bool>(frameworks().attr("gpu_must_wait")(array_));
  }
  // Memory of the array's framework, which gives it to nobody else before the stream has passed the call, or says that
  // it cannot know.
  nb::object scratch(std::size_t size) const { return frameworks().attr("gpu_scratch")(array_, size, given_); }

 private:
  // The module is looked up once: on a GPU most calls ask it, and an import costs more than the question.
  static nb::handle frameworks() {
    static constinit MadeOnce module;
    return module.get([] { return nb::module_::import_("flashsdk._frameworks").release().ptr(); });
  }

  nb::handle array_, given_;
  void* stream_ = nullptr;
  bool known_ = false;
};

// One call's arguments. `tensors` begins with q, k, v; `packed` is () or (cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
// max_seqlen_k), `options` is (softmax_scale, mask, bias, alibi_slopes, softcap, dropout_p, seed, offset,
// deterministic, stream, backend, seqused_q, seqused_k, sink, block_table, num_splits, k_descale, v_descale).
template <class Args>
struct Call {
  Args args;
  bool packed;
  ArrayImporter arrays;

  Call(nb::tuple tensors, nb::tuple p, nb::tuple o) : packed(p.size() > 0), stream_(tensors[0], o[9]) {
    arrays.gpu_stream = [this] { return stream(); };
    args.q = required({"q"}, tensors[0]);
    args.k = required({"k", ArrayImporter::kFloatsOrFp8}, tensors[1]);
    args.v = required({"v", ArrayImporter::kFloatsOrFp8}, tensors[2]);
    if (packed) {
      args.cu_seqlens_q = required({"cu_seqlens_q", ArrayImporter::kInt32}, p[0]);
      args.cu_seqlens_k = required({"cu_seqlens_k", ArrayImporter::kInt32}, p[1]);
      args.max_seqlen_q = to_integer<std::int64_t>("max_seqlen_q", p[2], kLength);
      args.max_seqlen_k = to_integer<std::int64_t>("max_seqlen_k", p[3], kLength);
    }
    if (!o[0].is_none()) args.softmax_scale = to_double("softmax_scale", o[0]);
    args.mask = to_mask(o[1], arrays);
    args.bias = arrays.take({"bias", ArrayImporter::kFloatsOrBool}, o[2]);
    args.alibi_slopes = arrays.take({"alibi_slopes", ArrayImporter::kFloat32}, o[3]);
    args.softcap = to_double("softcap", o[4]);
    args.dropout_p = to_double("dropout_p", o[5], kProbability);
    args.offset = to_integer<std::uint64_t>("offset", o[7], kUint64);
    if (is_array(o[6])) {
      args.seed_tensor = arrays.take({"seed", ArrayImporter::kInt64}, o[6]);
      if (args.offset != 0) fail("offset", o[7], "0, as seed is an array with an offset of its own");
    } else {
      args.seed = to_integer<std::uint64_t>("seed", o[6], kSeed);
    }
    args.deterministic = to_bool("deterministic", o[8]);
    if (!o[9].is_none() && args.q.device.type == DeviceType::kCPU) fail("stream", o[9], "None, as q is on cpu");
    // Not every str is UTF-8, and an empty one is no name: "" in the C++ arguments is None here.
    if (!o[10].is_none() && (!nb::try_cast(o[10], args.backend) || args.backend.empty()))
      fail("backend", o[10], "\"cpu\", \"sm80\", \"sm90\" or None");
    args.seqused_q = arrays.take({"seqused_q", ArrayImporter::kInt32}, o[11]);
    args.seqused_k = arrays.take({"seqused_k", ArrayImporter::kInt32}, o[12]);
    args.sink = arrays.take({"sink", ArrayImporter::kFloat32}, o[13]);
    args.block_table = arrays.take({"block_table", ArrayImporter::kInt32}, o[14]);
    if (!o[15].is_none()) {
      const auto splits = to_integer<std::int64_t>("num_splits", o[15], kSplits);
      if (splits < 1 || splits > kMaxRows) fail("num_splits", o[15], kSplits);
      args.num_splits = static_cast<int>(splits);
    }
    args.k_descale = arrays.take({"k_descale", ArrayImporter::kFloat32}, o[16]);
    args.v_descale = arrays.take({"v_descale", ArrayImporter::kFloat32}, o[17]);
  }

  TensorView required(ArrayImporter::Role role, nb::handle array) {
    if (array.is_none()) throw Error(ErrorCode::kInvalidArgument, std::string(role.name) + ": None; an array");
    return arrays.take(role, array);
  }
  TensorView output(ArrayImporter::Role role, nb::handle array) { return arrays.take(role, array, Access::kWrite); }

  // Runs without the GIL, once all is checked.
  void launch() {
    const CoreApi& core = core_api();
    GpuOptions gpu;
    gpu.owner = this;
    gpu.current_stream = [](void* call) { return static_cast<Call*>(call)->stream(); };
    gpu.workspace = [](void* call, std::size_t size) { return static_cast<Call*>(call)->scratch(size); };
    gpu.at_launch = [](void* call) { static_cast<Call*>(call)->release_gil(); };
    Failure failure;
    bool done = false;
    if constexpr (std::is_same_v<Args, ForwardArgs>)
      done = core.forward(args, packed, gpu, failure);
    else
      done = core.backward(args, packed, gpu, failure);
    if (done && wait_) core.synchronize(stream(), args.q.device.index);
    without_gil_.reset();
    if (!done) throw_error(failure.message.c_str(), failure.code);
  }

 private:
  void* stream() { return stream_.get(args.q); }

  // The workspace, which goes back when the call returns.
  void* scratch(std::size_t size) {
    scratch_ = stream_.scratch(size);
    return arrays.take({"workspace"}, scratch_).data;
  }

  void release_gil() {
    wait_ = stream_.must_wait(args.q);
    without_gil_.emplace();
  }

  CallStream stream_;  // of q
  nb::object scratch_;
  bool wait_ = false;
  std::optional<WithoutGil> without_gil_;  // the last member, so that an exception that passes finds the GIL back first
};

// tensors: (q, k, v, out, lse)
void forward(nb::tuple tensors, nb::tuple packed, nb::tuple options) {
  Call<ForwardArgs> call(tensors, packed, options);
  call.args.out = call.output({"out"}, tensors[3]);
  call.args.lse = call.output({"lse", ArrayImporter::kFloat32}, tensors[4]);
  call.launch();
}

// tensors: (q, k, v, dout, out, lse, dlse | None, dq, dk, dv, dsink | None)
void backward(nb::tuple tensors, nb::tuple packed, nb::tuple options) {
  Call<BackwardArgs> call(tensors, packed, options);
  call.args.dout = call.required({"dout"}, tensors[3]);
  call.args.out = call.required({"out"}, tensors[4]);
  call.args.lse = call.required({"lse", ArrayImporter::kFloat32}, tensors[5]);
  call.args.dlse = call.arrays.take({"dlse", ArrayImporter::kFloat32}, tensors[6]);
  call.args.dq = call.output({"dq"}, tensors[7]);
  call.args.dk = call.output({"dk"}, tensors[8]);
  call.args.dv = call.output({"dv"}, tensors[9]);
  call.args.dsink = call.output({"dsink", ArrayImporter::kFloat32}, tensors[10]);
  call.launch();
}

// tensors: (k_cache, v_cache, k, v, seqused_k, block_table | None, q | None, q_out | None, rotary_cos | None,
// rotary_sin | None, k_descale | None, v_descale | None)
void append(nb::tuple tensors, nb::handle interleaved, nb::handle q_advances) {
  ArrayImporter arrays;
  KvAppendArgs args;
  CallStream stream(tensors[2], nb::none());
  arrays.gpu_stream = [&] { return stream.get(args.k); };
  const auto required = [&](ArrayImporter::Role role, nb::handle array) {
    if (array.is_none()) throw Error(ErrorCode::kInvalidArgument, std::string(role.name) + ": None; an array");
    return arrays.take(role, array);
  };
  args.k = required({"k"}, tensors[2]);
  args.v = required({"v"}, tensors[3]);
  args.k_cache = arrays.take({"k_cache", ArrayImporter::kFloatsOrFp8}, tensors[0], Access::kWrite);
  args.v_cache = arrays.take({"v_cache", ArrayImporter::kFloatsOrFp8}, tensors[1], Access::kWrite);
  args.seqused_k = required({"seqused_k", ArrayImporter::kInt32}, tensors[4]);
  args.block_table = arrays.take({"block_table", ArrayImporter::kInt32}, tensors[5]);
  args.q = arrays.take({"q"}, tensors[6]);
  args.q_out = arrays.take({"q_out"}, tensors[7], Access::kWrite);
  args.rotary_cos = arrays.take({"rotary_cos"}, tensors[8]);
  args.rotary_sin = arrays.take({"rotary_sin"}, tensors[9]);
  args.k_descale = arrays.take({"k_descale", ArrayImporter::kFloat32}, tensors[10]);
  args.v_descale = arrays.take({"v_descale", ArrayImporter::kFloat32}, tensors[11]);
  args.rotary_interleaved = to_bool("rotary_interleaved", interleaved);
  args.q_advances = to_bool("q_advances", q_advances);
  const bool wait = stream.must_wait(args.k);
  LaunchOptions options;
  if (args.k.device.type == DeviceType::kCUDA) options.stream = stream.get(args.k);
  const WithoutGil released;
  kv_append(args, options);
  if (wait) core_api().synchronize(options.stream, args.k.device.index);
}

// tensors: (q, k, v)
nb::tuple explain_call(bool is_backward, nb::tuple tensors, nb::tuple packed, nb::tuple options) {
  const Explanation why = is_backward ? explain(Call<BackwardArgs>(tensors, packed, options).args)
                                      : explain(Call<ForwardArgs>(tensors, packed, options).args);
  nb::list refused;
  for (const Explanation::Refusal& r : why.refused) refused.append(nb::make_tuple(r.kernel, r.reason));
  return nb::make_tuple(why.kernel, refused, why.packing, nb::make_tuple(why.tile_m, why.tile_n));
}

nb::list list_kernels() {
  nb::list list;
  for (const KernelInfo& k : kernels()) {
    nb::dict d;
    d["name"] = k.name;
    d["op"] = k.op;
    d["backend"] = k.backend;
    d["arch"] = k.arch;
    d["dtype"] = k.dtype;
    d["head_dim"] = k.head_dim;
    d["head_dim_v"] = k.head_dim_v;
    d["mask"] = k.mask;
    d["features"] = k.features;
    d["score_features"] = !k.features.empty();  // the old name of it, until 0.3
    d["any_alignment"] = k.any_alignment;
    d["splits_keys"] = k.splits_keys;
    d["fp8_kv"] = k.fp8_kv;
    d["tile_m"] = k.tile_m;
    d["tile_n"] = k.tile_n;
    d["available"] = k.available;
    list.append(d);
  }
  return list;
}

nb::dict describe_build() {
  const BuildInfo info = build_info();
  nb::dict d;
  d["version"] = info.version;
  d["compiler"] = info.compiler;
  d["cpu_isas"] = info.cpu_isas;
  d["cpu_isa"] = info.cpu_isa;
  d["cpu_head_dim"] = info.cpu_head_dim;
  d["cuda"] = info.cuda;
  d["cuda_archs"] = info.cuda_archs;
  d["nvtx"] = info.nvtx;
  d["num_threads"] = get_num_threads();
  return d;
}

void set_threads(nb::handle n) {
  const std::string allowed = "1 to " + std::to_string(kMaxThreads);
  const auto threads = to_integer<std::int64_t>("n", n, allowed);
  if (static_cast<int>(threads) != threads) fail("n", n, allowed);
  set_num_threads(static_cast<int>(threads));
}

// An Executor's run by parallel_for(begin, end, grain_size, function, context), a function of C at `pool`.
void run_by_parallel_for(void* pool, int threads, void (*fn)(void*, int), void* context) {
  using Chunk = void (*)(std::int64_t begin, std::int64_t end, void* context);
  using ParallelFor = std::int32_t (*)(std::int64_t, std::int64_t, std::int64_t, Chunk, void*);
  struct Job {
    void (*fn)(void*, int);
    void* context;
  } job{fn, context};
  // A chunk's first slot does what is left to do.
  const Chunk chunk = [](std::int64_t begin, std::int64_t, void* given) {
    const Job& j = *static_cast<Job*>(given);
    j.fn(j.context, static_cast<int>(begin));
  };
  if (reinterpret_cast<ParallelFor>(pool)(0, threads, 1, chunk, &job) != 0)
    throw std::runtime_error("flashsdk: parallel_for failed");
}

// Calls of this thread run on n threads, by the parallel_for at `address`, or the library's own where that is 0. n = 0
// ends it.
void use_threads(int n, std::uintptr_t address) {
  thread_local Executor executor;
  executor = {n, reinterpret_cast<void*>(address), address == 0 ? nullptr : run_by_parallel_for};
  use_executor(n == 0 ? nullptr : &executor);
}

double peak_of_machine(const std::string& kind, double seconds) {
  if (kind != "fp32" && kind != "bf16_dot") fail("kind", nb::str(kind.c_str()), "\"fp32\" or \"bf16_dot\"");
  const WithoutGil released;
  return core_api().measure_peak(kind == "fp32" ? PeakKind::kFp32 : PeakKind::kBf16Dot, build_info().cpu_isa,
                                 get_num_threads(), seconds);
}

void translate(const std::exception_ptr& thrown, void*) {
  try {
    std::rethrow_exception(thrown);
  } catch (const Error& e) {
    set_error(e.what(), to_string(e.code()));
  }
}

// A process has one library of a name: that of a program which runs Python may be of another build than this.
void check_library() {
  if (std::string(flashsdk_version()) != FLASHSDK_VERSION || core_api().layout != CoreApi::kLayout)
    throw nb::import_error(("libflashsdk " + std::string(flashsdk_version()) +
                            ": loaded before, of another build; that of flashsdk " FLASHSDK_VERSION)
                               .c_str());
}

}  // namespace
}  // namespace flashsdk::python

NB_MODULE(_bindings, m) {
  namespace py = flashsdk::python;
  py::check_library();
  nanobind::register_exception_translator(py::translate);
  m.attr("__version__") = FLASHSDK_VERSION;
  m.attr("MAX_THREADS") = flashsdk::kMaxThreads;
  m.def("forward", py::forward);
  m.def("backward", py::backward);
  m.def("append", py::append);
  m.def("explain", py::explain_call);
  m.def("check_layout", py::check_layout);
  m.def("kernels", py::list_kernels);
  m.def("build_info", py::describe_build);
  m.def("set_num_threads", py::set_threads, nanobind::arg("n").none());
  m.def("get_num_threads", flashsdk::get_num_threads);
  m.def("use_threads", py::use_threads);
  m.def("measure_peak", py::peak_of_machine);
  // What the library of PyTorch's operators calls, without linking a second core.
  m.attr("core_api") = nanobind::capsule(&flashsdk::core_api(), "flashsdk.core_api");
  m.def("empty", py::empty);
  m.def("gpu_view", py::gpu_view);
  m.def("begin_range", flashsdk::core_api().begin_range);
  m.def("end_range", flashsdk::core_api().end_range);
}
