// Jobs of the thread pool that throw: the caller gets the error, no thread is left waiting, the next job runs.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <stdexcept>

#include "base/barrier.h"
#include "base/pool.h"

using namespace crelle::cpu;

static void require(bool holds, const char *what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

// Run `job`; whether it threw std::bad_alloc. Another error ends the program.
template <class F>
static bool out_of_memory(F &&job) {
  try {
    job();
  } catch (const std::bad_alloc &) {
    return true;
  }
  return false;
}

int main() {
  Pool &pool = Pool::get();
  for (int threads : {1, 2, 3, 12}) {
    pool.set_threads(threads);
    Barrier barrier;
    barrier.reset(threads);
    for (int round = 0; round < 40; ++round) {
      const int bad = round % threads;
      std::atomic<int> ended{0};
      require(out_of_memory([&] {
                pool.run([&](int t, int) {
                  if (t == bad) throw std::bad_alloc();
                  ++ended;
                });
              }),
              "the caller of independent parts gets the error");
      require(threads == 1 || ended == threads - 1, "the other parts are done");
      require(out_of_memory([&] {
                pool.run_team([&](int t, int n) {
                  try {
                    for (int step = 0; step < 5; ++step) {
                      if (t == bad && step == round % 5) throw std::bad_alloc();
                      barrier.arrive_and_wait(t, n);
                    }
                  } catch (...) {
                    barrier.abandon(t, n);
                    throw;
                  }
                });
              }),
              "the caller of a team gets the error, not that of a thread that waited");
      barrier.reset(threads);
      std::atomic<int> passed{0};
      pool.run_team([&](int t, int n) {
        for (int step = 0; step < 5; ++step) barrier.arrive_and_wait(t, n);
        ++passed;
      });
      require(passed == threads, "the next job runs");
    }
  }
  pool.set_threads(2);
  require(out_of_memory([&] { pool.run([](int, int) { throw std::bad_alloc(); }); }), "one of two errors is enough");
}
