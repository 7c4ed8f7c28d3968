// The loops of bf16_attention.h, over a kind of tiles. A Tile has
//
//   Tile::round(a, b)      32 bf16: those of a, then those of b
//   Tile::transpose(v)     16 x 16 dwords
//   Tile::begin(), end()   around the rest, in each thread
//   Tile::multiply(x, w, steps, sums, add)
//                          sums [32, 32] = or += the products of `steps` pairs of tiles
//
// Included inside a namespace of the including file, after simd.h.

using Short = uint16_t __attribute__((vector_size(64)));

// 2^x for x <= 0 to 2^-18, where a weight keeps 2^-9: fewer instructions than exp_of. 0 for -127 and below, -infinity
// included. A NaN stays one as long as its nine lowest bits are 0, as they are where it comes from bf16 or arithmetic.
CRELLE_INLINE Vec power_of_2(Vec x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
#if defined(__AVX512F__)
  x = (Vec)_mm512_max_ps(_mm512_set1_ps(-127.0f), (__m512)x);  // GCC 12 takes two instructions for what is below
#else
  x = all(-127.0f) > x ? all(-127.0f) : x;
#endif
  const Vec shifted = x + kRound, r = x - (shifted - kRound);
  Vec p = all(9.58285e-3f);
  p = p * r + 5.590643e-2f;
  p = p * r + 2.4024099e-1f;
  p = p * r + 6.9312419e-1f;
  p = p * r + 1.0f;
  return (Vec)((Int)p + ((Int)shifted << 23));
}

template <class V>
CRELLE_INLINE V load_bits(const void *p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

CRELLE_INLINE float float_of(uint16_t bf16) {
  const uint32_t bits = uint32_t{bf16} << 16;
  float f;
  __builtin_memcpy(&f, &bits, sizeof f);
  return f;
}

// The first value of a token's head, in q or y, and in k or v.
CRELLE_INLINE size_t query_at(const CausalAttention &a, int sequence, int token, int head) {
  return ((size_t(sequence) * a.T + token) * a.H + head) * a.D;
}
CRELLE_INLINE size_t key_at(const CausalAttention &a, int sequence, int token, int head) {
  return ((size_t(sequence) * a.T + token) * a.Hkv + head) * a.D;
}

// 32 channels of 16 tokens, zeros beyond the last one; from: the first value.
CRELLE_INLINE void load_tokens(const uint16_t *from, size_t stride, int tokens, Int (&v)[16]) {
  if (tokens >= 16) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) v[i] = load_bits<Int>(from + i * stride);
    return;
  }
  for (int i = 0; i < 16; ++i) v[i] = i < tokens ? load_bits<Int>(from + i * stride) : Int{};
}

template <class Tile>
CRELLE_INLINE void pack_keys(const CausalAttention &a, int sequence, int head, const AttentionRoom &room) {
  const size_t stride = size_t(a.Hkv) * a.D;
  uint8_t *to = room.keys;
  for (int block = 0; block < a.blocks(); ++block)
    for (int step = 0; step < a.steps(); ++step)
      for (int half = 0; half < 2; ++half, to += kPairBytes / 2) {
        const int token = block * kBlock + half * 16;
        Int v[16];
        load_tokens(a.k + key_at(a, sequence, std::min(token, a.T - 1), head) + step * kStepInputs, stride, a.T - token,
                    v);
        Tile::transpose(v);
        __builtin_memcpy(to, v, sizeof v);
      }
}

