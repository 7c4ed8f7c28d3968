// Grids with the least weighted error (solver.h): of weights, 16 groups side by side in the lanes of a vector, each
// candidate tried on all weights; and of the scales of 2-bit groups.
//
// Included inside a namespace of the including file, after sweep.h.

CRELLE_INLINE Part clamped(Part v, Part low, Part high) {
  v = v > low ? v : low;
  return v < high ? v : high;
}

// The uniform grid of one group in each lane, with Z zero points for each scale; w, importance: [G][16].
template <int Z>
CRELLE_INLINE void uniform_grid(const UniformGrids &s, const float *w, const float *importance, float *scales,
                                float *zeros) {
  constexpr float kTiny = 0x1p-24f;
  const float steps = float((1 << s.bits) - 1);
  const Part top = Part{} + steps, middle = Part{} + float(1 << (s.bits - 1));
  for (int p = 0; p < kLanes; p += kPartLanes) {
    Part low = {}, high = {};
    for (int k = 0; k < s.G; ++k) {
      const Part v = load_part(w + k * kLanes + p), weight = load_part(importance + k * kLanes + p);
      low = weight > 0 && v < low ? v : low;
      high = weight > 0 && v > high ? v : high;
    }
    if (s.symmetric) high = -low > high ? -low : high, low = -high;
    Part best = Part{} + __builtin_inff(), scale = Part{} + kTiny, zero = {}, beyond = {};
    for (int i = 0; i < s.tries; ++i) {
      Part a = (high - low) * (s.shrink[i] / steps);
      a = a > kTiny ? a : Part{} + kTiny;
      for (int l = 0; l < kPartLanes; ++l) a[l] = as_half(a[l]);
      beyond = a > beyond ? a : beyond;
      const Part nearest = rounded(-low * s.shrink[i] / a), inverse = 1.0f / a;
      Part at[Z], error[Z] = {};
      for (int z = 0; z < Z; ++z) {  // 0, then a step to either side, which clips one end more
        const float aside = z == 0 ? 0.0f : z == 1 ? -1.0f : 1.0f;
        at[z] = s.symmetric ? middle : clamped(nearest + aside, Part{}, top);
      }
      for (int k = 0; k < s.G; ++k) {
        const Part v = load_part(w + k * kLanes + p), weight = load_part(importance + k * kLanes + p);
#pragma GCC unroll 3
        for (int z = 0; z < Z; ++z) {
          const Part code = rounded(clamped(v * inverse + at[z], Part{}, top)), off = v - a * (code - at[z]);
          error[z] += weight * off * off;
        }
      }
      for (int z = 0; z < Z; ++z) {
        const auto won = error[z] < best;
        best = won ? error[z] : best;
        scale = won ? a : scale;
        zero = won ? at[z] : zero;
      }
    }
    store_part(scales + p, beyond > 65504.0f ? beyond : scale);  // which the caller refuses
    store_part(zeros + p, zero);
  }
}

// scratch: 2 (G + 1) vectors.
inline void uniform_grids_tile(const UniformGrids &s, int tile, float *scratch) {
  const int G = s.G, first = tile * kLanes, count = rows_of(first, s.R);
  float *const w = scratch, *const importance = w + size_t(G) * kLanes, *const found = importance + size_t(G) * kLanes;
  for (int l = 0; l < kLanes; ++l)
    for (int k = 0; k < G; ++k) {
      const size_t r = first + l;
      w[k * kLanes + l] = l < count ? s.weight[r * G + k] : 0.0f;
      importance[k * kLanes + l] = l >= count ? 0.0f : s.importance ? s.importance[r % s.C * G + k] : 1.0f;
    }
  (s.aside ? uniform_grid<3> : uniform_grid<1>)(s, w, importance, found, found + kLanes);
  store_first(s.scale + first, load(found), count);
  store_first(s.zero + first, load(found + kLanes), count);
}

