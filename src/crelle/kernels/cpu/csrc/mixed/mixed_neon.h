// The vectors of mixed_kernel.h on NEON: dot products of bytes by sdot where the file is compiled for it, otherwise by
// multiplications of bytes whose pairs are added as 16-bit sums.
//
// Included inside a namespace of the including file.

struct MixedV {
  using Bytes = uint8x16_t;
  using Ints = int32x4_t;
  using Floats = float32x4_t;
  using Digits = int8x16_t;
  using Seconds = float32x4_t;
  static constexpr int kLanes = 4, kRegisters = 32, kRowsOfX = 2;
#if defined(__ARM_FEATURE_DOTPROD)
  using Acc = int32x4_t;
  static constexpr bool kNarrow = false, kRolled = false;
  static CRELLE_INLINE Acc no_sums() { return vdupq_n_s32(0); }
  static CRELLE_INLINE Ints sums(Acc a) { return a; }
  template <int I>
  static CRELLE_INLINE Acc dot(Acc acc, Bytes codes, Digits x) {
    return vdotq_laneq_s32(acc, vreinterpretq_s8_u8(codes), x, I);
  }
#else
  using Acc = int16x8_t;
  static constexpr bool kNarrow = true, kRolled = true;
  static CRELLE_INLINE Acc no_sums() { return vdupq_n_s16(0); }
  static CRELLE_INLINE Ints sums(Acc a) { return vpaddlq_s16(a); }
  template <int I>
  static CRELLE_INLINE Acc dot(Acc acc, Bytes codes, Digits x) {
    const int8x16_t four = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), I));
    const int8x16_t c = vreinterpretq_s8_u8(codes);
    const int16x8_t low = vmull_s8(vget_low_s8(c), vget_low_s8(four)), high = vmull_high_s8(c, four);
    return vaddq_s16(acc, vpaddq_s16(low, high));
  }
#endif

  static CRELLE_INLINE Bytes load(const uint8_t *p) { return vld1q_u8(p); }
  static CRELLE_INLINE Digits digits(const uint8_t *p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
  template <int F>
  static CRELLE_INLINE Bytes field(Bytes v) {
    if constexpr (F == 0)
      return vandq_u8(v, vdupq_n_u8(3));
    else if constexpr (F == 3)
      return vshrq_n_u8(v, 6);
    else
      return vandq_u8(vshrq_n_u8(v, 2 * F), vdupq_n_u8(3));
  }
  static CRELLE_INLINE Bytes low_nibbles(Bytes v) { return vandq_u8(v, vdupq_n_u8(15)); }
  static CRELLE_INLINE Bytes high_nibbles(Bytes v) { return vshrq_n_u8(v, 4); }
  static CRELLE_INLINE Ints zero() { return vdupq_n_s32(0); }
  static CRELLE_INLINE Ints add(Ints a, Ints b) { return vaddq_s32(a, b); }
  static CRELLE_INLINE Ints digit_sums(Ints hi, Ints lo) { return vaddq_s32(vshlq_n_s32(hi, 8), lo); }

  // Bytes 4 i ... 4 i + 3 as dwords: a look-up whose other indices are too large and give 0.
  static CRELLE_INLINE Ints expand(Bytes v, int i) {
    const uint32x4_t first = {0xffffff00u, 0xffffff01u, 0xffffff02u, 0xffffff03u};
    const Bytes index = vreinterpretq_u8_u32(vaddq_u32(first, vdupq_n_u32(4 * i)));
    return vreinterpretq_s32_u8(vqtbl1q_u8(v, index));
  }
  template <int J>
  static CRELLE_INLINE Bytes twice_zeros(const uint8_t *header) {
    return vaddq_u8(field<J>(vld1q_u8(header + kHeaderZeros)), vdupq_n_u8(1));
  }
  template <int J>
  static CRELLE_INLINE Ints minus_zero(Ints sums, const uint8_t *header, int i, MixedZeros zeros) {
    return vmlaq_n_s32(sums, expand(twice_zeros<J>(header), i), zeros.table[0]);
  }
#if defined(__ARM_FEATURE_DOTPROD)
  template <int Lane>
  static CRELLE_INLINE Ints times_half(int16x8_t zeros, int16x8_t halves, bool upper) {
    return upper ? vmull_high_laneq_s16(zeros, halves, Lane) : vmull_laneq_s16(vget_low_s16(zeros), halves, Lane);
  }
  // 16-bit multiplications take half of the time of 32-bit ones.
  template <int J, int D>
  static CRELLE_INLINE void begin(Acc (&acc)[D], const uint8_t *header, int i, MixedZeros zeros) {
    const Bytes codes = twice_zeros<J>(header);
    const int16x8_t wide = vreinterpretq_s16_u16(i < 2 ? vmovl_u8(vget_low_u8(codes)) : vmovl_high_u8(codes));
    const int16x8_t halves = vld1q_s16(zeros.halves - 2 * J);  // of the unit
    if constexpr (D == 2) acc[0] = times_half<2 * J>(wide, halves, i % 2);
    acc[D - 1] = times_half<2 * J + 1>(wide, halves, i % 2);
  }
#endif
  static CRELLE_INLINE Seconds seconds(const uint8_t *header, const float *scales) {
    return vmulq_f32(load_halves(header + kHeaderSecond), vld1q_f32(scales));
  }
  template <int J>
  static CRELLE_INLINE Floats add_scaled(Floats f, Ints sums, const uint8_t *header, int i, Seconds s) {
    const Bytes both = vld1q_u8(header + J / 2 * kMixedRows), codes = J % 2 ? high_nibbles(both) : low_nibbles(both);
    const Ints scale = expand(vaddq_u8(codes, vld1q_dup_u8(header + kHeaderSecondZeros + J)), i);
    return vfmaq_laneq_f32(f, vcvtq_f32_s32(vmulq_s32(sums, scale)), s, J);
  }

  static CRELLE_INLINE Floats floats(float v) { return vdupq_n_f32(v); }
  static CRELLE_INLINE Floats to_float(Ints v) { return vcvtq_f32_s32(v); }
  static CRELLE_INLINE Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
  static CRELLE_INLINE Floats mul(Floats a, Floats b) { return vmulq_f32(a, b); }
  static CRELLE_INLINE Floats load_floats(const uint8_t *p) { return vreinterpretq_f32_u8(vld1q_u8(p)); }
  static CRELLE_INLINE Floats load_halves(const uint8_t *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
  static CRELLE_INLINE Floats load_bytes(const uint8_t *p) {
    uint32_t four;
    __builtin_memcpy(&four, p, 4);
    const uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)));
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide)));
  }
  static CRELLE_INLINE Floats gather(const float *x, const uint8_t *columns) {
    uint16_t c[4];
    __builtin_memcpy(c, columns, 8);
    return Floats{x[c[0]], x[c[1]], x[c[2]], x[c[3]]};
  }
  static CRELLE_INLINE void store(float *p, Floats v) { vst1q_f32(p, v); }
};
