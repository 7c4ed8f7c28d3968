// x [n] times Hadamard matrices of blocks of inputs, with the sums of crelle.formats.wrappers.hadamard in their order:
// the same bits.
//
// Included inside a namespace of the including file, after encode.h.

// Sums and differences at distance 1, 2, 4 and 8 of kLanes inputs in a register. What is subtracted is negated first.
template <int Step, int... i>
CRELLE_INLINE Floats rotate_lanes(Floats v, std::integer_sequence<int, i...>) {
  constexpr Ints kSigns = {(i & Step ? int(0x80000000) : 0)...};
  return __builtin_shufflevector(v, v, (i ^ Step)...) + (Floats)((Ints)v ^ kSigns);
}
template <int Step>
CRELLE_INLINE Floats rotate_lanes(Floats v) {
  return rotate_lanes<Step>(v, std::make_integer_sequence<int, kLanes>{});
}

CRELLE_INLINE void sylvester_blocks(float *x, int n, int block) {
  int step = 1;
  if (block >= kLanes) {
    for (int i = 0; i < n; i += kLanes) {
      Floats v = rotate_lanes<2>(rotate_lanes<1>(load(x + i)));
      if constexpr (kLanes >= 8) v = rotate_lanes<4>(v);
      if constexpr (kLanes >= 16) v = rotate_lanes<8>(v);
      __builtin_memcpy(x + i, &v, sizeof v);
    }
    step = kLanes;
  }
  for (; step < block; step *= 2)
    for (int i = 0; i < n; i += 2 * step) {
      int j = i;
      for (; j + kLanes <= i + step; j += kLanes) {
        const Floats a = load(x + j), b = load(x + j + step), sum = a + b, difference = a - b;
        __builtin_memcpy(x + j, &sum, sizeof sum), __builtin_memcpy(x + j + step, &difference, sizeof difference);
      }
      for (; j < i + step; ++j) {
        const float a = x[j], b = x[j + step];
        x[j] = a + b, x[j + step] = a - b;
      }
    }
}

// block: a power of two.
CRELLE_INLINE void rotate_blocks(float *x, int n, int block) {
  sylvester_blocks(x, n, block);
  const float root = static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(block)));
  for (int i = 0; i < n; ++i) x[i] *= root;
}
