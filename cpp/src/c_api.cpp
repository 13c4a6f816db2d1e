// The C API: structs of C to those of the C++ API, exceptions to a status and a line. The C++ API says what is allowed.
#include "flashsdk/c_api.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "check.h"
#include "flashsdk/flashsdk.h"

using flashsdk::AttentionArgs;
using flashsdk::BackwardArgs;
using flashsdk::BlockMask;
using flashsdk::BlockMaskStorage;
using flashsdk::Error;
using flashsdk::ErrorCode;
using flashsdk::fail;
using flashsdk::ForwardArgs;
using flashsdk::TensorView;

struct flashsdk_plan {
  flashsdk::Plan plan;
};

namespace {

// ---- failures

thread_local std::string g_text;
thread_local const char* g_line = "";

flashsdk_status failed(flashsdk_status status, const char* line) noexcept {
  try {
    g_text = line;
    g_line = g_text.c_str();
  } catch (...) {
    g_line = "no memory for the line that says what failed";
  }
  return status;
}

flashsdk_status status_of(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return FLASHSDK_INVALID_ARGUMENT;
    case ErrorCode::kUnsupported:
      return FLASHSDK_UNSUPPORTED;
    case ErrorCode::kRuntime:
      return FLASHSDK_RUNTIME;
  }
  return FLASHSDK_RUNTIME;
}

template <class F>
flashsdk_status guarded(F call) noexcept {
  try {
    call();
    return FLASHSDK_OK;
  } catch (const Error& e) {
    return failed(status_of(e.code()), e.what());
  } catch (const std::bad_alloc&) {
    return failed(FLASHSDK_RUNTIME, "no memory");
  } catch (const std::exception& e) {
    return failed(FLASHSDK_RUNTIME, e.what());
  } catch (...) {
    return failed(FLASHSDK_RUNTIME, "an exception of no known type");
  }
}

template <class T>
T& required(const char* name, T* given) {
  if (given == nullptr) fail(name, "a null pointer", "an address");
  return *given;
}

// ---- structs that grow

// The bytes of a struct when it was first published, up to the end of its last field then. It never changes.
#define FLASHSDK_END_OF(Struct, field) (offsetof(Struct, field) + sizeof(Struct::field))
template <class Struct>
constexpr std::size_t kFirstSize = 0;
template <>
constexpr std::size_t kFirstSize<flashsdk_band> = FLASHSDK_END_OF(flashsdk_band, reserved);
template <>
constexpr std::size_t kFirstSize<flashsdk_block_mask> = FLASHSDK_END_OF(flashsdk_block_mask, seqlen_k);
template <>
constexpr std::size_t kFirstSize<flashsdk_attention_args> = FLASHSDK_END_OF(flashsdk_attention_args, num_splits);
#undef FLASHSDK_END_OF

// Bytes that the caller and this library both know.
template <class Struct>
std::size_t common_size(const char* name, const Struct* given) {
  constexpr std::size_t kMost = 4096;  // one that was never set is not to be read for long
  const std::size_t size = required(name, given).struct_size;
  if (size < kFirstSize<Struct> || size > kMost)
    fail(std::string(name) + ".struct_size", std::to_string(size),
         std::to_string(kFirstSize<Struct>) + " to " + std::to_string(kMost) + ", the size of the struct");
  return std::min(size, sizeof(Struct));
}

// The caller's struct with all fields of this library; those that the caller does not know are not given.
template <class Struct>
Struct read(const char* name, const Struct* given) {
  static_assert(std::is_trivially_copyable_v<Struct> && sizeof(Struct) % 8 == 0, "padding at the end is no field");
  Struct result{};
  std::memcpy(&result, given, common_size(name, given));
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  if (result.struct_size > sizeof(Struct) &&
      std::any_of(bytes + sizeof(Struct), bytes + result.struct_size, [](unsigned char b) { return b != 0; }))
    fail(name, "a field that flashsdk " FLASHSDK_VERSION " does not know", "a newer flashsdk", ErrorCode::kUnsupported);
  return result;
}

// ---- tensors

// Lines of TensorView begin with "tensor"; these name which.
TensorView view_of(const std::string& name, const flashsdk_tensor* t) {
  if (t == nullptr) return {};
  if (t->ndim > 0 && t->shape == nullptr) fail(name + ".shape", "a null pointer", std::to_string(t->ndim) + " extents");
  try {
    return TensorView(t);
  } catch (const Error& e) {
    constexpr std::size_t kWord = sizeof("tensor") - 1;
    throw Error(e.code(), name + std::string(e.what()).substr(kWord));
  }
}

