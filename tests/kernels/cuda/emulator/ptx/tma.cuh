// Mbarriers, bulk and tensor copies, and the order of wgmma groups, for tests on a CPU: what was issued lands only when
// its barrier is waited for. Stands in for ptx/tma.cuh.
#pragma once
#include "ptx/dsmem.cuh"
#include "ptx/pipeline.cuh"

namespace crelle {

// In place of a CUtensorMap: bytes [rows, columns], and the rows of a box; columns of a box: 128, swizzled.
struct alignas(64) TensorMap {
  const char *matrix;
  int rows, columns, box;
  char unused[104];
};
static_assert(sizeof(TensorMap) == 128);

inline bool elected() { return emulator.current % 32 == 0; }

struct BarrierState {  // what the 8 bytes of an mbarrier hold
  int bytes;
  unsigned char count, pending, phase, unused;
};
struct BulkCopy {
  uint32 to;
  std::vector<char> bytes;
  uint32 barrier;
};
inline std::vector<BulkCopy> bulk_copies;

inline char *at_shared(uint32 address) { return shared + static_cast<int>(address); }
inline BarrierState &state_of(uint32 barrier) { return *reinterpret_cast<BarrierState *>(at_shared(barrier)); }
inline void complete(BarrierState &b) {
  if (b.pending == 0 && b.bytes == 0) b.pending = b.count, b.phase ^= 1;
}
inline void init_barrier(uint32 barrier, int count) {
  state_of(barrier) = {0, static_cast<unsigned char>(count), static_cast<unsigned char>(count), 0, 0};
}
inline void fence_barriers() {}
inline uint32 nothing_until_loaded(uint32, int) {
  __syncwarp();
  return 0;
}
inline void arrive(uint32 barrier) {
  BarrierState &b = state_of(barrier);
  if (b.pending == 0) fprintf(stderr, "too many arrivals\n"), abort();
  b.pending--, complete(b);
}
inline void arrive_expecting(uint32 barrier, int bytes) {
  state_of(barrier).bytes += bytes;
  arrive(barrier);
}
inline void wait_barrier(uint32 barrier, int phase) {
  yield();
  while (state_of(barrier).phase == (phase & 1)) {
    std::vector<BulkCopy> rest, mine;
    for (BulkCopy &c : bulk_copies) (c.barrier == barrier ? mine : rest).push_back(c);
    bulk_copies = rest;
    for (const BulkCopy &c : mine) {
      memcpy(at_shared(c.to), c.bytes.data(), c.bytes.size());
      state_of(barrier).bytes -= static_cast<int>(c.bytes.size());
    }
    if (!mine.empty()) complete(state_of(barrier));
    if (state_of(barrier).phase == (phase & 1)) yield();
  }
}
inline void copy_bulk(uint32 to, const void *from, int bytes, uint32 barrier) {
  if (to % 16 || bytes % 16 || bytes == 0 || reinterpret_cast<uintptr_t>(from) % 16)
    fprintf(stderr, "a bulk copy is not aligned\n"), abort();
  const char *first = static_cast<const char *>(from);
  bulk_copies.push_back({to, std::vector<char>(first, first + bytes), barrier});
}
inline void copy_box(uint32 to, const TensorMap &map, int column, int row, uint32 barrier) {
  if (to % 1024 || column % 128 || column >= map.columns) fprintf(stderr, "a box is not aligned\n"), abort();
  std::vector<char> bytes(map.box * 128);
  for (int r = 0; r < map.box && row + r < map.rows; r++)
    for (int u = 0; u < 8; u++)
      memcpy(bytes.data() + r * 128 + (u ^ (r & 7)) * 16,
             map.matrix + (size_t)(row + r) * map.columns + column + u * 16, 16);
  bulk_copies.push_back({to, bytes, barrier});
}
inline void prefetch_map(const TensorMap &) {}
inline void fence_products() {}
inline void commit_products() {}
template <int LEFT>
inline void wait_for_products() {}
template <int COUNT>
inline void hold(uint32 (&)[COUNT]) {}
template <int COUNT>
inline void give_registers() {}
template <int COUNT>
inline void take_registers() {}

inline void cluster_sync() {
  static int arrived, generation;
  const int before = generation;
  if (++arrived >= emulator.alive)
    arrived = 0, generation++;
  else
    while (generation == before && arrived < emulator.alive) yield();
  if (generation == before) arrived = 0, generation++;
}
inline void cluster_arrive() { emulator.cluster_arrived++; }
inline void cluster_wait() {
  while (emulator.cluster_arrived < emulator.count * emulator.cluster) yield();
}
inline void dsmem_store(uint32 to, float4 v, uint32 barrier, int rank) {
  const char *first = reinterpret_cast<const char *>(&v);
  bulk_copies.push_back(
      {cluster_address(to, rank), std::vector<char>(first, first + 16), cluster_address(barrier, rank)});
}
inline void wait_for_stores(uint32 barrier) { wait_barrier(barrier, 0); }
inline float4 dsmem_load(uint32 address, int rank) {
  float4 v;
  memcpy(&v, at_shared(cluster_address(address, rank)), sizeof v);
  return v;
}

inline void raise_flag(int *flag) { *flag = 1; }
inline void wait_for_flag(int *flag) {
  while (!*flag) yield();
}

}  // namespace crelle
