// Copies to shared memory and barriers of some warps, for tests on a CPU: what was issued lands only when it is waited
// for. Stands in for ptx/copies.cuh.
#pragma once
#include "ptx/pipeline.cuh"

namespace crelle {

struct Copies {
  struct Copy {
    uint32 to;
    const void *from;
    int size = 16, bytes = 16;  // what is written, what of it is read
  };
  std::vector<Copy> open;
  std::vector<std::vector<Copy>> groups;
  size_t landed = 0;
};
inline std::vector<Copies> copies(Emulator::MOST);

inline void copy_16(uint32 to, const void *from) { copies[emulator.current].open.push_back({to, from}); }
template <int SIZE>
inline void copy_padded(uint32 to, const char *from, int bytes = SIZE) {
  if (to % SIZE || (bytes && reinterpret_cast<uintptr_t>(from) % SIZE))
    fprintf(stderr, "a copy is not aligned\n"), abort();
  copies[emulator.current].open.push_back({to, from, SIZE, bytes});
}
inline void copy_run(char *to, const char *from, int bytes, int lane) {
  for (int i = lane * 16; i < bytes; i += 512) copy_16(shared_address(to) + i, from + i);
}
inline void commit_copies() {
  Copies &mine = copies[emulator.current];
  mine.groups.push_back(mine.open), mine.open.clear();
}
template <int LEFT>
inline void wait_for_copies() {
  Copies &mine = copies[emulator.current];
  for (; mine.landed + LEFT < mine.groups.size(); mine.landed++)
    for (const Copies::Copy &c : mine.groups[mine.landed]) {
      memset(shared + c.to, 0, c.size);
      if (c.bytes) memcpy(shared + c.to, c.from, c.bytes);
    }
}
template <int THREADS, int IDS = 1>
inline void team_sync(int id) {
  static int all_arrived[Emulator::CLUSTER][16], all_generations[Emulator::CLUSTER][16];
  int *const arrived = all_arrived[block_rank()], *const generation = all_generations[block_rank()];
  const int before = generation[id];
  if (++arrived[id] == THREADS)
    arrived[id] = 0, generation[id]++;
  else
    while (generation[id] == before) yield();
}

}  // namespace crelle
