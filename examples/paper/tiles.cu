// The forward with tiles of 16 to 256 queries, and a C door to them for tiles.py.
//
// Each warp has 16 queries, whatever the tile, and Hopper's multiprocessor holds 16 warps; of the smallest tile 12, by
// its shared memory (other GPUs hold fewer). Tiles differ in how many queries share the keys that they read, so also in
// how many threads copy a tile of keys, and in how many warps wait for each other.
#include <flashsdk/kernels/common/own_kernel.h>
#include <flashsdk/kernels/sm80/launch.h>

#include <algorithm>
#include <array>
#include <string>

namespace {

constexpr int kHeadDim = 64, kKeys = 64, kWarps = 16;
constexpr int kMostBlocks = 12;  // a multiprocessor's shared memory holds no more; registers are left for so many

template <int kQueries>
struct Row {
  static constexpr flashsdk::table::Sm80Forward kRow{.head_dim = kHeadDim,
                                                     .tile = {kQueries, kKeys},
                                                     .warps = kQueries / 16,
                                                     .blocks = std::min(kMostBlocks, kWarps / (kQueries / 16)),
                                                     .kernels = {}};
};

template <int kQueries>
flashsdk::ForwardEntry kernel() {
  using Traits = flashsdk::sm80::ForwardTraitsOf<Row<kQueries>, cutlass::bfloat16_t>;
  return flashsdk::sm80::forward_entry<Traits, flashsdk::DensePolicy, flashsdk::Features::kNone>();
}

const auto& kernels() {
  static const std::array all{kernel<16>(), kernel<32>(), kernel<64>(), kernel<128>(), kernel<256>()};
  return all;
}

}  // namespace

#define DOOR extern "C" __attribute__((visibility("default")))

DOOR int tiles_count() { return static_cast<int>(kernels().size()); }
DOOR int tiles_queries(int index) { return kernels()[index].tile.m; }
DOOR int tiles_keys() { return kKeys; }

// q, k, v and out: bfloat16 (batch, seqlen, heads, 64), lse: float32 (batch, heads, seqlen), on a GPU. Null, or what
// was wrong, until the thread's next call.
DOOR const char* tiles_forward(int index, void* const tensors[5], int batch, int seqlen, int heads, int device,
                               void* stream) {
  thread_local std::string wrong;
  const auto view = [&](void* data) {
    flashsdk::TensorView t{data, flashsdk::DType::kBFloat16, {batch, seqlen, heads, kHeadDim}};
    t.device = {flashsdk::DeviceType::kCUDA, device};
    return t;
  };
  try {
    flashsdk::ForwardArgs args;
    args.q = view(tensors[0]);
    args.k = view(tensors[1]);
    args.v = view(tensors[2]);
    args.out = view(tensors[3]);
    args.lse = {tensors[4], flashsdk::DType::kFloat32, {batch, heads, seqlen}};
    args.lse.device = args.out.device;
    flashsdk::plan_own(args, kernels()[index], nullptr).launch({{}, stream});
    return nullptr;
  } catch (const std::exception& e) {
    wrong = e.what();
    return wrong.c_str();
  }
}