template <class Args>
struct TensorField {
  const char* name;
  const flashsdk_tensor* flashsdk_attention_args::* given;
  TensorView Args::* taken;
};
using C = flashsdk_attention_args;

constexpr TensorField<AttentionArgs> kShared[] = {
    {"q", &C::q, &AttentionArgs::q},
    {"k", &C::k, &AttentionArgs::k},
    {"v", &C::v, &AttentionArgs::v},
    {"bias", &C::bias, &AttentionArgs::bias},
    {"alibi_slopes", &C::alibi_slopes, &AttentionArgs::alibi_slopes},
    {"seed_tensor", &C::seed_tensor, &AttentionArgs::seed_tensor},
    {"cu_seqlens_q", &C::cu_seqlens_q, &AttentionArgs::cu_seqlens_q},
    {"cu_seqlens_k", &C::cu_seqlens_k, &AttentionArgs::cu_seqlens_k},
    {"seqused_q", &C::seqused_q, &AttentionArgs::seqused_q},
    {"seqused_k", &C::seqused_k, &AttentionArgs::seqused_k},
    {"sink", &C::sink, &AttentionArgs::sink},
    {"block_table", &C::block_table, &AttentionArgs::block_table},
};
constexpr TensorField<ForwardArgs> kForward[] = {
    {"out", &C::out, &ForwardArgs::out},
    {"lse", &C::lse, &ForwardArgs::lse},
    {"k_descale", &C::k_descale, &ForwardArgs::k_descale},
    {"v_descale", &C::v_descale, &ForwardArgs::v_descale},
};
constexpr TensorField<BackwardArgs> kBackward[] = {
    {"dout", &C::dout, &BackwardArgs::dout}, {"out", &C::out, &BackwardArgs::out},
    {"lse", &C::lse, &BackwardArgs::lse},    {"dlse", &C::dlse, &BackwardArgs::dlse},
    {"dq", &C::dq, &BackwardArgs::dq},       {"dk", &C::dk, &BackwardArgs::dk},
    {"dv", &C::dv, &BackwardArgs::dv},       {"dsink", &C::dsink, &BackwardArgs::dsink},
};

template <class Args, std::size_t n>
void take_tensors(const TensorField<Args> (&fields)[n], const C& c, Args& args) {
  for (const auto& field : fields) args.*field.taken = view_of(field.name, c.*field.given);
}

// ---- masks

std::optional<std::int64_t> limit_of(std::int64_t given) {
  if (given == FLASHSDK_UNLIMITED) return std::nullopt;
  return given;
}

flashsdk::Band band_of(const flashsdk_band* given) {
  const auto c = read("band", given);
  if (c.reserved != 0) fail("band.reserved", std::to_string(c.reserved), "0");
  if (c.alignment != FLASHSDK_BOTTOM_RIGHT && c.alignment != FLASHSDK_TOP_LEFT)
    fail("band.alignment", std::to_string(c.alignment), "FLASHSDK_BOTTOM_RIGHT (0) or FLASHSDK_TOP_LEFT (1)");
  const bool top_left = c.alignment == FLASHSDK_TOP_LEFT;
  return {limit_of(c.left), limit_of(c.right),
          top_left ? flashsdk::Alignment::kTopLeft : flashsdk::Alignment::kBottomRight};
}

// The lists of a block mask, named as the library's own lines name them.
struct ListsField {
  const char* name;
  const flashsdk_tensor *flashsdk_block_mask::*offsets, *flashsdk_block_mask::*indices;
  flashsdk::BlockLists BlockMask::* taken;
};
using M = flashsdk_block_mask;
constexpr std::array<ListsField, 4> kLists{{
    {"mask.row_partial", &M::row_partial_offsets, &M::row_partial_indices, &BlockMask::row_partial},
    {"mask.row_full", &M::row_full_offsets, &M::row_full_indices, &BlockMask::row_full},
    {"mask.col_partial", &M::col_partial_offsets, &M::col_partial_indices, &BlockMask::col_partial},
    {"mask.col_full", &M::col_full_offsets, &M::col_full_indices, &BlockMask::col_full},
}};