// The grid of one group, for 16 rows; w, importance: [G][16].
CRELLE_INLINE void search_grid(const GridSearch &s, const float *w, const float *importance, int G, float *scales,
                               float *zeros) {
  constexpr float kTiny = 0x1p-24f;
  for (int p = 0; p < kLanes; p += kPartLanes) {
    Part low = Part{} + 3.4e38f, high = -low;
    for (int k = 0; k < G; ++k) {
      const Part v = load_part(w + k * kLanes + p), weight = load_part(importance + k * kLanes + p);
      low = weight > 0 && v < low ? v : low;
      high = weight > 0 && v > high ? v : high;
    }
    Part best = Part{} + 3.4e38f, scale = Part{} + kTiny, zero = Part{} + 1.5f;
    for (int z = 1; z <= 4; ++z) {
      const float offset = 0.5f * z;
      const Part up = high / (3 - offset), down = -low / offset;
      Part reach = up > down ? up : down;
      reach = reach > kTiny ? reach : Part{} + kTiny;
      for (int i = 0; i < s.tries; ++i) {
        Part a = reach * s.shrink[i];
        a = a > kTiny ? a : Part{} + kTiny;
        const Part inverse = 1.0f / a;
        Part error = {};
        for (int k = 0; k < G; ++k) {
          const Part v = load_part(w + k * kLanes + p);
          const Part code = rounded(clamped(v * inverse + offset, Part{}, Part{} + 3.0f)),
                     off = v - a * (code - offset);
          error += load_part(importance + k * kLanes + p) * off * off;
        }
        const auto won = error < best;
        best = won ? error : best;
        scale = won ? a : scale;
        zero = won ? Part{} + offset : zero;
      }
    }
    store_part(scales + p, scale);
    store_part(zeros + p, zero);
  }
}

// scratch: 128 vectors and two more.
inline void search_grids_tile(const GridSearch &s, int tile, float *scratch) {
  const int N = s.N, row0 = tile * kLanes;
  float *const w = scratch, *const importance = w + 64 * kLanes, *const found = importance + 64 * kLanes;
  for (int j = 0; j * s.G < s.K; ++j) {
    const int begin = j * s.G, G = s.K - begin < s.G ? s.K - begin : s.G;
    for (int k = 0; k < G; ++k) {
      store(w + k * kLanes, lanes_of(s.weight + size_t(begin + k) * N, row0, N));
      store(importance + k * kLanes, lanes_of(s.importance + size_t(begin + k) * N, row0, N));
    }
    search_grid(s, w, importance, G, found, found + kLanes);
    store_lanes(s.scale + size_t(j) * N, row0, N, load(found));
    store_lanes(s.zero + size_t(j) * N, row0, N, load(found + kLanes));
  }
}

// scratch: two vectors.
inline void second_order_tile(const SecondOrderSearch &s, int tile, float *scratch) {
  constexpr float kTiny = 0x1p-24f;
  const int N = s.N, row0 = tile * kLanes;
  float *const scales = scratch, *const weights = scratch + kLanes;
  for (int j = 0; j < s.groups; ++j) {
    const Vec wanted = lanes_of(s.scale + size_t(j) * N, row0, N);
    store(scales, wanted);
    store(weights, lanes_of(s.importance + size_t(j) * N, row0, N));
    const float largest = top_of(wanted), top = s.top[j];
    float best = __builtin_inff(), found_scale = kTiny, found_zero = 0;
    for (int zero = 0; zero < kSecondZeros; ++zero)
      for (int i = 0; i < s.tries; ++i) {
        float step = as_half(largest * s.shrink[i] / (top + float(zero)));
        step = step > kTiny ? step : kTiny;
        const float least = zero == 0;  // a scale is never 0
        Part error = {};
        for (int p = 0; p < kLanes; p += kPartLanes) {
          const Part want = load_part(scales + p);
          const Part code = rounded(clamped(want / step - float(zero), Part{} + least, Part{} + top));
          const Part off = step * (code + float(zero)) - want;
          error += load_part(weights + p) * (off * off);
        }
        float sum = 0;
        for (int l = 0; l < kPartLanes; ++l) sum += error[l];
        if (sum < best) best = sum, found_scale = step, found_zero = float(zero);
      }
    s.scale2[size_t(tile) * s.groups + j] = found_scale;
    s.zero2[size_t(tile) * s.groups + j] = found_zero;
  }
}
