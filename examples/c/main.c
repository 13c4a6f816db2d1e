// Causal attention in C, forward and backward on a CPU, held against a plain loop.
#include <flashsdk/c_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 37, HEADS = 2, DIM = 16, SIZE = ROWS * HEADS * DIM };

static float q[SIZE], k[SIZE], v[SIZE], out[SIZE], lse[HEADS * ROWS], dout[SIZE], dq[SIZE], dk[SIZE], dv[SIZE];

// Checks a call, lends it a workspace and launches it.
static void run(flashsdk_status (*make)(const flashsdk_attention_args*, flashsdk_plan**),
                const flashsdk_attention_args* args) {
  flashsdk_plan* plan = NULL;
  flashsdk_status status = make(args, &plan);
  if (status == FLASHSDK_OK) {
    const size_t size = flashsdk_plan_workspace_size(plan);
    char* memory = malloc(size + 256);
    status = flashsdk_plan_launch(plan, memory + (256 - (uintptr_t)memory % 256), size, NULL);
    free(memory);
  }
  flashsdk_plan_destroy(plan);
  if (status == FLASHSDK_OK) return;
  fprintf(stderr, "%s: %s\n", flashsdk_status_name(status), flashsdk_last_error());
  exit(1);
}

static double dot(const float* a, const float* b) {
  double sum = 0;
  for (int c = 0; c < DIM; ++c) sum += (double)a[c] * b[c];
  return sum;
}

static double largest_difference(const float* ours, const double* expected) {
  double largest = 0;
  for (int n = 0; n < SIZE; ++n) {
    const double difference = fabs(ours[n] - expected[n]);
    if (!(difference <= largest)) largest = difference;  // NaN, too
  }
  return largest;
}

static double error_of_all(void) {
  static double o[SIZE], gq[SIZE], gk[SIZE], gv[SIZE];
  const double scale = 1 / sqrt(DIM);
  for (int h = 0; h < HEADS; ++h)
    for (int i = 0; i < ROWS; ++i) {
      const int at = (i * HEADS + h) * DIM;
      double p[ROWS], dp[ROWS], sum = 0, delta = 0;
      for (int j = 0; j <= i; ++j) sum += p[j] = exp(scale * dot(q + at, k + (j * HEADS + h) * DIM));
      for (int j = 0; j <= i; ++j) delta += (p[j] /= sum) * (dp[j] = dot(dout + at, v + (j * HEADS + h) * DIM));
      for (int j = 0; j <= i; ++j)
        for (int c = 0; c < DIM; ++c) {
          const int key = (j * HEADS + h) * DIM + c;
          const double ds = p[j] * (dp[j] - delta) * scale;
          o[at + c] += p[j] * v[key];
          gq[at + c] += ds * k[key];
          gk[key] += ds * q[at + c];
          gv[key] += p[j] * dout[at + c];
        }
    }
  return fmax(fmax(largest_difference(out, o), largest_difference(dq, gq)),
              fmax(largest_difference(dk, gk), largest_difference(dv, gv)));
}

int main(void) {
  int64_t shape[4] = {1, ROWS, HEADS, DIM}, lse_shape[3] = {1, HEADS, ROWS};
  const flashsdk_tensor like = {NULL, {FLASHSDK_CPU, 0}, 4, {FLASHSDK_FLOAT, 32, 1}, shape, NULL, 0};
  float* data[9] = {q, k, v, out, dout, dq, dk, dv, lse};
  flashsdk_tensor t[9];
  for (int n = 0; n < 9; ++n) t[n] = like, t[n].data = data[n];
  t[8].ndim = 3;
  t[8].shape = lse_shape;
  for (int n = 0; n < SIZE; ++n) {
    q[n] = sinf(1.f + n), k[n] = sinf(2.f + 3 * n), v[n] = sinf(3.f + 5 * n), dout[n] = sinf(4.f + 7 * n);
  }

  const flashsdk_band causal = {sizeof causal, FLASHSDK_UNLIMITED, 0, FLASHSDK_BOTTOM_RIGHT, 0};
  flashsdk_attention_args args = {0};
  args.struct_size = sizeof args;
  args.q = &t[0], args.k = &t[1], args.v = &t[2], args.out = &t[3], args.lse = &t[8];
  args.dout = &t[4], args.dq = &t[5], args.dk = &t[6], args.dv = &t[7];
  args.band = &causal;
  run(flashsdk_plan_forward, &args);
  run(flashsdk_plan_backward, &args);

  const double error = error_of_all();
  printf("flashsdk %s: largest error of out, dq, dk, dv %.1e\n", flashsdk_version(), error);
  args.q = NULL;  // a wrong call is a status and a line
  flashsdk_plan* plan = NULL;
  if (flashsdk_plan_forward(&args, &plan) == FLASHSDK_OK || strncmp(flashsdk_last_error(), "q: ", 3) != 0) return 1;
  return error < 1e-5 ? 0 : 1;
}
