// A thread pool for work of 10 to 1000 microseconds: the caller is worker 0, the split is static.
//
// A worker that waits looks at the counter for a few microseconds and then sleeps in the kernel (futex), so that an
// idle Crelle costs nothing and a neighbour on the same cores is not starved. Where the cores are busy with something
// else, a worker may wake late: whoever is done first takes the parts that no thread has begun, so that more threads
// are never much slower than one. Results do not depend on who computes a part, nor on the number of threads: a part is
// whole output rows, each computed in one fixed order.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace crelle::cpu {

// Part `i` of `n` of the range [0, count).
inline int part(int count, int i, int n) { return static_cast<int>(int64_t{count} * i / n); }

// Wait until `value` is no longer `old`: a short look, then sleep.
void wait_while(const std::atomic<uint32_t> &value, uint32_t old);

// Thrown by a barrier in the threads of a team of which another thread has failed.
struct TeamFailed : std::exception {
  const char *what() const noexcept override { return "another thread of the team failed"; }
};

// All threads of a team meet here; for steps inside one parallel region.
class CounterBarrier {
public:
  void arrive_and_wait(int threads);
  void abandon();  // by a thread that will not arrive: all others throw TeamFailed instead of waiting for it
  void reset() { arrived_ = 0, abandoned_ = false; }

private:
  std::atomic<uint32_t> arrived_{0}, phase_{0};
  std::atomic<bool> abandoned_{false};
};

class Pool {
public:
  static Pool &get();

  int threads() const { return threads_.load(std::memory_order_relaxed); }
  void set_threads(int n);  // 0: as many as the affinity mask allows

  // Call fn(thread, threads) once per thread; parts must be independent of each other. When another caller holds the
  // pool, this one does all parts itself, one after the other. What a part throws in any thread is thrown here when
  // no part runs any more; the first error if there are several.
  template <class F>
  void run(F &&fn) {
    std::unique_lock lock(mutex_, std::try_to_lock);
    const int n = threads();
    if (n == 1 || !lock.owns_lock()) {
      for (int t = 0; t < n; ++t) fn(t, n);
      return;
    }
    start([](void *f, int t, int n) { (*static_cast<std::remove_reference_t<F> *>(f))(t, n); }, &fn, true);
  }

  // The same for work whose threads wait for one another (CounterBarrier): waits for its turn, always really parallel.
  // Before fn throws, it must abandon the barriers that other threads may be waiting at.
  template <class F>
  void run_team(F &&fn) {
    std::unique_lock lock(mutex_);
    if (threads() == 1)
      fn(0, 1);
    else
      start([](void *f, int t, int n) { (*static_cast<std::remove_reference_t<F> *>(f))(t, n); }, &fn, false);
  }

private:
  using Job = void (*)(void *, int, int);
  Pool();
  void start(Job job, void *arg, bool independent);  // mutex held
  bool claim(int part, uint32_t epoch);
  void take_parts(int thread, uint32_t epoch);
  void work(int thread, uint32_t seen);
  void stop();
  void spawn();

  std::mutex mutex_;
  std::atomic<int> threads_{1};  // changed under the mutex; read by who only wants to know, without
  std::vector<std::thread> workers_;
  Job job_ = nullptr;
  void *arg_ = nullptr;
  std::unique_ptr<std::atomic<uint32_t>[]> claimed_;  // per part: the epoch in which it was last begun
  std::atomic<bool> independent_{true}, caller_works_{false};
  std::atomic<int> caller_core_{-1};
  std::atomic<bool> quit_{false};
  std::atomic<bool> failed_{false};  // a part of this epoch has thrown `error_`
  std::exception_ptr error_;
  alignas(64) std::atomic<uint32_t> epoch_{0};
  alignas(64) std::atomic<uint32_t> left_{0};  // parts not finished
};

}  // namespace crelle::cpu