BlockMask block_mask_of(const flashsdk_block_mask* given) {
  const auto c = read("block_mask", given);
  BlockMask mask;
  mask.block_q = c.block_q;
  mask.block_k = c.block_k;
  for (const ListsField& field : kLists) {
    const std::string name = field.name;
    mask.*field.taken = {view_of(name + ".offsets", c.*field.offsets), view_of(name + ".indices", c.*field.indices)};
  }
  mask.seqlen_q = c.seqlen_q;
  mask.seqlen_k = c.seqlen_k;
  return mask;
}

flashsdk::Mask mask_of(const C& c) {
  if (c.block_mask == nullptr && c.band == nullptr) return flashsdk::Dense{};
  if (c.block_mask == nullptr) return band_of(c.band);
  BlockMask mask = block_mask_of(c.block_mask);
  if (c.band != nullptr) mask.band = band_of(c.band);
  return mask;
}

// ---- calls

void take_own_tensors(const C& c, ForwardArgs& args) { take_tensors(kForward, c, args); }
void take_own_tensors(const C& c, BackwardArgs& args) { take_tensors(kBackward, c, args); }

// Everything that a call has goes from C to C++ here.
template <class Args>
Args args_of(const flashsdk_attention_args* given) {
  const C c = read("args", given);
  Args args;
  take_tensors<AttentionArgs>(kShared, c, args);
  take_own_tensors(c, args);
  args.mask = mask_of(c);
  if (c.softmax_scale != nullptr) args.softmax_scale = *c.softmax_scale;
  args.softcap = c.softcap;
  args.dropout_p = c.dropout_p;
  args.seed = c.seed;
  args.offset = c.offset;
  args.max_seqlen_q = c.max_seqlen_q;
  args.max_seqlen_k = c.max_seqlen_k;
  args.deterministic = c.deterministic != 0;
  args.num_splits = c.num_splits;
  if (c.backend != nullptr) args.backend = c.backend;
  return args;
}

template <class Args>
flashsdk_status make_plan(const flashsdk_attention_args* args, flashsdk_plan** plan) noexcept {
  return guarded([&] {
    flashsdk_plan*& result = required("plan", plan);
    result = new flashsdk_plan{flashsdk::plan(args_of<Args>(args))};
  });
}

template <class Args>
flashsdk_status ask_size(const flashsdk_attention_args* args, std::size_t* size) noexcept {
  return guarded([&] { required("size", size) = flashsdk::workspace_size(args_of<Args>(args)); });
}

// As Python prints it.
std::string text_of(const flashsdk::Explanation& why) {
  std::string text = "no kernel fits";
  if (!why.kernel.empty())
    text =
        why.kernel + ", tiles of " + std::to_string(why.tile_m) + " queries x " + std::to_string(why.tile_n) + " keys";
  if (!why.packing.empty()) text += "\n  " + why.packing;
  for (const auto& refusal : why.refused) text += "\n  not " + refusal.kernel + ": " + refusal.reason;
  return text;
}

template <class Args>
flashsdk_status ask_why(const flashsdk_attention_args* args, char* buffer, std::size_t size,
                        std::size_t* length) noexcept {
  return guarded([&] {
    if (size > 0) required("buffer", buffer);
    const std::string text = text_of(flashsdk::explain(args_of<Args>(args)));
    if (length != nullptr) *length = text.size();
    if (size == 0) return;
    const std::size_t copied = std::min(size - 1, text.size());
    std::memcpy(buffer, text.data(), copied);
    buffer[copied] = '\0';
  });
}

// A tensor of the library's own as C has it. Shape and strides are the view's, which must live as long.
flashsdk_tensor tensor_of(TensorView& t) {
  flashsdk_tensor result{};
  result.data = t.data;
  result.device.device_type = FLASHSDK_CPU;
  result.ndim = t.rank;
  result.dtype = {FLASHSDK_INT, 32, 1};
  result.shape = t.shape.data();
  result.strides = t.stride.data();
  return result;
}

}  // namespace

// Built once and never moved: the tensors hold addresses of the views, and the views those of the storage.
struct flashsdk_block_lists {
  explicit flashsdk_block_lists(BlockMaskStorage&& given) : storage(std::move(given)), view(storage.view()) {
    for (std::size_t n = 0; n < kLists.size(); ++n) {
      flashsdk::BlockLists& lists = view.*kLists[n].taken;
      tensors[n] = {tensor_of(lists.offsets), tensor_of(lists.indices)};
    }
  }
  flashsdk_block_lists(const flashsdk_block_lists&) = delete;
  flashsdk_block_lists& operator=(const flashsdk_block_lists&) = delete;