CRELLE_INLINE void pack_values(const CausalAttention &a, int sequence, int head, const AttentionRoom &room) {
  const size_t stride = size_t(a.Hkv) * a.D;
  const int blocks = a.blocks();
  for (int block = 0; block < blocks; ++block) {
    Short wrong = {};
    for (int step = 0; step < a.steps(); ++step)
      for (int half = 0; half < 2; ++half) {
        const int token = block * kBlock + half * 16;
        Int v[16];
        load_tokens(a.v + key_at(a, sequence, std::min(token, a.T - 1), head) + step * kStepInputs, stride, a.T - token,
                    v);
        // Eight rows of either tile: pairs of neighbouring tokens.
        uint8_t *const to = room.values + (size_t(step) * blocks + block) * kPairBytes + half * (kPairBytes / 4);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
          const Short first = (Short)v[2 * i], second = (Short)v[2 * i + 1];
          wrong |= (Short)((first & 0x7f80) == 0x7f80) | (Short)((second & 0x7f80) == 0x7f80);
          const Short low = __builtin_shufflevector(first, second, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7,
                                                    39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47);
          const Short high =
              __builtin_shufflevector(first, second, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24,
                                      56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63);
          __builtin_memcpy(to + i * 64, &low, sizeof low);
          __builtin_memcpy(to + kPairBytes / 2 + i * 64, &high, sizeof high);
        }
      }
    uint64_t any[8], found = 0;
    __builtin_memcpy(any, &wrong, sizeof any);
    for (const uint64_t some : any) found |= some;
    room.finite[block] = found == 0;
  }
}

// A block of queries of one head.
struct QueryBlock {
  int sequence, head, key_head, index;
};

CRELLE_INLINE void copy_queries(const CausalAttention &a, const QueryBlock &b, const AttentionRoom &room) {
  for (int i = 0; i < kBlock; ++i) {
    const int token = b.index * kBlock + i;
    uint8_t *const to = room.queries + i * 64;
    if (token < a.T) {
      const uint16_t *const from = a.q + query_at(a, b.sequence, token, b.head);
      for (int step = 0; step < a.steps(); ++step)
        __builtin_memcpy(to + step * kPairBytes, from + step * kStepInputs, 64);
    } else {
      for (int step = 0; step < a.steps(); ++step) __builtin_memset(to + step * kPairBytes, 0, 64);
    }
  }
}

// Scores of all keys that some query sees, as they come out of the product, -infinity where it does not see one; and
// the largest of each query, lane by lane. Tokens beyond T are seen by none before.
template <class Tile>
CRELLE_INLINE void score(const CausalAttention &a, const QueryBlock &b, const AttentionRoom &room) {
  const Int lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const Vec unseen = all(-__builtin_inff());
  for (int i = 0; i < kBlock; ++i) store(room.tops + i * kLanes, unseen);
  for (int block = 0; block <= b.index; ++block) {
    float *const scores = room.scores + size_t(block) * kSums;
    Tile::multiply(room.queries, room.keys + size_t(block) * a.steps() * kPairBytes, a.steps(), scores, false);
    if (block == b.index)
      for (int i = 0; i < kBlock; ++i) {
        float *const row = scores + i * kBlock;
        store(row, lane > i ? unseen : load(row));
        store(row + kLanes, lane + kLanes > i ? unseen : load(row + kLanes));
      }
#pragma GCC unroll 4
    for (int i = 0; i < kBlock; ++i) {
      const Vec low = load(scores + i * kBlock), high = load(scores + i * kBlock + kLanes);
      store(room.tops + i * kLanes, larger(high, larger(low, load(room.tops + i * kLanes))));
    }
  }
}

// Weights of one block of keys. tops: the largest score of each query; factor: what makes scores powers of two. A
// product with the factor before the difference would save an instruction, and lose large scores to rounding.
template <class Tile>
CRELLE_INLINE void weigh(const float *scores, const float *tops, float factor, float *totals, uint8_t *weights) {
#pragma GCC unroll 2
  for (int i = 0; i < kBlock; ++i) {
    const Vec low = power_of_2((load(scores + i * kBlock) - tops[i]) * factor);
    const Vec high = power_of_2((load(scores + i * kBlock + kLanes) - tops[i]) * factor);
    store(totals + i * kLanes, load(totals + i * kLanes) + (low + high));
    const Int both = Tile::round(low, high);
    __builtin_memcpy(weights + i * 64, &both, sizeof both);
  }
}

