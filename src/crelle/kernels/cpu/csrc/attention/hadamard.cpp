#include "attention/hadamard.h"

#include <cmath>
#include <vector>

#include "attention/rotation.h"

namespace crelle::cpu {
namespace {

// Sums and differences at distance 1, 2, 4 ... step / 2.
void sylvester(float *x, int n, int block) {
  for (int step = 1; step < block; step *= 2)
    for (int i = 0; i < n; i += 2 * step)
      for (int j = i; j < i + step; ++j) {
        const float a = x[j], b = x[j + step];
        x[j] = a + b, x[j + step] = a - b;
      }
}

}  // namespace

void hadamard(float *x, int n, int block) {
  sylvester(x, n, block);
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  for (int i = 0; i < n; ++i) x[i] *= factor;
}

void undo_rotation(const Rotation &r, float *y, int first, int n) {
  sylvester(y, n, r.step);
  if (r.order > 1) {
    std::vector<float> given(r.block);
    for (int at = 0; at < n; at += r.block) {
      float *const block = y + at;
      given.assign(block, block + r.block);
      for (int i = 0; i < r.order; ++i)
        for (int l = 0; l < r.step; ++l) {
          float sum = 0;
          for (int j = 0; j < r.order; ++j) sum += r.paley[i * r.order + j] * given[j * r.step + l];
          block[i * r.step + l] = sum;
        }
    }
  }
  const float root = r.root();
  for (int i = 0; i < n; ++i) y[i] = y[i] * root * r.signs[first + i];
}

}  // namespace crelle::cpu
