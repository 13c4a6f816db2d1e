// Threads of CPU calls: how many, and whose.
#pragma once

#include "flashsdk/export.h"

namespace flashsdk {

// Threads a CPU call may use, the caller's included. Default: FLASHSDK_NUM_THREADS, else OMP_NUM_THREADS, else the
// processors this process may run on, at most its container's quota of them. Workspaces grow with it.
FLASHSDK_API void set_num_threads(int n);
FLASHSDK_API int get_num_threads();

// A program's own pool. Two pools in one process fight for its processors: threads of one still spin when the other
// begins to work.
struct Executor {
  int num_threads = 1;   // that a call may use, the caller's included, at least 1
  void* pool = nullptr;  // anything: handed to run
  // Calls fn(context, slot), for slot 0 and any others of [0, num_threads), each at most once, and returns when all of
  // these have returned. They may run at the same time or one after another: jobs are claimed by whoever comes, so that
  // slot 0 alone does all the work. Called by several threads at once, and inside of fn. nullptr: the library's pool.
  void (*run)(void* pool, int num_threads, void (*fn)(void* context, int slot), void* context) = nullptr;
};

// From now on CPU calls of the calling thread run on *executor, which must live that long; nullptr ends it. Returns
// what was there before. A number of threads that set_num_threads or FLASHSDK_NUM_THREADS gave holds nevertheless. The
// library's own pool does the work where that is more than the executor's, and in a forked child, which has none of its
// parent's threads.
FLASHSDK_API const Executor* use_executor(const Executor* executor) noexcept;

// use_executor while this object lives.
class ExecutorScope {
 public:
  explicit ExecutorScope(const Executor& executor) : before_(use_executor(&executor)) {}
  ~ExecutorScope() { use_executor(before_); }
  ExecutorScope(const ExecutorScope&) = delete;
  ExecutorScope& operator=(const ExecutorScope&) = delete;

 private:
  const Executor* before_;
};

}  // namespace flashsdk
