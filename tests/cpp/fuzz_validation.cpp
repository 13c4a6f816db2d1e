// Random and absurd calls: each runs, or is refused in one line, and nothing crashes or writes where it must not.
//
// As a gtest: a seeded loop of 10^6 calls; FLASHSDK_FUZZ_SEED and FLASHSDK_FUZZ_COUNT repeat a part of it. As a
// libFuzzer target: compiled with FLASHSDK_LIBFUZZER by a Clang that has it.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "flashsdk/flashsdk.h"
#include "host_tensor.h"

#if defined(__SANITIZE_ADDRESS__)
extern "C" void __sanitizer_set_death_callback(void (*)());
#endif

namespace flashsdk::testing {
namespace {

constexpr std::int64_t kMin64 = std::numeric_limits<std::int64_t>::min();
constexpr std::int64_t kMax64 = std::numeric_limits<std::int64_t>::max();

// Decisions, taken from a string of bytes; zeros when it is used up.
class Choices {
 public:
  Choices(const std::uint8_t* bytes, std::size_t size) : bytes_(bytes), size_(size) {}

  int below(int n) { return byte() % n; }  // n <= 256
  int between(int low, int high) { return low + below(high - low + 1); }
  bool chance(int percent) { return below(100) < percent; }
  template <class T, std::size_t n>
  T pick(const T (&values)[n]) {
    return values[below(static_cast<int>(n))];
  }

 private:
  std::uint8_t byte() { return next_ < size_ ? bytes_[next_++] : 0; }
  const std::uint8_t* bytes_;
  std::size_t size_, next_ = 0;
};

// The memory all tensors of valid calls lie in.
class Arena {
 public:
  void reset() { used_ = kGuard; }
  void* take(std::size_t bytes) {
    void* p = memory_.data() + used_;
    used_ += (bytes + 63) / 64 * 64;
    if (used_ + kGuard > memory_.size()) std::abort();  // the problems below are small
    return p;
  }
  // Whether every element of the tensor lies inside. In doubles: a spoilt stride times a spoilt size exceeds 127 bits,
  // and what may lie inside is far below the 2^53 to which they count exactly.
  bool holds(const TensorView& t) const {
    const auto at = static_cast<double>(reinterpret_cast<std::uintptr_t>(t.data)) -
                    static_cast<double>(reinterpret_cast<std::uintptr_t>(memory_.data()));
    const double element = size_of(t.dtype);
    double low = at, high = at + element;
    for (int d = 0; d < t.rank; ++d) {
      if (t.shape[d] == 0) return true;
      const double reach =
          t.shape[d] == 1 ? 0 : (static_cast<double>(t.shape[d]) - 1) * static_cast<double>(t.stride[d]) * element;
      (reach < 0 ? low : high) += reach;
    }
    return low >= 0 && high <= static_cast<double>(memory_.size());
  }
  // All that is in use, and what lies on either side of it.
  std::vector<unsigned char> bytes() const { return {memory_.begin(), memory_.begin() + used_ + kGuard}; }
  std::size_t offset_of(const char* p) const { return p - reinterpret_cast<const char*>(memory_.data()); }

 private:
  // Lists and offsets that a spoilt call makes a little too long are still read from here.
  static constexpr std::size_t kGuard = 4096;
  std::vector<unsigned char> memory_ = std::vector<unsigned char>(std::size_t{1} << 20, 0x3C);
  std::size_t used_ = 0;
};

// How calls ended.
struct Counts {
  std::uint64_t refused = 0, accepted = 0, launched = 0;
};

// One call. It starts out valid and is then spoilt.
class Call {
 public:
  Call(Arena& arena, Choices& choices) : arena_(arena), c_(choices) {
    arena_.reset();
    build();
    for (int n = c_.pick({0, 1, 1, 1, 2, 3}); n > 0; --n) spoil();
  }

  void run(Counts& counts) {
    std::size_t size = 0;
    const std::string refused = error_of([&] { size = backward_ ? workspace_size(bwd_) : workspace_size(fwd_); });
    const bool small = size <= kMaxWorkspace && c_.chance(6);
    const bool holds = std::all_of(tensors_.begin(), tensors_.end(), [&](const TensorView* t) {
      return t->rank <= 0 || t->rank > 5 || arena_.holds(*t);
    });
    if (holds) expect_the_same_checked(refused);
    ++(refused.empty() ? counts.accepted : counts.refused);
    if (refused.empty() ? !(small && holds) : !c_.chance(3)) return;
    counts.launched += launch(size, !refused.empty()) ? 1 : 0;
  }

