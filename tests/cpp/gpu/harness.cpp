// A C door to the kernel table, for tests and measurements that drive single kernels from Python through ctypes.
#include <cstdint>
#include <cstdio>
#include <string>
#include <variant>
#include <vector>

#include "common/kernel_entry.h"
#include "cuda/host/device.h"
#include "flashsdk/status.h"

namespace flashsdk {
void add_cuda_kernels(KernelTable& table);

namespace {

// Of either operation: what the functions below pass on is a BackwardParams, which is a ForwardParams too.
using Entry = std::variant<ForwardEntry, BackwardEntry>;

class List final : public KernelTable {
 public:
  List() { add_cuda_kernels(*this); }
  void add(const ForwardEntry& entry) override { entries.emplace_back(entry); }
  void add(const BackwardEntry& entry) override { entries.emplace_back(entry); }
  std::vector<Entry> entries;
};
const std::vector<Entry>& entries() {
  static const List list;
  return list.entries;
}

thread_local std::string last_message;

// Reads a flat array of 64-bit words in the order harness.py writes them.
class Words {
 public:
  explicit Words(const std::int64_t* words) : next_(words) {}
  std::int64_t integer() { return *next_++; }
  int number() { return static_cast<int>(*next_++); }
  template <class T>
  T* pointer() {
    return reinterpret_cast<T*>(*next_++);
  }
  TensorParam tensor() {
    TensorParam t;
    t.ptr = pointer<void>();
    t.batch = integer();
    t.row = integer();
    t.head = integer();
    return t;
  }
  RowParam rows() {
    RowParam t;
    t.ptr = pointer<float>();
    t.batch = integer();
    t.head = integer();
    t.row = integer();
    return t;
  }
  DescaleParam descale() {
    DescaleParam t;
    t.ptr = pointer<const float>();
    t.batch = integer();
    t.head = integer();
    return t;
  }
  BlockListParam lists() {
    BlockListParam t;
    t.offsets = pointer<const std::int32_t>();
    t.indices = pointer<const std::int32_t>();
    t.batch = integer();
    t.head = integer();
    return t;
  }

 private:
  const std::int64_t* next_;
};

BackwardParams read_params(Words& w, double softmax_scale, double softcap) {
  BackwardParams p;
  p.dtype = static_cast<DType>(w.number());
  p.device = {DeviceType::kCUDA, w.number()};
  p.batch = w.number();
  p.num_heads = w.number();
  p.num_heads_kv = w.number();
  p.head_dim = w.number();
  p.head_dim_v = w.number();
  p.seqlen_q = w.number();
  p.seqlen_k = w.number();
  p.total_q = w.number();
  p.total_k = w.number();
  p.cu_seqlens_q = w.pointer<const std::int32_t>();
  p.cu_seqlens_k = w.pointer<const std::int32_t>();
  p.deterministic = w.number() != 0;
  for (TensorParam* t : {&p.q, &p.k, &p.v, &p.out, &p.dout, &p.dq, &p.dk, &p.dv}) *t = w.tensor();
  p.lse = w.rows();
  p.dlse = w.rows();
  p.mask.kind = static_cast<MaskKind>(w.number());
  p.mask.band.left = w.integer();
  p.mask.band.right = w.integer();
  p.mask.band.top_left = w.number() != 0;
  p.mask.block_q = w.number();
  p.mask.block_k = w.number();
  for (BlockListParam* t : {&p.mask.row_partial, &p.mask.row_full, &p.mask.col_partial, &p.mask.col_full})
    *t = w.lists();
  p.score.bias.ptr = w.pointer<const void>();
  p.score.bias.dtype = static_cast<DType>(w.number());
  p.score.bias.batch = w.integer();
  p.score.bias.head = w.integer();
  p.score.bias.row = w.integer();
  p.score.bias.col = w.integer();
  p.score.alibi_slopes = w.pointer<const float>();
  p.score.alibi_batch = w.integer();
  p.score.dropout.threshold = w.number();
  p.score.dropout.seed = static_cast<std::uint64_t>(w.integer());
  p.score.dropout.offset = static_cast<std::uint64_t>(w.integer());
  p.score.dropout.state = w.pointer<const std::uint64_t>();
  p.score.dropout.state_batch = w.integer();
  p.score.dropout.heads_each = p.score.dropout.state_batch == 0 ? p.num_heads : 0;
  p.seqused_q = w.pointer<const std::int32_t>();
  p.seqused_k = w.pointer<const std::int32_t>();
  p.sink.ptr = w.pointer<const float>();
  p.dsink = w.pointer<float>();
  p.pages.table = w.pointer<const std::int32_t>();
  p.pages.batch = w.integer();
  p.pages.size = w.number();
  p.pages.count = w.number();
  p.dtype_kv = static_cast<DType>(w.number());
  p.k_descale = w.descale();
  p.v_descale = w.descale();
  p.score.softmax_scale = static_cast<float>(softmax_scale);
  p.score.softcap = static_cast<float>(softcap);
  return p;
}

}  // namespace
}  // namespace flashsdk

