#include "base/pool.h"

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace crelle::cpu {
namespace {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// A pause takes about 40 to 140 cycles on current cores: the look lasts 10 to 20 microseconds, less than waking a
// sleeping thread does.
constexpr int kLooks = 400;

#if defined(__linux__)

int allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1u, std::thread::hardware_concurrency());
}

int current_core() { return sched_getcpu(); }

// A worker that wakes on the caller's core would wait for the caller, who waits for it: two threads take turns on one
// core, never both ready for long enough that the system would move one. So the worker moves itself.
void leave_core(int cpu) {
  if (current_core() != cpu) return;
  cpu_set_t all, others;
  if (sched_getaffinity(0, sizeof all, &all) != 0 || CPU_COUNT(&all) < 2) return;
  others = all;
  CPU_CLR(cpu, &others);
  if (sched_setaffinity(0, sizeof others, &others) == 0) sched_setaffinity(0, sizeof all, &all);
}

#else  // no affinity masks: the system alone places threads

int allowed_cpus() { return std::max(1u, std::thread::hardware_concurrency()); }
int current_core() { return -1; }
void leave_core(int) {}

#endif

}  // namespace

void wait_while(const std::atomic<uint32_t> &value, uint32_t old) {
  for (int i = 0; i < kLooks; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    relax();
  }
  while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
}

void CounterBarrier::arrive_and_wait(int threads) {
  const uint32_t phase = phase_.load(std::memory_order_acquire);
  if (abandoned_.load(std::memory_order_relaxed)) throw TeamFailed();  // after reading the phase: see abandon
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(threads)) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    phase_.notify_all();
  } else {
    wait_while(phase_, phase);
  }
  if (abandoned_.load(std::memory_order_relaxed)) throw TeamFailed();
}

// A thread that has read a phase before the last one here is woken by it; one that has read the last knows of it.
void CounterBarrier::abandon() {
  abandoned_.store(true, std::memory_order_relaxed);
  phase_.fetch_add(1, std::memory_order_release);
  phase_.notify_all();
}

Pool &Pool::get() {
  // Never destroyed: threads of an exiting process may still be asleep in it. A forked child has no workers, so it
  // starts with a pool of its own.
  static std::atomic<Pool *> pool{new Pool};
  static const int registered = pthread_atfork(nullptr, nullptr, [] { pool.store(new Pool); });
  (void)registered;
  return *pool.load(std::memory_order_acquire);
}

Pool::Pool() : threads_(allowed_cpus()) {}

void Pool::set_threads(int n) {
  std::lock_guard lock(mutex_);
  n = n > 0 ? n : allowed_cpus();
  if (n == threads()) return;
  stop();
  threads_ = n;
}

void Pool::spawn() {
  const int n = threads();
  claimed_ = std::make_unique<std::atomic<uint32_t>[]>(n);
  const uint32_t now = epoch_.load();
  for (int p = 0; p < n; ++p) claimed_[p].store(now);
  try {
    for (int t = 1; t < n; ++t) workers_.emplace_back([this, t, now] { work(t, now); });
  } catch (const std::system_error &e) {
    stop();
    threads_ = 1;
    throw std::runtime_error("the system does not give " + std::to_string(n) + " threads: " + e.what());
  }
}

void Pool::stop() {
  quit_.store(true);
  epoch_.fetch_add(1);
  epoch_.notify_all();
  for (auto &w : workers_) w.join();
  workers_.clear();
  quit_.store(false);
}

// A part can be begun once per epoch. A worker that wakes late, in a later epoch, finds its own epoch's parts taken;
// a part that it does get keeps the epoch, and with it the job, from ending before the part is finished.
bool Pool::claim(int part, uint32_t epoch) {
  uint32_t last = claimed_[part].load(std::memory_order_relaxed);
  return static_cast<int32_t>(epoch - last) > 0 &&
         claimed_[part].compare_exchange_strong(last, epoch, std::memory_order_acq_rel);
}

// A thread's own part first: its rows may still be in its cache.
void Pool::take_parts(int thread, uint32_t epoch) {
  const int n = threads(), parts = independent_.load(std::memory_order_relaxed) ? n : 1;
  for (int i = 0; i < parts; ++i) {
    const int p = (thread + i) % n;
    if (!claim(p, epoch)) continue;
    try {
      job_(arg_, p, n);
    } catch (const TeamFailed &) {  // the thread that failed has its own error, or will have
    } catch (...) {
      if (!failed_.exchange(true, std::memory_order_acq_rel)) error_ = std::current_exception();
    }
    if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) left_.notify_one();
  }
}

void Pool::start(Job job, void *arg, bool independent) {
  if (workers_.empty()) spawn();
  job_ = job;
  arg_ = arg;
  independent_.store(independent, std::memory_order_relaxed);
  caller_core_.store(current_core(), std::memory_order_relaxed);
  caller_works_.store(true, std::memory_order_relaxed);
  left_.store(threads(), std::memory_order_relaxed);
  const uint32_t epoch = epoch_.fetch_add(1, std::memory_order_release) + 1;
  epoch_.notify_all();
  take_parts(0, epoch);
  caller_works_.store(false, std::memory_order_relaxed);
  for (uint32_t left; (left = left_.load(std::memory_order_acquire)) != 0;) wait_while(left_, left);
  if (failed_.exchange(false, std::memory_order_relaxed)) std::rethrow_exception(std::exchange(error_, nullptr));
}

void Pool::work(int thread, uint32_t seen) {
  for (;;) {
    wait_while(epoch_, seen);
    seen = epoch_.load(std::memory_order_acquire);
    if (quit_.load()) return;
    if (caller_works_.load(std::memory_order_relaxed)) leave_core(caller_core_.load(std::memory_order_relaxed));
    take_parts(thread, seen);
  }
}

}  // namespace crelle::cpu
