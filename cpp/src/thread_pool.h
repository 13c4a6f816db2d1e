// Threads that help CPU kernels. They start with the first call that needs them, and sleep between calls.
#pragma once

#include "common/kernel_entry.h"

namespace flashsdk {

// Threads a call of this thread may use from now on, the caller's included: those chosen, else its executor's, else the
// default.
int num_threads();
void set_pool_threads(int n);

// Runs a kernel's work on up to num_threads threads: the executor's, where this thread has one that does; else the
// caller and helpers that all concurrent calls share. One thread means no synchronisation at all. A forked child starts
// with helpers of its own.
ParallelRunner parallel_runner(int num_threads);

}  // namespace flashsdk
