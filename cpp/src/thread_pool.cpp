#include "thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "flashsdk/threads.h"
#include "processors.h"

namespace flashsdk {
namespace {

// Waking a sleeping thread costs about this much, so waiting that long for the next call at most doubles the cost.
constexpr std::chrono::microseconds kSpin{20};

// Returns true as soon as `done` does, false after kSpin.
template <class Done>
bool spin_until(Done done) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      if (done()) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      __asm__ __volatile__("yield");
#endif
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

class ThreadPool {
 public:
  void run(int num_threads, void (*fn)(void*, int), void* context) {
    Task task{fn, context, num_threads};
    int helpers;
    {
      std::lock_guard lock(mutex_);
      ++busy_;
      limit_ = std::max(limit_, num_threads);
      grow(num_threads - 1);
      push(task);
      helpers = std::min(num_threads - 1, limit_ - busy_);
    }
    wake(helpers);

    fn(context, 0);

    // Nothing is left to start: late helpers are not waited for, only those at work.
    bool others_wait;
    {
      std::unique_lock lock(mutex_);
      remove(task);
      if (task.running > 0) {
        lock.unlock();
        spin_until([&task] { return task.running.load(std::memory_order_acquire) == 0; });
        lock.lock();  // also when the spin ended well: the last helper may still hold the task
        task.done.wait(lock, [&task] { return task.running == 0; });
      }
      --busy_;
      if (busy_ == 0) limit_ = 0;
      others_wait = first_ != nullptr && busy_ < limit_;
    }
    if (others_wait) wake(1);  // a concurrent call had to do without this thread's processor
  }

 private:
  // One call, on its caller's stack while the caller is in run(). Guarded by mutex_.
  struct Task {
    void (*fn)(void*, int);
    void* context;
    int num_slots;
    int next_slot = 1;  // 0 is the caller's
    std::atomic<int> running{0};
    std::condition_variable done{};
    Task* next = nullptr;
  };

  void push(Task& task) {
    Task** end = &first_;
    while (*end != nullptr) end = &(*end)->next;
    *end = &task;
    waiting_tasks_.fetch_add(1, std::memory_order_release);
  }
  void remove(Task& task) {
    Task** link = &first_;
    while (*link != &task) link = &(*link)->next;
    *link = task.next;
    waiting_tasks_.fetch_sub(1, std::memory_order_release);
  }

  // A task a helper may join: there is a slot left, and a processor that no other call is using.
  Task* joinable() const {
    if (busy_ >= limit_) return nullptr;
    for (Task* task = first_; task != nullptr; task = task->next)
      if (task->next_slot < task->num_slots) return task;
    return nullptr;
  }

  void grow(int workers) {
    if (workers_ >= workers) return;
    // Signals are for the application's own threads; a new thread inherits the mask.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      cpu_set_t given;
      const bool known = processors_given(given);
      for (; workers_ < workers; ++workers_) {
        std::thread worker([this] { work(); });
        pthread_setname_np(worker.native_handle(), "flashsdk");
        // A new thread inherits its maker's processors, which OpenMP may have pinned to one.
        if (known) pthread_setaffinity_np(worker.native_handle(), sizeof given, &given);
        worker.detach();
      }
    } catch (const std::exception&) {
      // The machine gives no more threads, or no memory for one: those there are do the work.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void wake(int helpers) {
    if (helpers == 1) {
      work_.notify_one();
    } else if (helpers > 1) {
      work_.notify_all();
    }
  }

  [[noreturn]] void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      Task* task = joinable();
      if (task == nullptr) {
        lock.unlock();
        const bool more = spin_until([this] { return waiting_tasks_.load(std::memory_order_acquire) > 0; });
        lock.lock();
        if (!more || joinable() == nullptr) work_.wait(lock, [this] { return joinable() != nullptr; });
        continue;
      }
      const int slot = task->next_slot++;
      ++task->running;
      ++busy_;
      lock.unlock();
      task->fn(task->context, slot);
      lock.lock();
      --busy_;
      task->next_slot = task->num_slots;                  // it came back, so there is no work left to join for
      if (--task->running == 0) task->done.notify_one();  // under the lock: the task lives until it is released
    }
  }

  std::mutex mutex_;
  std::condition_variable work_;
  std::atomic<int> waiting_tasks_{0};
  Task* first_ = nullptr;
  int workers_ = 0;
  int busy_ = 0;   // threads inside a kernel
  int limit_ = 0;  // how many should be, at most: the largest num_threads of the calls at hand
};

// Never destroyed: at exit, threads may still be at work.
std::atomic<ThreadPool*> g_pool{nullptr};
std::atomic<bool> g_forked{false};

// A child has none of its parent's threads, and locks in any state: it begins anew. Watched from the library's loading
// on, as the threads may be those of an executor.
[[maybe_unused]] const int g_at_fork = pthread_atfork(nullptr, nullptr, [] {
  g_forked.store(true);
  if (g_pool.load() != nullptr) g_pool.store(new ThreadPool);
});

ThreadPool& pool() {
  static const bool created = [] {
    g_pool.store(new ThreadPool);
    return true;
  }();
  static_cast<void>(created);
  return *g_pool.load(std::memory_order_acquire);
}

// By set_num_threads or FLASHSDK_NUM_THREADS; 0: by nobody.
std::atomic<int>& chosen() {
  static std::atomic<int> count{chosen_num_threads()};
  return count;
}

thread_local const Executor* t_executor = nullptr;

}  // namespace

const Executor* use_executor(const Executor* executor) noexcept { return std::exchange(t_executor, executor); }

int num_threads() {
  if (const int n = chosen().load(std::memory_order_relaxed)) return n;
  if (t_executor != nullptr) return std::clamp(t_executor->num_threads, 1, kMaxThreads);
  static const int n = default_num_threads();
  return n;
}
void set_pool_threads(int n) { chosen().store(n, std::memory_order_relaxed); }

ParallelRunner parallel_runner(int num_threads) {
  const Executor* executor = t_executor;
  if (executor != nullptr && (executor->run == nullptr || num_threads > executor->num_threads || g_forked.load()))
    executor = nullptr;
  return {num_threads, const_cast<Executor*>(executor),
          [](void* given, int threads, void (*fn)(void*, int), void* context) {
            if (threads <= 1) return fn(context, 0);
            const auto* on = static_cast<const Executor*>(given);
            on != nullptr ? on->run(on->pool, threads, fn, context) : pool().run(threads, fn, context);
          }};
}

}  // namespace flashsdk
