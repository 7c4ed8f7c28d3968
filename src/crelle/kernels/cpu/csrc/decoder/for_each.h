// Work of unequal items on the pool.
#pragma once

#include <atomic>

#include "base/pool.h"

namespace crelle::cpu {

// fn(i) for i in [0, count): threads take the next one as they come.
template <class F>
void for_each(int count, F &&fn) {
  std::atomic<int> next{0};
  Pool::get().run([&](int, int) {
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) fn(i);
  });
}

}  // namespace crelle::cpu