 private:
  static constexpr std::size_t kMaxWorkspace = std::size_t{32} << 20;
  enum class Role : std::uint8_t { kInput, kInt, kOutput };

  AttentionArgs& args() { return backward_ ? static_cast<AttentionArgs&>(bwd_) : fwd_; }

  // ---- a valid problem

  TensorView tensor(DType dtype, std::vector<std::int64_t> shape) {
    TensorView t;
    t.dtype = dtype;
    t.rank = static_cast<int>(shape.size());
    std::copy(shape.begin(), shape.end(), t.shape.begin());
    const bool padded = c_.chance(30);
    std::int64_t step = 1;
    for (int d = t.rank - 1; d >= 0; --d) {
      t.stride[d] = step;
      step *= std::max<std::int64_t>(t.shape[d], 1);
      if (padded) step += d;
    }
    t.data = arena_.take(static_cast<std::size_t>(step) * size_of(dtype));
    return t;
  }
  TensorView add(TensorView& slot, DType dtype, std::vector<std::int64_t> shape, Role role) {
    slot = tensor(dtype, std::move(shape));
    remember(slot, role);
    return slot;
  }
  void remember(TensorView& slot, Role role) {
    tensors_.push_back(&slot);
    if (role == Role::kInt) ints_.push_back(&slot);
    if (role == Role::kOutput) outputs_.push_back(&slot);
  }
  void ints(TensorView& slot, const std::vector<int>& values, std::vector<std::int64_t> shape) {
    slot = TensorView();
    slot.dtype = DType::kInt32;
    slot.rank = static_cast<int>(shape.size());
    std::int64_t step = 1;
    for (int d = slot.rank - 1; d >= 0; --d) {
      slot.shape[d] = shape[d];
      slot.stride[d] = step;
      step *= shape[d];
    }
    slot.data = arena_.take(values.size() * 4 + 4);
    if (!values.empty()) std::memcpy(slot.data, values.data(), values.size() * 4);
    remember(slot, Role::kInt);
  }

  void build() {
    backward_ = c_.chance(50);
    packed_ = c_.chance(35);
    AttentionArgs& a = args();
    const DType dtype = c_.pick({DType::kFloat32, DType::kFloat16, DType::kBFloat16});
    const std::int64_t batch = c_.between(packed_ ? 1 : 0, 2), heads_kv = c_.between(1, 2);
    const std::int64_t heads = heads_kv * c_.between(1, 2);
    const std::int64_t d = c_.chance(90) ? c_.between(1, 20) : c_.between(1, 80);
    const std::int64_t d_v = c_.chance(70) ? d : c_.between(1, 20);
    std::int64_t seqlen_q = c_.between(0, 12), seqlen_k = c_.between(0, 40), rows_q = seqlen_q, rows_k = seqlen_k;
    if (packed_) {
      rows_q = lengths(a.cu_seqlens_q, batch, seqlen_q);
      rows_k = lengths(a.cu_seqlens_k, batch, seqlen_k);
      a.max_seqlen_q = seqlen_q;
      a.max_seqlen_k = seqlen_k;
    }
    auto shape = [&](std::int64_t rows, std::int64_t n, std::int64_t dim) {
      return packed_ ? std::vector<std::int64_t>{rows, n, dim} : std::vector<std::int64_t>{batch, rows, n, dim};
    };
    auto per_query = [&] {
      return packed_ ? std::vector<std::int64_t>{heads, rows_q} : std::vector<std::int64_t>{batch, heads, rows_q};
    };
    add(a.q, dtype, shape(rows_q, heads, d), Role::kInput);
    const bool narrow = !backward_ && dtype != DType::kFloat32 && c_.chance(25);
    const DType dtype_kv = narrow ? DType::kFloat8E4M3 : dtype;
    add(a.k, dtype_kv, shape(rows_k, heads_kv, d), Role::kInput);
    add(a.v, dtype_kv, shape(rows_k, heads_kv, d_v), Role::kInput);
    for (TensorView* descale : {&a.k_descale, &a.v_descale})
      if (narrow && c_.chance(50))
        add(*descale, DType::kFloat32, {c_.chance(50) ? batch : 1, c_.chance(50) ? heads_kv : 1}, Role::kInput);
    if (backward_) {
      add(bwd_.dout, dtype, shape(rows_q, heads, d_v), Role::kInput);
      add(bwd_.out, dtype, shape(rows_q, heads, d_v), Role::kInput);
      add(bwd_.lse, DType::kFloat32, per_query(), Role::kInput);
      if (c_.chance(30)) add(bwd_.dlse, DType::kFloat32, per_query(), Role::kInput);
      add(bwd_.dq, dtype, shape(rows_q, heads, d), Role::kOutput);
      add(bwd_.dk, dtype, shape(rows_k, heads_kv, d), Role::kOutput);
      add(bwd_.dv, dtype, shape(rows_k, heads_kv, d_v), Role::kOutput);
    } else {
      add(fwd_.out, dtype, shape(rows_q, heads, d_v), Role::kOutput);
      add(fwd_.lse, DType::kFloat32, per_query(), Role::kOutput);
    }
    if (c_.chance(20)) {
      const DType type = c_.pick({DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kBool});
      add(a.bias, type, {c_.chance(50) ? batch : 1, c_.chance(50) ? heads : 1, c_.chance(50) ? seqlen_q : 1, seqlen_k},
          Role::kInput);
    }
    if (c_.chance(20)) add(a.alibi_slopes, DType::kFloat32, {heads}, Role::kInput);
    if (c_.chance(20)) a.softcap = 2;
    if (c_.chance(20)) {
      a.dropout_p = 0.3f;
      const DType type = c_.pick({DType::kInt64, DType::kUInt64});
      if (c_.chance(50))
        add(a.seed_tensor, type, {2}, Role::kInput);
      else if (c_.chance(50))
        add(a.seed_tensor, type, {batch, 2}, Role::kInput);
    }
    if (c_.chance(20)) a.softmax_scale = -1.f;
    build_mask(seqlen_q, seqlen_k);
  }

