// RMSNorm, rope, SiLU * mul and their kin over one row of floats.
//
// Included inside a namespace of the including file, after lanes.h.

template <class T>
void load_row(const T *from, float *to, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i));
  if (i < n) store_first(to + i, load_first(from + i, n - i), n - i);
}

inline void load_numbers(Number type, const uint8_t *from, float *to, int n) {
  if (type == Number::F32)
    __builtin_memcpy(to, from, n * sizeof(float));
  else if (type == Number::F16)
    load_row(reinterpret_cast<const Half *>(from), to, n);
  else
    load_row(reinterpret_cast<const Bfloat *>(from), to, n);
}

inline void store_numbers(Number type, const float *from, uint8_t *to, int n) {
  if (type == Number::F32)
    __builtin_memcpy(to, from, n * sizeof(float));
  else if (type == Number::BF16)
    for (int i = 0; i < n; ++i) store_one(reinterpret_cast<Bfloat *>(to) + i, from[i]);
  else {
    Half *half = reinterpret_cast<Half *>(to);
    int i = 0;
#if defined(__AVX512F__)
    for (; i + kLanes <= n; i += kLanes)
      _mm256_storeu_si256(reinterpret_cast<__m256i *>(half + i), _mm512_cvtps_ph((__m512)load(from + i), 8));
#elif defined(__AVX2__)
    for (; i + 8 <= n; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i *>(half + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 8));
#endif
    for (; i < n; ++i) store_one(half + i, from[i]);
  }
}

// y = x / sqrt(mean(x^2) + eps) * weight
inline void rms_norm(const float *x, const float *weight, float eps, int n, float *y) {
  Vec squares[4] = {};
  int i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) {
      const Vec v = load(x + i + j * kLanes);
      squares[j] += v * v;
    }
  for (; i < n; i += kLanes) {
    const Vec v = n - i >= kLanes ? load(x + i) : load_first(x + i, n - i);
    squares[0] += v * v;
  }
  const float mean = sum_of((squares[0] + squares[1]) + (squares[2] + squares[3])) / static_cast<float>(n);
  const float factor = 1.0f / __builtin_sqrtf(mean + eps);
  for (i = 0; i + kLanes <= n; i += kLanes) store(y + i, load(x + i) * factor * load(weight + i));
  for (; i < n; ++i) y[i] = x[i] * factor * weight[i];
}

inline void turn(float *x, const float *cos, const float *sin, int D) {
  const int half = D / 2;
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store(x + i, a * c - b * s);
    store(x + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    const float a = x[i], b = x[half + i];
    x[i] = a * cos[i] - b * sin[i];
    x[half + i] = b * cos[i] + a * sin[i];
  }
}

inline void silu_mul(float *gate, const float *up, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec g = load(gate + i);
    store(gate + i, g / (1.0f + exp_of(-g)) * load(up + i));
  }
  if (i < n) {
    const Vec g = load_first(gate + i, n - i);
    store_first(gate + i, g / (1.0f + exp_of(-g)) * load_first(up + i, n - i), n - i);
  }
}

inline void add(float *x, const float *y, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, load(x + i) + load(y + i));
  for (; i < n; ++i) x[i] += y[i];
}

inline void scale(float *x, float factor, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, load(x + i) * factor);
  for (; i < n; ++i) x[i] *= factor;
}

// First the largest value, then where it stands. NaN is the largest, as numpy and torch have it.
inline int argmax(const float *x, int n) {
  int wrong = 0;
  for (int i = 0; i < n; ++i) wrong |= x[i] != x[i];
  for (int i = 0; wrong && i < n; ++i)
    if (x[i] != x[i]) return i;
  Vec tops = all(-__builtin_inff());
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) tops = larger(load(x + i), tops);
  float top = top_of(tops);
  for (; i < n; ++i) top = x[i] > top ? x[i] : top;
  for (i = 0; i < n; ++i)
    if (x[i] == top) return i;
  return 0;
}
