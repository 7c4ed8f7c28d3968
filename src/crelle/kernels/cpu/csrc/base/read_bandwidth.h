// Read memory as fast as this instruction set can and do nothing with it: the roofline that kernels are held against.
//
// Two halves in turn, as the kernels read two blocks: DRAM serves two streams 10 to 15% faster than one. No software
// prefetch: loads alone run far enough ahead, and a prefetch made the reader up to 15% slower, which would flatter the
// kernels.
//
// Included inside a namespace of the including file, after encode.h (for its vectors).

inline uint64_t read_all(const uint8_t *data, size_t bytes) {
  constexpr int kStep = 256, kCount = kStep / sizeof(Ints);
  const size_t half = bytes / 2 / kStep * kStep;
  Ints sums[kCount] = {};
  const auto add = [&](const uint8_t *from) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int j = 0; j < kCount; ++j) {
      Ints v;
      __builtin_memcpy(&v, from + j * sizeof v, sizeof v);
      sums[j] ^= v;
    }
  };
  for (size_t at = 0; at < half; at += kStep) {
    add(data + at);
    add(data + half + at);
  }
  for (size_t at = 2 * half; at + kStep <= bytes; at += kStep) add(data + at);
  for (int j = 1; j < kCount; ++j) sums[0] ^= sums[j];
  uint64_t x = 0;
  for (int i = 0; i < kLanes; ++i) x ^= static_cast<uint64_t>(sums[0][i]);
  return x;
}
