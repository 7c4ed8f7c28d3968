// A barrier for a step that waits 150 times: one cache line per thread, written by it alone.
//
// The usual barrier moves two lines per barrier, the counter and the flag. Here a thread says on its own line how often
// it has arrived and looks at the lines of the others: one way between two cores instead of two. That pays for the few
// threads of a small model; with more than kFew of them looking at all lines costs more, and a counter is used.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/pool.h"

namespace crelle::cpu {

class Barrier {
public:
  // For teams of `threads`; no thread may be waiting.
  void reset(int threads) {
    lines_ = std::vector<Line>(threads);
    counter_.reset();
    abandoned_ = false;
  }

  void arrive_and_wait(int thread, int threads) {
    if (threads == 1) return;
    if (threads > kFew) return counter_.arrive_and_wait(threads);
    std::atomic<uint32_t> &own = lines_[thread].arrivals;
    const uint32_t before = own.load(std::memory_order_relaxed);
    own.store(before + 1, std::memory_order_release);
    own.notify_all();
    for (int other = 0; other < threads; ++other)  // who is not where we were is where we are, or one further
      if (other != thread) wait_while(lines_[other].arrivals, before);
    if (abandoned_.load(std::memory_order_relaxed)) throw TeamFailed();
  }

  // By a thread that will not arrive any more: the others throw TeamFailed instead of waiting for it.
  void abandon(int thread, int threads) {
    if (threads == 1) return;
    if (threads > kFew) return counter_.abandon();
    abandoned_.store(true, std::memory_order_relaxed);
    lines_[thread].arrivals.store(kNever, std::memory_order_release);
    lines_[thread].arrivals.notify_all();
  }

private:
  static constexpr int kFew = 8;
  static constexpr uint32_t kNever = ~0u;  // no thread arrives as often
  struct alignas(64) Line {
    std::atomic<uint32_t> arrivals{0};
  };
  std::vector<Line> lines_;
  CounterBarrier counter_;
  std::atomic<bool> abandoned_{false};
};

}  // namespace crelle::cpu
