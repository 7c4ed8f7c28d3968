// How a warp loads tiles of 16 tokens of one key head: which bytes of the pages a lane copies, and where to.
#pragma once
#include "ptx/copies.cuh"
#include "attention/kv_fragments.cuh"

namespace crelle {

// Where the tiles of 16 tokens of one key head are, and what a lane copies of them.
// Where keys and values are stored alike, they lie at row * ROW, and `page * kv_heads` rows behind; APART takes pages
// of 16 tokens, whose keys and values begin at places that are linear in the row as well.
template <int D, int K_BITS, int K_C, int V_BITS, int V_C>
struct KVLoader {
  using T = TileOfPages<D, K_BITS, K_C, V_BITS, V_C>;
  using K = typename T::Keys;
  using V = typename T::Values;
  static constexpr bool APART = T::APART;
  static constexpr int STRIDE = APART ? K::ROW + V::ROW : K::ROW, WORDS_STRIDE = APART ? 2 * (K_C + V_C) : 2 * K_C;
  static constexpr int WORDS = 2 * (K_C + V_C);  // copies of a tile

  const int *table;  // of the sequence
  int page, kv_heads, kv, lane;
  const char *keys, *values, *words;

  __device__ KVLoader(const char *codes, const char *words, const int *table, int page, int kv_heads, int kv, int lane)
      : table(table), page(page), kv_heads(kv_heads), kv(kv), lane(lane), words(words) {
    if constexpr (APART) {
      const long long before = kv * 16, all = kv_heads * 16;
      keys = codes - before * V::ROW + lane * K::PIECE, values = codes + (all - before) * K::ROW + lane * V::PIECE;
    } else {
      keys = codes + lane * K::PIECE, values = keys + (size_t)page * kv_heads * K::ROW;
    }
    if (K::CODED && WORDS <= 32) this->words += words_at(lane);
  }

  // Which entry of the table has a tile's page; mostly pages are tiles, and a division takes long.
  static __device__ __forceinline__ int entry_of(int tile, int page) {
    return APART || page == 16 ? tile : tile / (page / 16);
  }
  // The row (of a token and head) at which the keys of a tile begin; its values are `page * kv_heads` behind.
  __device__ __forceinline__ uint32 row(int tile, int entry) const {
    if constexpr (APART) return ((uint32)entry * kv_heads + kv) * 16;
    const uint32 row = ((uint32)entry * 2 * kv_heads + kv) * page;
    return page == 16 ? row : row + tile % (page / 16) * 16;
  }
  __device__ __forceinline__ uint32 row(int tile) const { return row(tile, __ldcg(table + entry_of(tile, page))); }
  // From the row's place to a piece of its packed scales, those of keys first.
  __device__ __forceinline__ long long words_at(int piece) const {
    if constexpr (APART) {
      const long long before = kv * 16, all = kv_heads * 16;
      return piece < 2 * K_C ? piece * 16 - before * 2 * V_C : (all - before) * 2 * K_C + (piece - 2 * K_C) * 16;
    }
    return (long long)(piece / (2 * K_C + !K_C) ? page * kv_heads : 0) * (2 * K_C) + piece % (2 * K_C + !K_C) * 16;
  }

  template <typename P>
  __device__ __forceinline__ void issue_codes(uint32 to, const char *from) const {
    constexpr int PIECES = 16 * P::ROW / P::PIECE;
    const int place = P::place(lane);
#pragma unroll
    for (int j = 0; j < (PIECES + 31) / 32; j++) {
      if (PIECES % 32 && lane + 32 * j >= PIECES) break;
      const int at = P::PIECE == 16 ? P::place_behind(place, j) : place_of_half<P>(lane + 32 * j);
      copy_padded<P::PIECE>(to + at, from + 32 * j * P::PIECE);
    }
  }
  template <typename P>
  __device__ __forceinline__ void issue_codes(uint32 to, const char *from, int count) const {
    constexpr int ALONG = P::ROW / P::PIECE, PIECES = 16 * ALONG;
#pragma unroll 1
    for (int i = lane; i < PIECES; i += 32) {
      const int at = P::PIECE == 16 ? P::place(i) : place_of_half<P>(i);
      copy_padded<P::PIECE>(to + at, from + (i - lane) * P::PIECE, i / ALONG < count ? P::PIECE : 0);
    }
  }

  // Ask for all of a tile.
  __device__ __forceinline__ void issue_load(uint32 to, uint32 row) const {
    issue_codes<K>(to, keys + (size_t)row * STRIDE);
    issue_codes<V>(to + T::VALUES, values + (size_t)row * STRIDE);
    if constexpr (K::CODED && WORDS <= 32) {
      if (WORDS == 32 || lane < WORDS) copy_padded<16>(to + T::WORDS + 16 * lane, words + (size_t)row * WORDS_STRIDE);
    } else if constexpr (K::CODED) {
#pragma unroll
      for (int j = 0; j < (WORDS + 31) / 32; j++)
        if (WORDS % 32 == 0 || lane + 32 * j < WORDS)
          copy_padded<16>(to + T::WORDS + 16 * (lane + 32 * j),
                          words + (size_t)row * WORDS_STRIDE + words_at(lane + 32 * j));
    }
  }
  // Ask for a tile of which only `count` tokens are there; seldom.
  __device__ __forceinline__ void issue_load(uint32 to, uint32 row, int count) const {
    issue_codes<K>(to, keys + (size_t)row * STRIDE, count);
    issue_codes<V>(to + T::VALUES, values + (size_t)row * STRIDE, count);
    if constexpr (K::CODED) {
#pragma unroll 1
      for (int piece = lane; piece < WORDS; piece += 32) {
        const bool key = piece < 2 * K_C;
        const int there = count * (key ? K_C : V_C) - (key ? piece : piece - 2 * K_C) * 8;  // words, from this piece on
        copy_padded<16>(to + T::WORDS + 16 * piece,
                        words + (size_t)row * WORDS_STRIDE + words_at(piece) - (WORDS <= 32 ? words_at(lane) : 0),
                        min(16, max(0, there * 2)));
      }
    }
  }
  template <typename P>
  static __device__ __forceinline__ int place_of_half(int piece) {
    constexpr int ALONG = P::ROW / P::PIECE;
    const int at = piece % ALONG * P::PIECE;
    return P::place(at / 16, piece / ALONG) + at % 16;
  }
};

}  // namespace crelle
