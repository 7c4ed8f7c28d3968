// A warp's load pipeline, for tests on a CPU. What was issued lands only when it is waited for, so that a stage that is
// read too early holds what was there before. Stands in for ptx/pipeline.cuh.
#pragma once
#include "ptx/types.cuh"

namespace crelle {

inline uint32 shared_address(const void *p) { return static_cast<uint32>(static_cast<const char *>(p) - shared); }

template <int STAGES, int BYTES, int TOGETHER = 1>
struct Pipeline {
  static constexpr int SIZE = STAGES * (BYTES + 8) + (STAGES & 1) * 8;
  struct Copy {
    char *to;
    const char *from;
  };
  char *base;
  int lane;
  std::vector<std::vector<Copy>> groups;
  std::vector<Copy> open;
  size_t landed = 0;

  Pipeline(char *shared, int lane) : base(shared), lane(lane) {}
  void copy(char *to, const void *from, int bytes) {
    for (int i = lane * 16; i < bytes; i += 512) open.push_back({to + i, static_cast<const char *>(from) + i});
  }
  void issue_load(int s, const void *a, int first, const void *b, int second) {
    copy(base + s * BYTES, a, first), copy(base + s * BYTES + first, b, second);
    issue_nothing();
  }
  void issue_load(int s, const void *a, int bytes) {
    copy(base + s * BYTES, a, bytes);
    issue_nothing();
  }
  void issue_nothing() { groups.push_back(open), open.clear(); }
  const char *wait(int s, int) {
    for (; landed + (STAGES - TOGETHER) < groups.size(); landed++)
      for (const Copy &c : groups[landed]) memcpy(c.to, c.from, 16);
    __syncwarp();
    return base + s * BYTES;
  }
};

}  // namespace crelle