// Values of the queries' own block times their weights, without those that a query does not see: of something that is
// not finite not even a weight of 0 leaves nothing.
inline void add_seen(const CausalAttention &a, const QueryBlock &b, const uint8_t *weights, float *sums) {
  for (int i = 0; i < kBlock; ++i)
    for (int j = 0; j <= i && b.index * kBlock + j < a.T; ++j) {
      uint16_t weight;
      __builtin_memcpy(&weight, weights + (i * kBlock + j) * sizeof weight, sizeof weight);
      const uint16_t *const value = a.v + key_at(a, b.sequence, b.index * kBlock + j, b.key_head);
      for (int d = 0; d < a.D; ++d)
        sums[d / kBlock * kSums + i * kBlock + d % kBlock] += float_of(weight) * float_of(value[d]);
    }
}

// Sums to outputs.
template <class Tile>
CRELLE_INLINE void divide(const CausalAttention &a, const QueryBlock &b, const AttentionRoom &room) {
  const int first = b.index * kBlock, rows = std::min(kBlock, a.T - first);
  for (int i = 0; i < rows; ++i) {
    const Vec inverse = all(1.0f / sum_of(load(room.totals + i * kLanes)));
    uint16_t *const y = a.y + query_at(a, b.sequence, first + i, b.head);
    for (int step = 0; step < a.steps(); ++step) {
      const float *const sums = room.sums + step * kSums + i * kBlock;
      const Int both = Tile::round(load(sums) * inverse, load(sums + kLanes) * inverse);
      __builtin_memcpy(y + step * kStepInputs, &both, sizeof both);
    }
  }
}

template <class Tile>
void attend_queries(const CausalAttention &a, const QueryBlock &b, const AttentionRoom &room) {
  const float factor = 1.44269504f / __builtin_sqrtf(static_cast<float>(a.D));
  copy_queries(a, b, room);
  score<Tile>(a, b, room);
  float tops[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    tops[i] = top_of(load(room.tops + i * kLanes));
    store(room.totals + i * kLanes, Vec{});
  }
  const int blocks = a.blocks(), keys = b.index + 1;
  for (int from = 0; from < keys; from += kChunkBlocks) {
    const int count = std::min(kChunkBlocks, keys - from);
    for (int i = 0; i < count; ++i)
      weigh<Tile>(room.scores + size_t(from + i) * kSums, tops, factor, room.totals, room.weights + i * kPairBytes);
    const bool apart = from + count == keys && !room.finite[b.index];
    for (int step = 0; step < a.steps(); ++step)
      Tile::multiply(room.weights, room.values + (size_t(step) * blocks + from) * kPairBytes, count - apart,
                     room.sums + step * kSums, from > 0);
    if (apart) add_seen(a, b, room.weights + (count - 1) * kPairBytes, room.sums);
  }
  divide<Tile>(a, b, room);
}

template <class Tile>
void attend(const CausalAttention &a, size_t unit0, size_t unit1, uint8_t *own) {
  const AttentionRoom room(a, own);
  const int blocks = a.blocks();
  size_t packed = ~size_t{0};
  Tile::begin();
  for (size_t unit = unit0; unit < unit1; ++unit) {
    const size_t keys = unit / a.parts;
    const int part = static_cast<int>(unit % a.parts);
    const int sequence = static_cast<int>(keys / a.Hkv), key_head = static_cast<int>(keys % a.Hkv);
    if (keys != packed) {
      pack_keys<Tile>(a, sequence, key_head, room);
      pack_values(a, sequence, key_head, room);
      packed = keys;
    }
    // Back and forth, so that parts see about equally many keys.
    for (int round = 0; round * a.parts < blocks; ++round) {
      const int index = round * a.parts + (round % 2 ? a.parts - 1 - part : part);
      if (index >= blocks) continue;
      for (int i = 0; i < a.group(); ++i)
        attend_queries<Tile>(a, {sequence, key_head * a.group() + i, key_head, index}, room);
    }
  }
  Tile::end();
}
