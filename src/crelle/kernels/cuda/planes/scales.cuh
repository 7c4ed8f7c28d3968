// What the scales of a group of weights mean, by format: shared by every kernel that reads planes.
#pragma once

namespace crelle {

// What the scales of a group say about its grid, as in weight_layout.py; b is 0 or 1 in the kernels, +-1 in the
// format.
enum ScaleKind { BCQ, BCQ_SYMMETRIC, UNIFORM, UNIFORM_SYMMETRIC, AFFINE };

__host__ __device__ constexpr int scales_per_group(ScaleKind kind, int planes) {
  return kind == BCQ ? planes + 1 : kind == BCQ_SYMMETRIC ? planes : kind == UNIFORM_SYMMETRIC ? 1 : 2;
}

}  // namespace crelle
