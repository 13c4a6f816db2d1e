// flashsdk in a C++ program: own buffers, a workspace, errors, and a check of itself at real model shapes.
#include <flashsdk/flashsdk.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace {

// bfloat16 is the upper half of a float32.
struct Bf16 {
  std::uint16_t bits = 0;
  Bf16() = default;
  explicit Bf16(float x) {
    std::uint32_t u;
    std::memcpy(&u, &x, 4);
    bits = static_cast<std::uint16_t>((u + 0x7FFF + ((u >> 16) & 1)) >> 16);  // nearest, ties to even
  }
  explicit operator float() const {
    const std::uint32_t u = std::uint32_t{bits} << 16;
    float x;
    std::memcpy(&x, &u, 4);
    return x;
  }
};
template <class T>
constexpr flashsdk::DType kDType = sizeof(T) == 4 ? flashsdk::DType::kFloat32 : flashsdk::DType::kBFloat16;

// One layer's attention. Row-major tensors (batch = 1, seqlen, heads, head_dim); any strides would do.
template <class T>
struct Layer {
  int seqlen, num_heads, num_heads_kv, head_dim;
  std::vector<T> q, k, v, out, dout, dq, dk, dv;
  std::vector<float> lse;  // (1, num_heads, seqlen)

  Layer(int seqlen_, int num_heads_, int num_heads_kv_, int head_dim_)
      : seqlen(seqlen_), num_heads(num_heads_), num_heads_kv(num_heads_kv_), head_dim(head_dim_) {
    const std::size_t row = static_cast<std::size_t>(seqlen) * head_dim;
    for (auto* t : {&q, &out, &dout, &dq}) t->resize(row * num_heads);
    for (auto* t : {&k, &v, &dk, &dv}) t->resize(row * num_heads_kv);
    lse.resize(static_cast<std::size_t>(seqlen) * num_heads);
    std::mt19937 rng(0);
    std::normal_distribution<float> normal;
    for (auto* t : {&q, &k, &v, &dout}) {
      for (T& x : *t) x = T(normal(rng));
    }
  }
  flashsdk::TensorView queries(std::vector<T>& t) { return {t.data(), kDType<T>, {1, seqlen, num_heads, head_dim}}; }
  flashsdk::TensorView keys(std::vector<T>& t) { return {t.data(), kDType<T>, {1, seqlen, num_heads_kv, head_dim}}; }
  flashsdk::TensorView rows(std::vector<float>& t) {
    return {t.data(), flashsdk::DType::kFloat32, {1, num_heads, seqlen}};
  }
  float at(const std::vector<T>& t, int row, int head, int c) const {
    const int heads = t.size() == q.size() ? num_heads : num_heads_kv;
    return static_cast<float>(t[(static_cast<std::size_t>(row) * heads + head) * head_dim + c]);
  }
};

// Scratch memory that grows to what the largest call needs; the library allocates nothing.
class Scratch {
 public:
  flashsdk::LaunchOptions options(std::size_t bytes) {
    if (bytes > size_) {
      memory_.reset(std::aligned_alloc(256, (bytes + 255) / 256 * 256));
      size_ = bytes;
    }
    flashsdk::LaunchOptions options;
    options.workspace = {memory_.get(), size_};
    return options;
  }
  std::size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<void, Free> memory_;
  std::size_t size_ = 0;
};