extern "C" {

__attribute__((visibility("default"))) int harness_count() { return static_cast<int>(flashsdk::entries().size()); }

// op, dtype, largest head_dim, mask kind, number of features, tile m, tile n, splits keys, largest head_dim_v, fp8 keys
__attribute__((visibility("default"))) void harness_describe(int index, int* out) {
  const flashsdk::Entry& entry = flashsdk::entries()[index];
  std::visit(
      [&](const auto& e) {
        out[0] = static_cast<int>(entry.index());
        out[1] = static_cast<int>(e.key.dtype);
        out[2] = e.key.head_dim;
        out[3] = static_cast<int>(e.key.mask);
        out[4] = count(e.key.features);
        out[5] = e.tile.m;
        out[6] = e.tile.n;
        out[7] = e.key.splits_keys;
        out[8] = e.key.head_dim_v;
        out[9] = e.key.fp8_kv;
      },
      entry);
}

__attribute__((visibility("default"))) const char* harness_architecture(int index) {
  return std::visit([](const auto& e) { return e.key.arch; }, flashsdk::entries()[index]);
}

__attribute__((visibility("default"))) const char* harness_refusal(int index, const std::int64_t* words, double scale,
                                                                   double softcap) {
  flashsdk::Words w(words);
  const flashsdk::BackwardParams p = flashsdk::read_params(w, scale, softcap);
  return std::visit([&](const auto& e) { return e.can_implement(p); }, flashsdk::entries()[index]);
}

__attribute__((visibility("default"))) std::int64_t harness_workspace(int index, const std::int64_t* words) {
  flashsdk::Words w(words);
  const flashsdk::BackwardParams p = flashsdk::read_params(w, 1, 0);
  return static_cast<std::int64_t>(
      std::visit([&](const auto& e) { return e.workspace_size(p, 1); }, flashsdk::entries()[index]));
}

// As if the card had no more: persistent kernels then have several tiles a thread block in a small problem too.
__attribute__((visibility("default"))) void harness_limit_multiprocessors(int device, int most) {
  auto& limits = const_cast<flashsdk::cuda::DeviceLimits&>(flashsdk::cuda::device_limits(device));
  if (limits.multiprocessors > most) limits.multiprocessors = most;
}

// Null, or what failed.
__attribute__((visibility("default"))) const char* harness_launch(int index, const std::int64_t* words, double scale,
                                                                  double softcap, void* workspace, void* stream) {
  flashsdk::Words w(words);
  flashsdk::BackwardParams p = flashsdk::read_params(w, scale, softcap);
  flashsdk::LaunchContext context;
  context.workspace = workspace;
  context.stream = stream;
  try {
    std::visit([&](const auto& e) { e.launch(p, context); }, flashsdk::entries()[index]);
    return nullptr;
  } catch (const flashsdk::Error& e) {
    flashsdk::last_message = e.what();
    return flashsdk::last_message.c_str();
  }
}

}  // extern "C"
