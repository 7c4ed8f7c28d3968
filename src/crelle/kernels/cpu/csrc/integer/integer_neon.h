// The vectors of integer_kernel.h on NEON: dot products of bytes by sdot where the file is compiled for it, otherwise
// by multiplications to 16 bits.
//
// Included inside a namespace of the including file.

struct IntegerV {
  using Bytes = uint8x16_t;
  using Digits = int8x16_t;
  using Ints = int32x4_t;
  using Floats = float32x4_t;
  static constexpr int kLanes = 4, kRegisters = 32, kTokens = 8, kBlocks = 1, kByteOffset = 0;
  static constexpr bool kRolled = true;
#if defined(__ARM_FEATURE_DOTPROD)
  using Acc = int32x4_t;
  static constexpr bool kNarrow = false;
  static CRELLE_INLINE Acc no_sums() { return vdupq_n_s32(0); }
  template <int I>
  static CRELLE_INLINE Acc dot(Acc acc, Bytes codes, Digits x) {
    return vdotq_laneq_s32(acc, vreinterpretq_s8_u8(codes), x, I);
  }
  template <int I>
  static CRELLE_INLINE Ints dot_bytes(Ints acc, Bytes codes, Digits x) {
    return dot<I>(acc, codes, x);
  }
#else
  using Acc = int16x8_t;
  static constexpr bool kNarrow = true;
  static CRELLE_INLINE Acc no_sums() { return vdupq_n_s16(0); }
  static CRELLE_INLINE Ints sums(Acc a) { return vpaddlq_s16(a); }
  // Pairs of products, two for an output: at most 2 127^2, which 16 bits hold.
  template <int I>
  static CRELLE_INLINE int16x8_t pairs(Bytes codes, Digits x) {
    const int8x16_t four = vreinterpretq_s8_s32(vdupq_laneq_s32(vreinterpretq_s32_s8(x), I));
    const int8x16_t c = vreinterpretq_s8_u8(codes);
    return vpaddq_s16(vmull_s8(vget_low_s8(c), vget_low_s8(four)), vmull_high_s8(c, four));
  }
  template <int I>
  static CRELLE_INLINE Acc dot(Acc acc, Bytes codes, Digits x) {
    return vaddq_s16(acc, pairs<I>(codes, x));
  }
  template <int I>
  static CRELLE_INLINE Ints dot_bytes(Ints acc, Bytes codes, Digits x) {
    return vpadalq_s16(acc, pairs<I>(codes, x));
  }
#endif
  static CRELLE_INLINE Bytes load(const uint8_t *p) { return vld1q_u8(p); }
  static CRELLE_INLINE Digits digits(const uint8_t *p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
  static CRELLE_INLINE Bytes low_nibbles(Bytes v) { return vandq_u8(v, vdupq_n_u8(15)); }
  static CRELLE_INLINE Bytes high_nibbles(Bytes v) { return vshrq_n_u8(v, 4); }
  static CRELLE_INLINE Ints ints(int v) { return vdupq_n_s32(v); }
  static CRELLE_INLINE Ints add(Ints a, Ints b) { return vaddq_s32(a, b); }
  static CRELLE_INLINE Ints mul(Ints a, Ints b) { return vmulq_s32(a, b); }
  static CRELLE_INLINE Ints expand(const uint8_t *p) {
    uint32_t four;
    __builtin_memcpy(&four, p, 4);
    const uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)));
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide)));
  }
  static CRELLE_INLINE Floats floats(float v) { return vdupq_n_f32(v); }
  static CRELLE_INLINE Floats to_float(Ints v) { return vcvtq_f32_s32(v); }
  static CRELLE_INLINE Floats mul_floats(Floats a, Floats b) { return vmulq_f32(a, b); }
  static CRELLE_INLINE Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
  static CRELLE_INLINE Floats load_floats(const uint8_t *p) { return vreinterpretq_f32_u8(vld1q_u8(p)); }
  static CRELLE_INLINE Floats load_halves(const uint8_t *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
  static CRELLE_INLINE void store(float *p, Floats v) { vst1q_f32(p, v); }
};