template <class F>
double milliseconds(F call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

template <class T>
void attend(Layer<T>& layer, const flashsdk::Mask& mask, Scratch& scratch) {
  flashsdk::ForwardArgs forward;
  forward.q = layer.queries(layer.q);
  forward.k = layer.keys(layer.k);
  forward.v = layer.keys(layer.v);
  forward.out = layer.queries(layer.out);
  forward.lse = layer.rows(layer.lse);
  forward.mask = mask;
  const flashsdk::Plan forward_plan = flashsdk::plan(forward);
  const auto forward_options = scratch.options(forward_plan.workspace_size());
  const double forward_ms = milliseconds([&] { forward_plan.launch(forward_options); });

  flashsdk::BackwardArgs backward;
  static_cast<flashsdk::AttentionArgs&>(backward) = forward;  // what both have in common
  backward.out = forward.out;
  backward.lse = forward.lse;
  backward.dout = layer.queries(layer.dout);
  backward.dq = layer.queries(layer.dq);
  backward.dk = layer.keys(layer.dk);
  backward.dv = layer.keys(layer.dv);
  const flashsdk::Plan backward_plan = flashsdk::plan(backward);
  const auto backward_options = scratch.options(backward_plan.workspace_size());
  const double backward_ms = milliseconds([&] { backward_plan.launch(backward_options); });
  std::printf("  %s: forward %.1f ms, backward %.1f ms, workspace %.1f MiB\n",
              flashsdk::explain(forward).kernel.c_str(), forward_ms, backward_ms,
              static_cast<double>(scratch.size()) / (1 << 20));
}

// Largest error against a double-precision loop, over all that belongs to one key-value head under a causal mask.
template <class T>
double largest_error(const Layer<T>& layer, int head_kv) {
  const int n = layer.seqlen, d = layer.head_dim, group = layer.num_heads / layer.num_heads_kv;
  const double scale = 1 / std::sqrt(static_cast<double>(d));
  double error = 0;
  auto note = [&](double ours, double expected) {
    const double e = std::fabs(ours - expected);
    if (std::isnan(e) || e > error) error = e;  // NaN stays
  };
  auto matrix = [d](const Layer<T>& l, const std::vector<T>& t, int head) {
    std::vector<double> m;
    for (int i = 0; i < l.seqlen; ++i) {
      for (int c = 0; c < d; ++c) m.push_back(l.at(t, i, head, c));
    }
    return m;
  };
  auto dot = [d](const double* a, const double* b) {
    double sum = 0;
    for (int c = 0; c < d; ++c) sum += a[c] * b[c];
    return sum;
  };

  const std::vector<double> k = matrix(layer, layer.k, head_kv), v = matrix(layer, layer.v, head_kv);
  std::vector<double> dk(k.size()), dv(v.size()), p(n), dp(n), out(d), dq(d);
  for (int head = head_kv * group; head < (head_kv + 1) * group; ++head) {
    const std::vector<double> q = matrix(layer, layer.q, head), dout = matrix(layer, layer.dout, head);
    for (int i = 0; i < n; ++i) {
      const double *qi = &q[i * d], *doi = &dout[i * d];
      double highest = -INFINITY, sum = 0, delta = 0;
      for (int j = 0; j <= i; ++j) highest = std::max(highest, p[j] = scale * dot(qi, &k[j * d]));
      for (int j = 0; j <= i; ++j) sum += p[j] = std::exp(p[j] - highest);
      std::fill(out.begin(), out.end(), 0);
      std::fill(dq.begin(), dq.end(), 0);
      for (int j = 0; j <= i; ++j) {
        p[j] /= sum;
        delta += p[j] * (dp[j] = dot(doi, &v[j * d]));
      }
      for (int j = 0; j <= i; ++j) {
        const double ds = p[j] * (dp[j] - delta) * scale;
        for (int c = 0; c < d; ++c) {
          out[c] += p[j] * v[j * d + c];
          dq[c] += ds * k[j * d + c];
          dk[j * d + c] += ds * qi[c];
          dv[j * d + c] += p[j] * doi[c];
        }
      }
      for (int c = 0; c < d; ++c) {
        note(layer.at(layer.out, i, head, c), out[c]);
        note(layer.at(layer.dq, i, head, c), dq[c]);
      }
      note(layer.lse[static_cast<std::size_t>(head) * n + i], highest + std::log(sum));
    }
  }
  for (int j = 0; j < n; ++j) {
    for (int c = 0; c < d; ++c) {
      note(layer.at(layer.dk, j, head_kv, c), dk[j * d + c]);
      note(layer.at(layer.dv, j, head_kv, c), dv[j * d + c]);
    }
  }
  return error;
}

template <class T>
bool check(const char* name, Layer<T> layer, double bound, Scratch& scratch) {
  std::printf("%s: %d queries, %d/%d heads of %d, %s, causal\n", name, layer.seqlen, layer.num_heads,
              layer.num_heads_kv, layer.head_dim, flashsdk::to_string(kDType<T>));
  attend(layer, flashsdk::Causal(), scratch);
  const double error = largest_error(layer, layer.num_heads_kv - 1);
  std::printf("  largest error of out, lse, dq, dk, dv: %.1e  %s\n", error, error < bound ? "ok" : "WRONG");
  return error < bound;
}

// A wrong call is an exception with a code and a line for the user; nothing has been written then.
bool check_error() {
  Layer<float> layer(16, 4, 2, 64);
  flashsdk::ForwardArgs args;
  args.q = layer.queries(layer.q);
  args.k = args.v = layer.keys(layer.k);
  args.out = layer.queries(layer.out);
  args.lse = layer.rows(layer.lse);
  args.dropout_p = 1.5f;
  try {
    flashsdk::mha_fwd(args);
  } catch (const flashsdk::Error& e) {
    std::printf("a wrong call: %s: %s\n", flashsdk::to_string(e.code()), e.what());
    return e.code() == flashsdk::ErrorCode::kInvalidArgument;
  }
  return false;
}

}  // namespace

int main() {
  try {
    const flashsdk::BuildInfo info = flashsdk::build_info();
    std::printf("flashsdk %s, %s, %d threads\n", info.version.c_str(), info.cpu_isa.c_str(),
                flashsdk::get_num_threads());
    Scratch scratch;
    bool good = check<float>("GPT-2 small", {1024, 12, 12, 64}, 5e-5, scratch);
    good &= check<Bf16>("GPT-2 small", {1024, 12, 12, 64}, 5e-2, scratch);
    good &= check<Bf16>("Llama-3-8B", {512, 32, 8, 128}, 5e-2, scratch);
    good &= check_error();
    std::puts(good ? "all good" : "FAILED");
    return good ? 0 : 1;
  } catch (const flashsdk::Error& e) {
    std::fprintf(stderr, "%s: %s\n", flashsdk::to_string(e.code()), e.what());
    return 1;
  }
}