  std::int64_t lengths(TensorView& cu, std::int64_t batch, std::int64_t longest) {
    std::vector<int> values{0};
    for (std::int64_t b = 0; b < batch; ++b) values.push_back(values.back() + c_.between(0, static_cast<int>(longest)));
    ints(cu, values, {batch + 1});
    return values.back() + c_.between(0, 2);
  }

  void build_mask(std::int64_t seqlen_q, std::int64_t seqlen_k) {
    const int kind = c_.below(3);
    Band band = c_.chance(50) ? Causal() : SlidingWindow(c_.between(-10, 10), c_.between(-10, 10), Alignment::kTopLeft);
    if (kind == 1) args().mask = band;
    if (kind != 2) return;
    BlockMask mask;
    mask.block_q = 16 * c_.between(1, 2);
    mask.block_k = 16 * c_.between(1, 2);
    mask.band = band;
    args().mask = mask;
    auto& m = std::get<BlockMask>(args().mask);  // where it stays: mutations find its tensors by address
    const int rows = static_cast<int>((seqlen_q + m.block_q - 1) / m.block_q);
    const int cols = static_cast<int>((seqlen_k + m.block_k - 1) / m.block_k);
    std::vector<int> kinds(static_cast<std::size_t>(rows) * cols);
    for (int& k : kinds) k = c_.below(3);
    lists(m.row_full, kinds, rows, cols, cols, 1, 1);
    lists(m.row_partial, kinds, rows, cols, cols, 1, 2);
    lists(m.col_full, kinds, cols, rows, 1, cols, 1);
    lists(m.col_partial, kinds, cols, rows, 1, cols, 2);
  }
  void lists(BlockLists& out, const std::vector<int>& kinds, int lines, int others, int line_step, int other_step,
             int kind) {
    std::vector<int> offsets{0}, indices;
    for (int line = 0; line < lines; ++line) {
      for (int n = 0; n < others; ++n) {
        if (kinds[line * line_step + n * other_step] == kind) indices.push_back(n);
      }
      offsets.push_back(static_cast<int>(indices.size()));
    }
    ints(out.offsets, offsets, {1, 1, lines + 1});
    ints(out.indices, indices, {static_cast<std::int64_t>(indices.size())});
  }

  // ---- what may be wrong with it

