// The smallest kernel that needs all that the real ones need: a template, the toolkit's half types, a launch.
// `crelle doctor` compiles it, and runs it where there is a device.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace crelle {

// y[i] = factor * x[i]
template <typename T>
__global__ void probe(const T *__restrict__ x, T *__restrict__ y, float factor, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = T(factor * float(x[i]));
}

}  // namespace crelle
