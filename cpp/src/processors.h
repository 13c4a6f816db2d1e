// How many processors this process should keep busy.
#pragma once

#include <sched.h>

namespace flashsdk {

inline constexpr int kMaxThreads = 4096;

// FLASHSDK_NUM_THREADS; 0 where it is not set.
int chosen_num_threads();

// Without it: OMP_NUM_THREADS, else the processors that the scheduler and the container's quota give. At least 1.
int default_num_threads();

// The processors this process was given: those the calling thread may run on, and, where OpenMP pins its threads of
// which this may be one, those of all its places. False where the system has more than the set holds.
bool processors_given(cpu_set_t& set);

}  // namespace flashsdk