  void spoil() {
    TensorView& t = *tensors_[c_.below(static_cast<int>(tensors_.size()))];
    // Of integer tensors the values are read while the call is checked: no extent between what is there and what is
    // refused, and no address but their own.
    const bool is_int = std::find(ints_.begin(), ints_.end(), &t) != ints_.end();
    const int d = c_.below(kMaxTensorRank);
    switch (c_.below(12)) {
      case 0:
        t.rank = c_.pick({-1, 0, 1, 2, 3, 4, 5, 6, 1000000, std::numeric_limits<int>::min()});
        break;
      case 1:
        t.shape[d] =
            is_int
                ? c_.pick({kMin64, std::int64_t{-1}, std::int64_t{0}, std::int64_t{3}, std::int64_t{1} << 33, kMax64})
                : c_.pick({kMin64, std::int64_t{-1}, std::int64_t{0}, std::int64_t{1}, std::int64_t{2}, std::int64_t{7},
                           std::int64_t{1} << 20, std::int64_t{1} << 30, (std::int64_t{1} << 30) + 1,
                           std::int64_t{1} << 31, std::int64_t{1} << 40, kMax64});
        break;
      case 2:
        t.stride[d] = c_.pick({kMin64, std::int64_t{-1000}, std::int64_t{-1}, std::int64_t{0}, std::int64_t{1},
                               std::int64_t{2}, std::int64_t{5}, std::int64_t{1} << 32, std::int64_t{1} << 60, kMax64});
        break;
      case 3:
        if (c_.chance(40) || t.data == nullptr)
          t.data = nullptr;
        else if (is_int || c_.chance(50))
          t.data = static_cast<char*>(t.data) + c_.between(1, 7);
        else
          t.data = reinterpret_cast<void*>(
              c_.pick({std::uintptr_t{1}, std::uintptr_t{64}, ~std::uintptr_t{63}, std::uintptr_t{1} << 47}));
        break;
      case 4:
        t.dtype = static_cast<DType>(c_.below(9));
        break;
      case 5:
        t.device = {static_cast<DeviceType>(c_.between(0, 3)), c_.between(-1, 1)};
        break;
      case 6:
        t = TensorView();
        break;
      case 7:
        if (!is_int) t.data = tensors_[c_.below(static_cast<int>(tensors_.size()))]->data;
        break;
      case 8:
        spoil_number();
        break;
      case 9:
        spoil_mask();
        break;
      default:
        spoil_ints();
    }
  }
  void spoil_number() {
    AttentionArgs& a = args();
    const float wrong = c_.pick({-1.f, 0.f, 1.f, 1e-30f, 3e38f, INFINITY, -INFINITY, NAN});
    switch (c_.below(6)) {
      case 0:
        a.softmax_scale = wrong;
        break;
      case 1:
        a.softcap = wrong;
        break;
      case 2:
        a.dropout_p = wrong;
        break;
      case 3:
        a.max_seqlen_q =
            c_.pick({kMin64, std::int64_t{-1}, std::int64_t{0}, std::int64_t{5}, std::int64_t{1} << 30, kMax64});
        break;
      case 4:
        a.max_seqlen_k =
            c_.pick({kMin64, std::int64_t{-1}, std::int64_t{0}, std::int64_t{5}, std::int64_t{1} << 30, kMax64});
        break;
      default:
        a.backend = c_.pick({"cpu", "sm80", "sm90", "CPU", "gpu"});
        break;
    }
  }
  void spoil_mask() {
    const std::int64_t limit = c_.pick({kMin64, kMax64, std::int64_t{0}, std::int64_t{-1}, std::int64_t{1} << 40});
    auto* blocks = std::get_if<BlockMask>(&args().mask);
    if (blocks == nullptr) {
      args().mask = SlidingWindow(limit, c_.chance(50) ? limit : 0);
      return;
    }
    switch (c_.below(5)) {
      case 0:
        blocks->block_q = c_.pick({0, -16, 8, 17, 64, 1 << 20, std::numeric_limits<int>::max()});
        break;
      case 1:
        blocks->block_k = c_.pick({0, -16, 8, 17, 64, 1 << 20, std::numeric_limits<int>::min()});
        break;
      case 2:
        blocks->band = SlidingWindow(limit, limit);
        break;
      case 3:
        blocks->seqlen_q = limit;
        break;
      default:
        blocks->band.reset();
    }
  }
  void spoil_ints() {
    if (ints_.empty()) return;
    const TensorView& t = *ints_[c_.below(static_cast<int>(ints_.size()))];
    if (t.rank <= 0 || t.rank > kMaxTensorRank || t.data == nullptr || !arena_.holds(t)) return;
    const int n = c_.below(4),
              value = c_.pick({std::numeric_limits<int>::min(), -1, 0, 1, 2, 3, 40, std::numeric_limits<int>::max()});
    std::memcpy(static_cast<char*>(t.data) + 4 * n, &value, 4);  // within the padding of every allocation
  }

  // ---- running it

  template <class F>
  static std::string error_of(F call) {
    try {
      call();
    } catch (const Error& e) {
      const std::string line = e.what();
      EXPECT_TRUE(line.find(": ") != std::string::npos && line.find("; ") != std::string::npos &&
                  line.find('\n') == std::string::npos)
          << line;
      return line;
    }
    return "";
  }