  flashsdk_block_mask mask() const {
    flashsdk_block_mask result{};
    result.block_q = view.block_q;
    result.block_k = view.block_k;
    for (std::size_t n = 0; n < kLists.size(); ++n) {
      result.*kLists[n].offsets = &tensors[n][0];
      result.*kLists[n].indices = &tensors[n][1];
    }
    return result;
  }

  BlockMaskStorage storage;
  BlockMask view;
  std::array<std::array<flashsdk_tensor, 2>, kLists.size()> tensors{};
};

const char* flashsdk_status_name(flashsdk_status status) {
  switch (status) {
    case FLASHSDK_OK:
      return "ok";
    case FLASHSDK_INVALID_ARGUMENT:
      return to_string(ErrorCode::kInvalidArgument);
    case FLASHSDK_UNSUPPORTED:
      return to_string(ErrorCode::kUnsupported);
    case FLASHSDK_RUNTIME:
      return to_string(ErrorCode::kRuntime);
    default:
      return "unknown";
  }
}

const char* flashsdk_last_error(void) { return g_line; }

const char* flashsdk_version(void) { return FLASHSDK_VERSION; }
int32_t flashsdk_version_number(void) {
  return 10000 * FLASHSDK_VERSION_MAJOR + 100 * FLASHSDK_VERSION_MINOR + FLASHSDK_VERSION_PATCH;
}

flashsdk_status flashsdk_block_lists_create(const uint8_t* blocks, int32_t batch, int32_t num_heads, int32_t rows,
                                            int32_t cols, int32_t block_q, int32_t block_k,
                                            flashsdk_block_lists** lists) {
  return guarded([&] {
    flashsdk_block_lists*& result = required("lists", lists);
    result =
        new flashsdk_block_lists(BlockMaskStorage::from_dense(blocks, batch, num_heads, rows, cols, block_q, block_k));
  });
}

flashsdk_status flashsdk_block_lists_mask(const flashsdk_block_lists* lists, flashsdk_block_mask* mask) {
  return guarded([&] {
    flashsdk_block_mask result = required("lists", lists).mask();
    const std::size_t size = common_size("mask", mask);
    result.struct_size = mask->struct_size;
    std::memset(mask, 0, mask->struct_size);
    std::memcpy(mask, &result, size);
  });
}

void flashsdk_block_lists_destroy(flashsdk_block_lists* lists) { delete lists; }

flashsdk_status flashsdk_plan_forward(const flashsdk_attention_args* args, flashsdk_plan** plan) {
  return make_plan<ForwardArgs>(args, plan);
}
flashsdk_status flashsdk_plan_backward(const flashsdk_attention_args* args, flashsdk_plan** plan) {
  return make_plan<BackwardArgs>(args, plan);
}

size_t flashsdk_plan_workspace_size(const flashsdk_plan* plan) {
  return plan == nullptr ? 0 : plan->plan.workspace_size();
}

flashsdk_status flashsdk_plan_launch(const flashsdk_plan* plan, void* workspace, size_t workspace_size, void* stream) {
  return guarded([&] { required("plan", plan).plan.launch({{workspace, workspace_size}, stream}); });
}

void flashsdk_plan_destroy(flashsdk_plan* plan) { delete plan; }

flashsdk_status flashsdk_workspace_size_forward(const flashsdk_attention_args* args, size_t* size) {
  return ask_size<ForwardArgs>(args, size);
}
flashsdk_status flashsdk_workspace_size_backward(const flashsdk_attention_args* args, size_t* size) {
  return ask_size<BackwardArgs>(args, size);
}

flashsdk_status flashsdk_explain_forward(const flashsdk_attention_args* args, char* buffer, size_t size,
                                         size_t* length) {
  return ask_why<ForwardArgs>(args, buffer, size, length);
}
flashsdk_status flashsdk_explain_backward(const flashsdk_attention_args* args, char* buffer, size_t size,
                                          size_t* length) {
  return ask_why<BackwardArgs>(args, buffer, size, length);
}

flashsdk_status flashsdk_set_num_threads(int32_t n) {
  return guarded([&] { flashsdk::set_num_threads(n); });
}

int32_t flashsdk_get_num_threads(void) {
  int32_t n = 0;
  guarded([&] { n = flashsdk::get_num_threads(); });
  return n;
}
