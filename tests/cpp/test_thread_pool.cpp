// The threads behind CPU kernels: every slot once, all done on return, any number of callers, and across fork.
#include "thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <set>
#include <thread>
#include <vector>

#include "flashsdk/threads.h"

namespace flashsdk {
namespace {

// Jobs claimed one by one, as kernels do. Each is done exactly once, by a slot nobody else holds.
class Jobs {
 public:
  Jobs(int jobs, int slots) : done_(jobs), in_use_(slots) {}

  void run(int num_threads) {
    auto work = [this](int slot) {
      EXPECT_FALSE(in_use_.at(slot).exchange(true)) << "two threads in slot " << slot;
      for (;;) {
        const std::size_t job = next_.fetch_add(1);
        if (job >= done_.size()) break;
        done_[job].fetch_add(1);
      }
      in_use_.at(slot) = false;
    };
    parallel_runner(num_threads)(work);
    for (const auto& count : done_) EXPECT_EQ(count, 1);
    for (const auto& slot : in_use_) EXPECT_FALSE(slot) << "somebody is still at work";
  }

 private:
  std::atomic<std::size_t> next_{0};
  std::vector<std::atomic<int>> done_;
  std::vector<std::atomic<bool>> in_use_;
};

TEST(ThreadPool, EveryJobOnceForAnyNumberOfThreads) {
  for (int threads : {1, 2, 3, 4, 16, 2, 1}) {
    for (int jobs : {0, 1, 2, 100}) Jobs(jobs, threads).run(threads);
  }
}

TEST(ThreadPool, OneThreadIsTheCaller) {
  std::set<std::thread::id> seen;
  auto work = [&](int slot) {
    EXPECT_EQ(slot, 0);
    seen.insert(std::this_thread::get_id());
  };
  for (int round = 0; round < 10; ++round) parallel_runner(1)(work);
  EXPECT_EQ(seen, std::set<std::thread::id>{std::this_thread::get_id()});
}

TEST(ThreadPool, HelpersJoin) {
  std::atomic<int> arrived{0};
  auto work = [&](int) {
    ++arrived;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (arrived < 3 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  };
  parallel_runner(3)(work);
  EXPECT_EQ(arrived, 3);
}

TEST(ThreadPool, ResultsAreVisibleToTheCaller) {
  for (int round = 0; round < 300; ++round) {
    std::vector<int> written(8, 0);  // not atomic: a race shows in ThreadSanitizer
    std::atomic<std::size_t> next{0};
    auto work = [&](int) {
      for (std::size_t job; (job = next++) < written.size();) written[job] = round;
    };
    parallel_runner(4)(work);
    EXPECT_EQ(written, std::vector<int>(8, round));
  }
}

TEST(ThreadPool, ManyCallersAtOnce) {
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 6; ++caller) {
    callers.emplace_back([caller] {
      for (int round = 0; round < 100; ++round) Jobs(20, 1 + caller).run(1 + caller);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST(ThreadPool, ACallInsideACall) {
  std::atomic<int> inner_runs{0};
  auto outer = [&](int) {
    Jobs(10, 3).run(3);
    ++inner_runs;
  };
  for (int round = 0; round < 20; ++round) parallel_runner(3)(outer);
  EXPECT_GE(inner_runs, 20);
}

TEST(ThreadPool, NumberOfThreadsIsSettable) {
  EXPECT_GE(num_threads(), 1);
  set_pool_threads(5);
  EXPECT_EQ(num_threads(), 5);
  set_pool_threads(0);  // nobody's choice
}

// An executor of standard threads, or of the caller alone, that counts its calls.
struct CountingPool {
  std::atomic<int> calls{0};
  bool serial = false;

  Executor executor(int num_threads) {
    return {num_threads, this, [](void* pool, int threads, void (*fn)(void*, int), void* context) {
              auto& self = *static_cast<CountingPool*>(pool);
              ++self.calls;
              if (self.serial) return fn(context, 0);
              std::vector<std::thread> helpers;
              for (int slot = 1; slot < threads; ++slot) helpers.emplace_back(fn, context, slot);
              fn(context, 0);
              for (std::thread& helper : helpers) helper.join();
            }};
  }
};

TEST(ThreadPoolExecutor, RunsTheCallsOfItsThread) {
  CountingPool pool;
  const Executor executor = pool.executor(3);
  {
    const ExecutorScope scope(executor);
    EXPECT_EQ(num_threads(), 3);
    for (int jobs : {0, 1, 2, 100}) Jobs(jobs, 3).run(3);
    EXPECT_EQ(pool.calls, 4);
    Jobs(10, 1).run(1);  // the caller alone needs nobody
    EXPECT_EQ(pool.calls, 4);
    std::thread([] { Jobs(10, 3).run(3); }).join();  // another thread has its own
    EXPECT_EQ(pool.calls, 4);
  }
  Jobs(10, 3).run(3);
  EXPECT_EQ(pool.calls, 4);
}

TEST(ThreadPoolExecutor, OneSlotDoesAllTheWork) {
  CountingPool pool;
  pool.serial = true;
  const Executor executor = pool.executor(4);
  const ExecutorScope scope(executor);
  Jobs(100, 4).run(4);
  EXPECT_EQ(pool.calls, 1);
}

TEST(ThreadPoolExecutor, WhatIsChosenHolds) {
  CountingPool pool;
  const Executor executor = pool.executor(3);
  const ExecutorScope scope(executor);
  set_pool_threads(2);
  EXPECT_EQ(num_threads(), 2);
  Jobs(100, 2).run(num_threads());
  EXPECT_EQ(pool.calls, 1);
  set_pool_threads(5);  // more than the executor has
  EXPECT_EQ(num_threads(), 5);
  Jobs(100, 5).run(num_threads());
  EXPECT_EQ(pool.calls, 1);
  set_pool_threads(0);
  EXPECT_EQ(num_threads(), 3);
}

TEST(ThreadPoolExecutor, WithoutRunItIsANumberOfThreads) {
  const Executor executor{7};
  const ExecutorScope scope(executor);
  EXPECT_EQ(num_threads(), 7);
  Jobs(100, 7).run(7);
}

TEST(ThreadPoolExecutor, ScopesAreOneInsideTheOther) {
  CountingPool outer, inner;
  const Executor a = outer.executor(2), b = inner.executor(4);
  const ExecutorScope scope(a);
  {
    const ExecutorScope nested(b);
    Jobs(10, 4).run(num_threads());
  }
  Jobs(10, 2).run(num_threads());
  EXPECT_EQ(inner.calls, 1);
  EXPECT_EQ(outer.calls, 1);
}

#if defined(__SANITIZE_THREAD__)
constexpr bool kForks = false;  // ThreadSanitizer starts no threads in the child of a process that had some
#else
constexpr bool kForks = true;
#endif

TEST(ThreadPool, AForkedChildHasHelpersOfItsOwn) {
  if (!kForks) GTEST_SKIP() << "ThreadSanitizer does not follow forks";
  Jobs(100, 4).run(4);  // the parent's threads exist
  // Forking while another thread is inside the pool leaves its lock in any state.
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) Jobs(10, 4).run(4);
  });
  for (int round = 0; round < 20; ++round) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(60);  // a deadlock ends, too
      Jobs(100, 4).run(4);
      Jobs(100, 2).run(2);
      _exit(::testing::Test::HasFailure() ? 1 : 0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "child ended with status " << status;
  }
  stop = true;
  busy.join();
  Jobs(100, 4).run(4);  // the parent's are as they were
}

TEST(ThreadPoolExecutor, AForkedChildDoesWithout) {
  if (!kForks) GTEST_SKIP() << "ThreadSanitizer does not follow forks";
  CountingPool pool;
  const Executor executor = pool.executor(3);
  const ExecutorScope scope(executor);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    Jobs(100, 3).run(num_threads());
    _exit(::testing::Test::HasFailure() || pool.calls != 0 || num_threads() != 3 ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "child ended with status " << status;
  Jobs(100, 3).run(num_threads());
  EXPECT_EQ(pool.calls, 1);
}

}  // namespace
}  // namespace flashsdk
