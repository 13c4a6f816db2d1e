// How CPU kernels share work: threads claim numbered jobs in ascending order until none is left.
#pragma once

#include "common/kernel_entry.h"
#include "cpu/tiles.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <sched.h>

namespace flashsdk::cpu::FLASHSDK_ISA_NS {

// Below this many floating-point operations waking another thread costs more than it saves.
inline constexpr double kFlopsPerThread = 1e6;

FLASHSDK_HD ParallelRunner runner_for(const ParallelRunner& all, double flops) {
  ParallelRunner runner = all;
  double useful = flops / kFlopsPerThread;
  if (useful < runner.num_threads) runner.num_threads = useful < 1 ? 1 : static_cast<int>(useful);
  return runner;
}

// Products of both operands of every (query, key) pair; what a mask leaves out is not subtracted.
FLASHSDK_HD double forward_flops(const ForwardParams& p) {
  return 2.0 * p.batch * p.num_heads * p.seqlen_q * p.seqlen_k * (p.head_dim + p.head_dim_v);
}

// Calls fn(job, slot) for every job in [0, jobs), each once.
template <class F>
void for_each_job(const ParallelRunner& runner, std::int64_t jobs, F fn) {
  std::int64_t next = 0;
  auto work = [&](int slot) {
    take_tile_registers();
    for (;;) {
      std::int64_t job = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
      if (job >= jobs) break;
      fn(job, slot);
    }
    release_tile_registers();
  };
  runner(work);
}

// Returns when another thread has made ready() true.
template <class Ready>
void wait_until(Ready ready) {
  for (int spins = 0; !ready(); ++spins) {
    if (spins > 1000) {
      sched_yield();  // more threads than processors
      continue;
    }
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
}

// An integer quotient and remainder.
struct Split {
  int quotient, remainder;
  FLASHSDK_HD Split(std::int64_t x, int by) : quotient(static_cast<int>(x / by)), remainder(static_cast<int>(x % by)) {}
};

}  // namespace flashsdk::cpu::FLASHSDK_ISA_NS
