// Norms, rope, activations and their kin over one row of floats.
//
// Included inside a namespace of the including file, after simd.h.

template <class T>
void load_row(const T *from, float *to, int n) {
  int i = 0;
  for (; i + kPartLanes <= n; i += kPartLanes) store_part(to + i, load_part(from + i));
  if (i < n) store_first(to + i, load_first(from + i, n - i), n - i);
}

inline void load_floats(DType type, const uint8_t *from, float *to, int n) {
  if (type == DType::F32)
    __builtin_memcpy(to, from, n * sizeof(float));
  else if (type == DType::F16)
    load_row(reinterpret_cast<const Half *>(from), to, n);
  else
    load_row(reinterpret_cast<const Bfloat *>(from), to, n);
}

inline void store_floats(DType type, const float *from, uint8_t *to, int n) {
  if (type == DType::F32)
    __builtin_memcpy(to, from, n * sizeof(float));
  else if (type == DType::BF16) {
    Bfloat *const bf16 = reinterpret_cast<Bfloat *>(to);
    int i = 0;
    for (; i + kPartLanes <= n; i += kPartLanes) store_part(bf16 + i, load_part(from + i));
    for (; i < n; ++i) store_one(bf16 + i, from[i]);
  } else {
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
  for (i = 0; i + kPartLanes <= n; i += kPartLanes)
    store_part(y + i, load_part(x + i) * factor * load_part(weight + i));
  for (; i < n; ++i) y[i] = x[i] * factor * weight[i];
}

// y = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias
inline void layer_norm(const float *x, const float *weight, const float *bias, float eps, int n, float *y) {
  Vec sum = {}, squares = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) sum += load(x + i);
  if (i < n) sum += load_first(x + i, n - i);
  const float mean = sum_of(sum) / static_cast<float>(n);
  for (i = 0; i + kLanes <= n; i += kLanes) {
    const Vec v = load(x + i) - mean;
    squares += v * v;
  }
  float rest = 0;
  for (; i < n; ++i) rest += (x[i] - mean) * (x[i] - mean);
  const float factor = 1.0f / __builtin_sqrtf((sum_of(squares) + rest) / static_cast<float>(n) + eps);
  for (i = 0; i + kLanes <= n; i += kLanes) {
    const Vec v = (load(x + i) - mean) * factor * load(weight + i);
    store(y + i, bias ? v + load(bias + i) : v);
  }
  for (; i < n; ++i) y[i] = (x[i] - mean) * factor * weight[i] + (bias ? bias[i] : 0.0f);
}

inline void rope(float *x, const float *cos, const float *sin, int D) {
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

struct Silu {
  CRELLE_INLINE Vec operator()(Vec x) const { return x / (1.0f + exp_of(-x)); }
};

struct Relu {
  CRELLE_INLINE Vec operator()(Vec x) const { return x < 0.0f ? Vec{} : x; }  // NaN stays NaN
};

// x / 2 (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
struct GeluTanh {
  CRELLE_INLINE Vec operator()(Vec x) const {
    const Vec u = x * (0.7978845608f + 0.0356774081f * (x * x));
    return x / (1.0f + exp_of(-2.0f * u));
  }
};

// x / 2 (1 + erf(x / sqrt(2))) by erfc(z) = t e^(-z^2 + p(t)), t = 1 / (1 + z / 2), z >= 0, to a relative 1.2e-7
// (Numerical Recipes, 6.2): no cancellation for x < 0.
struct Gelu {
  CRELLE_INLINE Vec operator()(Vec x) const {
    const Vec z = (x < 0.0f ? -x : x) * 0.7071067812f, t = 1.0f / (1.0f + 0.5f * z);
    Vec p = all(0.17087277f);
    p = p * t - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    p = p * t - 1.26551223f;
    const Vec tail = 0.5f * t * exp_of(p - z * z);  // the normal distribution beyond |x|
    return x * (x < 0.0f ? tail : 1.0f - tail);
  }
};

template <class F>
CRELLE_INLINE void activate_with(F f, float *x, const float *up, int n) {
  int i = 0;
  if (!up) {
    for (; i + kLanes <= n; i += kLanes) store(x + i, f(load(x + i)));
    if (i < n) store_first(x + i, f(load_first(x + i, n - i)), n - i);
    return;
  }
  for (; i + kLanes <= n; i += kLanes) store(x + i, f(load(x + i)) * load(up + i));
  if (i < n) store_first(x + i, f(load_first(x + i, n - i)) * load_first(up + i, n - i), n - i);
}

// g sigmoid(1.702 g) (u + 1), g = min(gate, 7), u = up within -7 and 7; without up, u + 1 is 1. NaN stays NaN.
inline void swigluoai(float *gate, const float *up, int n) {
  constexpr float kLimit = 7;
  for (int i = 0; i < n; i += kLanes) {
    const int left = n - i < kLanes ? n - i : kLanes;
    const Vec x = load_first(gate + i, left), y = up ? load_first(up + i, left) : Vec{};
    const Vec g = x > kLimit ? all(kLimit) : x, most = y > kLimit ? all(kLimit) : y;
    const Vec u = most < -kLimit ? all(-kLimit) : most;
    store_first(gate + i, g / (1.0f + exp_of(-1.702f * g)) * (u + 1.0f), left);
  }
}

// x = f(x) * up, or f(x) where there is no up.
inline void activate(Activation kind, float *x, const float *up, int n) {
  if (kind == Activation::Silu) return activate_with(Silu{}, x, up, n);
  if (kind == Activation::Gelu) return activate_with(Gelu{}, x, up, n);
  if (kind == Activation::GeluTanh) return activate_with(GeluTanh{}, x, up, n);
  if (kind == Activation::SwigluOai) return swigluoai(x, up, n);
  activate_with(Relu{}, x, up, n);
}

inline void add(float *x, const float *y, int n) {
  int i = 0;
  for (; i + kPartLanes <= n; i += kPartLanes) store_part(x + i, load_part(x + i) + load_part(y + i));
  for (; i < n; ++i) x[i] += y[i];
}

inline void add_scaled(float *x, const float *y, float factor, int n) {
  int i = 0;
  for (; i + kPartLanes <= n; i += kPartLanes) store_part(x + i, load_part(x + i) + load_part(y + i) * factor);
  for (; i < n; ++i) x[i] += y[i] * factor;
}

// softcap tanh(x / softcap), by tanh u = 1 - 2 / (1 + e^2u). What is not finite stays as it is.
CRELLE_INLINE Vec cap_of(Vec x, float softcap) {
  const Vec y = softcap - 2.0f * softcap / (1.0f + exp_of(x * (2.0f / softcap)));
  return x - x == 0.0f ? y : x;
}

inline void cap(float *x, float softcap, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, cap_of(load(x + i), softcap));
  if (i < n) store_first(x + i, cap_of(load_first(x + i, n - i), softcap), n - i);
}

inline void scale(float *x, float factor, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, load(x + i) * factor);
  for (; i < n; ++i) x[i] *= factor;
}
