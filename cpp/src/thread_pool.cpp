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
      for (; workers_ < workers; ++workers_) {
        std::thread worker([this] { work(); });
        pthread_setname_np(worker.native_handle(), "flashsdk");
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

ThreadPool& pool() {
  static const bool created = [] {
    g_pool.store(new ThreadPool);
    // A child has none of its parent's threads, and locks in any state: it begins anew.
    pthread_atfork(nullptr, nullptr, [] { g_pool.store(new ThreadPool); });
    return true;
  }();
  static_cast<void>(created);
  return *g_pool.load(std::memory_order_acquire);
}

std::atomic<int>& thread_count() {
  static std::atomic<int> count{default_num_threads()};
  return count;
}

}  // namespace

int num_threads() { return thread_count().load(std::memory_order_relaxed); }
void set_pool_threads(int n) { thread_count().store(n, std::memory_order_relaxed); }

ParallelRunner parallel_runner(int num_threads) {
  return {num_threads, nullptr, [](void*, int threads, void (*fn)(void*, int), void* context) {
            threads > 1 ? pool().run(threads, fn, context) : fn(context, 0);
          }};
}

}  // namespace flashsdk
