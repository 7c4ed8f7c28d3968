#include "attention/hadamard.h"

#include <cmath>

namespace crelle::cpu {

void hadamard(float *x, int n, int block) {
  for (int step = 1; step < block; step *= 2)
    for (int i = 0; i < n; i += 2 * step)
      for (int j = i; j < i + step; ++j) {
        const float a = x[j], b = x[j + step];
        x[j] = a + b, x[j + step] = a - b;
      }
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  for (int i = 0; i < n; ++i) x[i] *= factor;
}

}  // namespace crelle::cpu
