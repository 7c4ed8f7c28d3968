// Products on uniform and affine grids and of bit-planes by instruction sets that this machine may not have: built and
// run by test_foreign_products.py, under an emulator or with an instruction's equivalent.
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "isa/isa.h"
#include "planes/matmul.h"

using namespace crelle::cpu;

namespace {

std::mt19937 chance(1);

float normal() {
  static std::normal_distribution<float> n01;
  return n01(chance);
}

std::vector<float> normals(size_t n) {
  std::vector<float> v(n);
  for (float &x : v) x = normal();
  return v;
}

struct Case {
  int P, N, K, G;
  Kind kind;
  bool bias;
};

// A random matrix as stored, and what its values are.
struct Matrix {
  std::vector<uint8_t> planes, zero;
  std::vector<float> scale, low, values;

  explicit Matrix(const Case &c) {
    const int C = (c.K + c.G - 1) / c.G;
    const size_t row_bytes = (c.K + 7) / 8;
    planes.resize(c.P * c.N * row_bytes), zero.resize(size_t(c.N) * C);
    for (uint8_t &b : planes) b = static_cast<uint8_t>(chance());
    for (uint8_t &b : zero) b = static_cast<uint8_t>(chance() % (1u << c.P));
    const size_t groups = size_t(c.N) * C;
    scale = normals((c.kind == Kind::Bcq ? c.P : 1) * groups), low = normals(groups);
    for (float &s : scale) s = std::fabs(s) + 0.1f;
    for (int n = 0; n < c.N; ++n)
      for (int k = 0; k < c.K; ++k) {
        int q = 0;
        for (int p = 0; p < c.P; ++p) q = q << 1 | (planes[(size_t(p) * c.N + n) * row_bytes + k / 8] >> (k % 8) & 1);
        const size_t at = size_t(n) * C + k / c.G;
        if (c.kind == Kind::Bcq) {
          float value = c.bias ? low[at] : 0;
          for (int p = 0; p < c.P; ++p) value += (q >> (c.P - 1 - p) & 1 ? 1 : -1) * scale[p * groups + at];
          values.push_back(value);
          continue;
        }
        const int offset = c.bias ? zero[at] : 1 << (c.P - 1);
        values.push_back(c.kind == Kind::Affine ? low[at] + scale[at] * q : scale[at] * (q - offset));
      }
  }

  Stored stored(const Case &c) const {
    const bool levels = c.kind == Kind::Affine || (c.kind == Kind::Bcq && c.bias);
    return {c.kind,
            c.N,
            c.K,
            c.P,
            c.G,
            planes.data(),
            scale.data(),
            levels ? low.data() : nullptr,
            c.kind == Kind::Uniform && c.bias ? zero.data() : nullptr};
  }
};

// Products of 70 rows against f64, and of fewer rows against those, bit for bit.
bool check(const Isa &isa, const Case &c) {
  const Matrix matrix(c);
  const Weight w = prepare_weight(matrix.stored(c), isa);
  constexpr int M = 70, kFirst = 3;
  for (Precision precision : {Precision::Exact, Precision::Int8}) {
    const std::vector<float> x = normals(size_t(M) * c.K);
    std::vector<float> y(size_t(M) * c.N, NAN);
    matmul(x.data(), M, w, y.data(), precision, false);
    double error = 0, norm = 0;
    for (int m = 0; m < M; ++m)
      for (int n = 0; n < c.N; ++n) {
        double want = 0;
        for (int k = 0; k < c.K; ++k) want += double(x[m * c.K + k]) * matrix.values[size_t(n) * c.K + k];
        error += std::pow(want - y[m * c.N + n], 2), norm += want * want;
      }
    const double relative = std::sqrt(error / norm), limit = precision == Precision::Exact ? 2e-4 : 2e-2;
    bool right = relative < limit;
    for (int few : {1, 2, 3, 5, 9}) {
      std::vector<float> some(size_t(few) * c.N, NAN);
      matmul(x.data() + kFirst * c.K, few, w, some.data(), precision, false);
      right = right && !std::memcmp(some.data(), y.data() + kFirst * c.N, some.size() * sizeof(float));
    }
    if (!right) {
      std::printf("%s: %d bits, %d x %d, group %d, kind %d, bias %d, bytes %d: error %g or other bits in a batch\n",
                  isa.name, c.P, c.N, c.K, c.G, int(c.kind), c.bias, int(precision), relative);
      return false;
    }
  }
  return true;
}

}  // namespace

int main() {
#if defined(ONLY)
  const std::vector<const Isa *> sets{&ONLY};
#else
  const std::vector<const Isa *> &sets = isas();
#endif
  int cases = 0;
  for (const Isa *isa : sets) {
    std::printf("%s\n", isa->name);
    for (int P = 1; P <= 8; ++P)
      for (const auto &[N, K, G] : {std::array{70, 300, 128}, std::array{33, 96, 32}, std::array{5, 520, 64}})
        for (const auto &[kind, bias] : {std::pair{Kind::Uniform, false}, std::pair{Kind::Uniform, true},
                                         std::pair{Kind::Affine, true}, std::pair{Kind::Bcq, true}}) {
          if (kind == Kind::Affine && isa->stream(kind, P) != Stream::Fields) continue;
          if (!check(*isa, {P, N, K, G, kind, bias})) return 1;
          ++cases;
        }
  }
  std::printf("%d cases\n", cases);
  return cases ? 0 : 1;
}
