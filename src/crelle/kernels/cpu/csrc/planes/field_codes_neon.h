// field_codes.h by sdot (Armv8.2): 16 multiply-adds an instruction, with x in one byte twice the rate of f32 and more.
//
// Included inside a namespace of the including file, before field_codes.h.

struct FieldV {
  using Codes = int8x16_t;
  using Digits = int8x16_t;
  using Ints = int32x4_t;
  using Floats = float32x4_t;
  static constexpr int kLanes = 4;
  static constexpr int kSums = 16;                 // accumulators that fit the registers
  static constexpr int kMostRows = 8;              // of x in one byte that share an unpacked segment at a time
  static constexpr int kMostBits = 8;              // of a code
  static constexpr bool kByWords = false;          // codes of 8 bits: see word_codes_x86.h
  static constexpr int kDigitSteps = 4;            // vectors of codes that a vector of digits serves
  static constexpr float kByteOffset = kByteZero;  // codes of 8 bits are multiplied less this

  // Codes of many bits take little to unpack: few functions, which take long to compile, read them from their fields.
  static constexpr int few_rows(int P, int D) { return P <= 4 ? kMostRows / D : kMostRows / D / 2; }

  static CRELLE_INLINE Codes load(const uint8_t *p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }
  static CRELLE_INLINE void store(uint8_t *p, Codes v) { vst1q_u8(p, vreinterpretq_u8_s8(v)); }
  static CRELLE_INLINE Codes unflipped(Codes v) { return v; }
  // Fields of F bits: moved up by Up bits (down, if negative), so that they begin at bit First; other bits become 0.
  template <int F, int Up, int First>
  static CRELLE_INLINE Codes bits(Codes codes) {
    uint8x16_t v = vreinterpretq_u8_s8(codes);
    if constexpr (Up > 0) v = vshlq_n_u8(v, Up);
    if constexpr (Up < 0) v = vshrq_n_u8(v, -Up);
    if constexpr (Up != F - 8) v = vandq_u8(v, vdupq_n_u8(static_cast<uint8_t>(((1 << F) - 1) << First)));
    return vreinterpretq_s8_u8(v);
  }
  static CRELLE_INLINE Codes either(Codes a, Codes b) { return vorrq_s8(a, b); }
  static CRELLE_INLINE Digits digits(const uint8_t *p) { return vreinterpretq_s8_u8(vld1q_u8(p)); }

  // Sums over a chunk.
  struct Sums {
    using Chunk = Ints;
    static constexpr bool kChunked = false;
    template <int Lane>
    static CRELLE_INLINE Chunk add(Chunk sum, Codes w, Digits d) {
      return vdotq_laneq_s32(sum, w, d, Lane);
    }
    static CRELLE_INLINE Ints end(Ints sum, Chunk part, int factor);  // of those in chunks only
  };

  static CRELLE_INLINE Ints zero() { return vdupq_n_s32(0); }
  static CRELLE_INLINE Ints add(Ints a, Ints b) { return vaddq_s32(a, b); }
  static CRELLE_INLINE Ints times_256(Ints a) { return vshlq_n_s32(a, 8); }
  static CRELLE_INLINE Floats to_float(Ints a) { return vcvtq_f32_s32(a); }
  static CRELLE_INLINE Floats floats(float v) { return vdupq_n_f32(v); }
  static CRELLE_INLINE Floats mul(Floats a, Floats b) { return vmulq_f32(a, b); }
  static CRELLE_INLINE Floats sub(Floats a, Floats b) { return vsubq_f32(a, b); }
  static CRELLE_INLINE Floats negative(Floats a) { return vnegq_f32(a); }
  static CRELLE_INLINE Floats fma(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }            // a b + c
  static CRELLE_INLINE Floats minus_product(Floats c, Floats a, Floats b) { return vfmsq_f32(c, a, b); }  // c - a b
  static CRELLE_INLINE Floats load_floats(const uint8_t *p) { return vreinterpretq_f32_u8(vld1q_u8(p)); }
  static CRELLE_INLINE Floats load_halves(const uint8_t *p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
  static CRELLE_INLINE Floats load_bytes(const uint8_t *p) {
    uint32_t four;
    __builtin_memcpy(&four, p, 4);
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four))))));
  }
};