  // A layout that passes the check makes a call neither right nor wrong.
  void expect_the_same_checked(const std::string& refused) {
    const auto* mask = std::get_if<BlockMask>(&args().mask);
    if (mask == nullptr) return;
    std::optional<CheckedBlockMask> checked;
    if (!error_of([&] { checked.emplace(*mask); }).empty()) return;
    const auto with_checked = [&](auto call) {
      call.mask = *checked;
      return error_of([&] { workspace_size(call); });
    };
    EXPECT_EQ(backward_ ? with_checked(bwd_) : with_checked(fwd_), refused);
  }

  // Whether a kernel ran.
  bool launch(std::size_t size, bool refused) {
    static std::vector<unsigned char> memory(kMaxWorkspace + 256);
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    LaunchOptions options;
    options.workspace = {memory.data() + (256 - address % 256) % 256, size};
    std::vector<unsigned char> before = arena_.bytes();
    const bool as_packed = c_.chance(5) ? !packed_ : packed_;
    const std::string line = error_of([&] {
      if (backward_) {
        as_packed ? mha_varlen_bwd(bwd_, options) : mha_bwd(bwd_, options);
      } else {
        as_packed ? mha_varlen_fwd(fwd_, options) : mha_fwd(fwd_, options);
      }
    });
    EXPECT_TRUE(!refused || !line.empty()) << "workspace_size() refused what the call takes";
    if (line.empty()) {
      for (const TensorView* t : outputs_) {
        if (!t->given()) continue;
        for_each_index(*t, [&](const Index& index) {
          const char* element = address_of(*t, index);
          std::memcpy(before.data() + arena_.offset_of(element), element, size_of(t->dtype));
        });
      }
    }
    EXPECT_TRUE(before == arena_.bytes())
        << (line.empty() ? "wrote beside its outputs" : "wrote, then failed: " + line);
    return line.empty();
  }
  static const char* address_of(const TensorView& t, const Index& index) { return testing::address(t, index); }

  Arena& arena_;
  Choices& c_;
  bool backward_ = false, packed_ = false;
  ForwardArgs fwd_;
  BackwardArgs bwd_;
  std::vector<TensorView*> tensors_, ints_, outputs_;
};

void fuzz_one(const std::uint8_t* bytes, std::size_t size, Counts& counts) {
  static Arena arena;
  Choices choices(bytes, size);
  Call(arena, choices).run(counts);
}

}  // namespace

#if defined(FLASHSDK_LIBFUZZER)

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* bytes, std::size_t size) {
  Counts counts;
  fuzz_one(bytes, size, counts);
  if (::testing::Test::HasFailure()) std::abort();
  return 0;
}

#else

namespace {

std::uint64_t g_seed = 0;  // of the call at hand

#if defined(__SANITIZE_ADDRESS__)
void name_seed() {
  std::fprintf(stderr, "to repeat: FLASHSDK_FUZZ_SEED=%llu FLASHSDK_FUZZ_COUNT=1\n",
               static_cast<unsigned long long>(g_seed));
}
#endif

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

// 384 bytes from one number (SplitMix64).
void fill(std::uint64_t seed, std::array<std::uint64_t, 48>& words) {
  for (std::uint64_t& word : words) {
    std::uint64_t z = (seed += 0x9E3779B97F4A7C15u);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    word = z ^ (z >> 31);
  }
}

TEST(FuzzValidation, MillionRandomCalls) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_set_death_callback(name_seed);
#endif
  const int threads = get_num_threads();
  set_num_threads(1);
  const std::uint64_t first = from_environment("FLASHSDK_FUZZ_SEED", 1),
                      count = from_environment("FLASHSDK_FUZZ_COUNT", 1000000);
  std::array<std::uint64_t, 48> words;
  Counts counts;
  for (g_seed = first; g_seed < first + count; ++g_seed) {
    fill(g_seed * 1000003, words);
    fuzz_one(reinterpret_cast<const std::uint8_t*>(words.data()), sizeof words, counts);
    ASSERT_FALSE(HasFailure()) << "to repeat: FLASHSDK_FUZZ_SEED=" << g_seed << " FLASHSDK_FUZZ_COUNT=1";
  }
  set_num_threads(threads);
  std::printf("%llu refused, %llu accepted, %llu of them run\n", static_cast<unsigned long long>(counts.refused),
              static_cast<unsigned long long>(counts.accepted), static_cast<unsigned long long>(counts.launched));
  EXPECT_GE(counts.refused, count / 4) << "the calls are not bad enough";
  EXPECT_GE(counts.accepted, count / 4) << "the calls are too bad";
  EXPECT_GE(counts.launched, count / 100) << "too few of those accepted run";
}

}  // namespace

#endif

}  // namespace flashsdk::testing
