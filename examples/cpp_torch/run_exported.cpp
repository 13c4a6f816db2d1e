// A model that Python has exported and compiled (export.py), run in a process without Python.
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <exception>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: run_exported attention.pt2\n");
    return 2;
  }
  try {
    torch::inductor::AOTIModelPackageLoader model(argv[1]);
    bool ok = true;
    for (int seqlen : {40, 97}) {
      const auto random = [&] { return at::randn({2, seqlen, 4, 32}); };
      const at::Tensor q = random(), k = random(), v = random();
      const at::Tensor out = model.run({q, k, v}).at(0);
      const auto heads_first = [](const at::Tensor& x) { return x.transpose(1, 2); };
      const at::Tensor want = 2 * at::scaled_dot_product_attention(heads_first(q), heads_first(k), heads_first(v), {},
                                                                   /*dropout_p=*/0., /*is_causal=*/true);
      const double error = (out - heads_first(want)).abs().max().item<double>();
      std::printf("%d rows: max error %.1e\n", seqlen, error);
      ok = ok && error < 1e-5;
    }
    std::puts(ok ? "ok" : "FAILED");
    return ok ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
