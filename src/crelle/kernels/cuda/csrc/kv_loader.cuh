// How a warp loads tiles of 16 tokens of one key head: which bytes of the pages a lane copies, and where to.
#pragma once
#include "copies.cuh"
#include "kv_fragments.cuh"

namespace crelle {

// Where the tiles of 16 tokens of one key head are, and what a lane copies of them.
template <int D, int BITS, int C>
struct KVLoader {
  using P = Pages<D, BITS, C>;
  static constexpr int ALONG = P::ROW / P::PIECE, PIECES = 16 * ALONG, WORDS = 4 * C;  // copies of a tile

  const int *table;  // of the sequence
  int page, kv_heads, kv, lane, place;
  const char *keys, *values, *words;

  __device__ KVLoader(const char *codes, const char *words, const int *table, int page, int kv_heads, int kv, int lane)
      : table(table), page(page), kv_heads(kv_heads), kv(kv), lane(lane), place(P::place(lane)), words(words) {
    keys = codes + lane * P::PIECE, values = keys + (size_t)page * kv_heads * P::ROW;
    if (P::CODED && WORDS <= 32) this->words += words_at(lane);
  }

  // The row (of a token and head) at which the keys of a tile begin; its values are `page * kv_heads` behind.
  __device__ __forceinline__ uint32 row(int tile) const {
    const int per = page / 16;
    return ((uint32)__ldcg(table + tile / per) * 2 * kv_heads + kv) * page + tile % per * 16;
  }
  __device__ __forceinline__ size_t words_at(int piece) const {
    return (size_t)(piece / (2 * C + !C) ? page * kv_heads : 0) * (2 * C) + piece % (2 * C + !C) * 16;
  }

  // Ask for all of a tile.
  __device__ __forceinline__ void issue_load(uint32 to, uint32 row) const {
#pragma unroll
    for (int kind = 0; kind < 2; kind++) {
      const char *from = (kind ? values : keys) + (size_t)row * P::ROW;
#pragma unroll
      for (int j = 0; j < (PIECES + 31) / 32; j++) {
        if (PIECES % 32 && lane + 32 * j >= PIECES) break;
        const int at = P::PIECE == 16 ? P::place_behind(place, j) : place_of_half(lane + 32 * j);
        copy_padded<P::PIECE>(to + kind * P::CODES + at, from + 32 * j * P::PIECE);
      }
    }
    if constexpr (P::CODED && WORDS <= 32) {
      if (WORDS == 32 || lane < WORDS) copy_padded<16>(to + 2 * P::CODES + 16 * lane, words + (size_t)row * (2 * C));
    } else {
#pragma unroll
      for (int j = 0; j < WORDS / 32; j++)
        copy_padded<16>(to + 2 * P::CODES + 16 * (lane + 32 * j),
                        words + (size_t)row * (2 * C) + words_at(lane + 32 * j));
    }
  }
  // Ask for a tile of which only `count` tokens are there; seldom.
  __device__ __forceinline__ void issue_load(uint32 to, uint32 row, int count) const {
#pragma unroll 1
    for (int piece = lane; piece < 2 * PIECES; piece += 32) {
      const int kind = piece >= PIECES, i = piece - kind * PIECES;
      const char *from = (kind ? values : keys) + (size_t)row * P::ROW + (i - lane) * P::PIECE;
      const int at = P::PIECE == 16 ? P::place(i) : place_of_half(i);
      copy_padded<P::PIECE>(to + kind * P::CODES + at, from, i / ALONG < count ? P::PIECE : 0);
    }
    if constexpr (P::CODED) {
#pragma unroll 1
      for (int piece = lane; piece < WORDS; piece += 32)
        copy_padded<16>(to + 2 * P::CODES + 16 * piece,
                        words + (size_t)row * (2 * C) + words_at(piece) - (WORDS <= 32 ? words_at(lane) : 0),
                        min(16, max(0, (count * C - piece % (2 * C) * 8) * 2)));
    }
  }
  static __device__ __forceinline__ int place_of_half(int piece) {
    const int at = piece % ALONG * P::PIECE;
    return P::place(at / 16, piece / ALONG) + at % 16;
  }
};

}  // namespace crelle
