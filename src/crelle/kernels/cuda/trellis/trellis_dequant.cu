// A trellis weight (trellis_layout.py) as a plain matrix [N, K], still rotated: for products of many tokens.
//
// A warp takes a unit, 256 outputs and 16 inputs, as in trellis_gemv.cu: four lanes write 16 neighbouring inputs.
#include "trellis/trellis_states.cuh"
#include "ptx/vector.cuh"

namespace crelle {

// weight [tiles, units, W::UNIT], row_scale [N], y [N, K]. ALIGNED: K is a multiple of 4. Grid (units over WARPS,
// tiles).
template <int WEIGHTS, int SHIFT, bool ALIGNED, int WARPS, typename T>
__global__ void __launch_bounds__(WARPS * 32)
    trellis_dequant(const char *__restrict__ weight, const half *__restrict__ row_scale, T *y, int N, int K,
                    int units) {
  using W = Trellis<WEIGHTS, SHIFT>;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, unit = blockIdx.x * WARPS + warp, tile = blockIdx.y;
  launch_dependents();
  if (unit >= units) return;
  const int k = unit * 16 + lane % 4 * 4, n = tile * 256 + lane / 4 * 32;
  uint32 ring[W::WORDS];
  W::load(ring, weight + ((size_t)tile * units + unit) * W::UNIT, lane);
  grid_dependency_wait();  // what ran before may still read the memory that y is
  if (k >= K) return;
#pragma unroll
  for (int r = 0; r < 32; r++) {
    if (n + r >= N) break;
    const float scale = to_float(row_scale[n + r]) * 0x1p-7f;
    Vector<4, T> v;
#pragma unroll
    for (int c = 0; c < 4; c += WEIGHTS) {
      const uint32 p = W::bytes(ring, (4 * r + c) / WEIGHTS);
      const int even = (p & 0xff) + (p >> 16 & 0xff), odd = (p >> 8 & 0xff) + (p >> 24);
      if constexpr (WEIGHTS == 2) {
        v.v[c] = from_float<T>((float)(even - W::ZERO) * scale);
        v.v[c + 1] = from_float<T>((float)(odd - W::ZERO) * scale);
      } else {
        v.v[c] = from_float<T>((float)(even + odd - W::ZERO) * scale);
      }
    }
    T *const to = y + (size_t)(n + r) * K + k;
    if constexpr (ALIGNED) {
      *reinterpret_cast<Vector<4, T> *>(to) = v;
    } else {
#pragma unroll
      for (int c = 0; c < 4; c++)
        if (k + c < K) to[c] = v.v[c];
    }
  }
}

}  // namespace crelle
