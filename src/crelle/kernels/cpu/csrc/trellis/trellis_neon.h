// The vectors of trellis_kernel.h on NEON: dot products of bytes by sdot where the file is compiled for it, otherwise
// the bytes of a weight are added up and multiplied by 16 bits of x.
//
// Included inside a namespace of the including file.

struct TrellisV {
  using Word = uint64x2_t;
  using Ints = int32x4_t;
  using Floats = float32x4_t;
  static constexpr int kSequences = 2;

  static CRELLE_INLINE Word load(const uint8_t *p) { return vreinterpretq_u64_u8(vld1q_u8(p)); }
  static CRELLE_INLINE Word middle(Word a, Word b) { return vsliq_n_u64(vshrq_n_u64(a, 32), b, 32); }
  template <int A, int B>
  static CRELLE_INLINE Ints states(Word w) {
    if constexpr (A > 0) w = vshrq_n_u64(w, A);
    const uint32x4_t low = vreinterpretq_u32_u64(w), both = vtrn1q_u32(low, low);
    const int32x4_t right = {0, A - B, 0, A - B};
    return vreinterpretq_s32_u32(vandq_u32(vshlq_u32(both, right), vdupq_n_u32(0xffff)));
  }
  static CRELLE_INLINE Ints ints(int v) { return vdupq_n_s32(v); }
  static CRELLE_INLINE Ints load_ints(const uint8_t *p) { return vreinterpretq_s32_u8(vld1q_u8(p)); }
  static CRELLE_INLINE Ints times(Ints a, Ints b) { return vmulq_s32(a, b); }
#if defined(__ARM_FEATURE_DOTPROD)
  using X = int8x16_t;
  static constexpr bool kDigits = true;
  // sdot takes both factors signed: bytes less 128, of which a weight has two or four.
  template <bool Pair>
  static CRELLE_INLINE Ints minus_zero(Ints sums) {
    return vmulq_n_s32(sums, 128 * (Pair ? 2 : 4) - trellis_code(Pair).zero);
  }
  template <bool Pair, int Part>
  static CRELLE_INLINE X inputs(const uint8_t *p) {
    const uint8x8_t bytes = vld1_u8(p);
    const uint8x16_t twice = vcombine_u8(bytes, bytes);
    if constexpr (Pair) {
      const uint16x8_t two = vreinterpretq_u16_u8(twice);
      return vreinterpretq_s8_u16(vzip1q_u16(two, two));
    }
    const uint8x16_t even = {0, 0, 0, 0, 2, 2, 2, 2, 4, 4, 4, 4, 6, 6, 6, 6};
    return vreinterpretq_s8_u8(vqtbl1q_u8(twice, vaddq_u8(even, vdupq_n_u8(Part))));
  }
  template <bool Pair>
  static CRELLE_INLINE Ints factor(Ints products) {
    return veorq_s32(products, vreinterpretq_s32_u8(vdupq_n_u8(128)));
  }
  static CRELLE_INLINE Ints dot(Ints acc, Ints factor, X x) { return vdotq_s32(acc, vreinterpretq_s8_s32(factor), x); }
#else
  using X = int16x8_t;
  static constexpr bool kDigits = false;
  template <bool Pair>
  static CRELLE_INLINE Ints minus_zero(Ints sums) {
    return vmulq_n_s32(sums, -trellis_code(Pair).zero);
  }
  template <bool Pair, int Part>
  static CRELLE_INLINE X inputs(const uint8_t *p) {
    const int16x8_t x = vreinterpretq_s16_u8(vld1q_u8(p));
    if constexpr (Pair) return x;
    return Part ? vtrn2q_s16(x, x) : vtrn1q_s16(x, x);
  }
  // Sums of bytes as 16 bits: of both weights of a dword, or of its first and its last two bytes.
  template <bool Pair>
  static CRELLE_INLINE Ints factor(Ints products) {
    if constexpr (!Pair) return vreinterpretq_s32_u16(vpaddlq_u8(vreinterpretq_u8_s32(products)));
    const uint16x8_t two = vreinterpretq_u16_s32(products);
    const uint32x4_t first = vpaddlq_u16(vandq_u16(two, vdupq_n_u16(0xff))), second = vpaddlq_u16(vshrq_n_u16(two, 8));
    return vreinterpretq_s32_u32(vsliq_n_u32(first, second, 16));
  }
  static CRELLE_INLINE Ints dot(Ints acc, Ints values, X x) {
    const int16x8_t v = vreinterpretq_s16_s32(values);
    return vaddq_s32(acc, vpaddq_s32(vmull_s16(vget_low_s16(v), vget_low_s16(x)), vmull_high_s16(v, x)));
  }
#endif
  static CRELLE_INLINE Ints digit_sums(Ints hi, Ints lo) { return vaddq_s32(vshlq_n_s32(hi, 8), lo); }
  static CRELLE_INLINE Floats floats(float v) { return vdupq_n_f32(v); }
  static CRELLE_INLINE Floats to_float(Ints v) { return vcvtq_f32_s32(v); }
  static CRELLE_INLINE Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
  static CRELLE_INLINE Floats load_floats(const uint8_t *p) { return vreinterpretq_f32_u8(vld1q_u8(p)); }
  static CRELLE_INLINE void store_ints(uint8_t *p, Ints v) { vst1q_u8(p, vreinterpretq_u8_s32(v)); }
  static CRELLE_INLINE void store(float *p, Floats v) { vst1q_f32(p, v); }
};
