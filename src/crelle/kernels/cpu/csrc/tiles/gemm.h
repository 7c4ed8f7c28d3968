// Products with many rows of x (prefill): the weights are dequantized block by block and multiplied as tiles.
//
// A Gemm is an addition to an instruction set whose streams it can read. It works in two phases over the pool:
//   pack   x [M, K] into tiles of 16 rows, shared by all threads
//   run    output rows of one thread; the block's values stay in L2 while all tiles of x pass by
#pragma once

#include <cstddef>

#include "planes/activations.h"
#include "planes/weight.h"

namespace crelle::cpu {

// What is multiplied: x and W as bf16 or f32, or x rounded to int8 and W's codes. Int8 takes uniform grids whose groups
// are whole rows or multiples of 64, and only where the precision is Int8; and trellis codes, x as one or two digits.
enum class Tiles : uint8_t { Bf16, Int8, F32 };

struct Gemm {
  int rows;  // of x from which on this is the faster way
  // Groups of at least this many inputs are multiplied as int8 where that can be done; 0: none are.
  int int8_group;
  bool (*takes)(const Weight &w, Precision p);  // whether products of w may come here
  Tiles (*tiles)(const Weight &w,
                 Precision p);  // weights of one partition and one kind of tiles share what is packed of x
  size_t (*pack_bytes)(const Weight &w, int M, Precision p);
  void (*pack)(const Weight &w, const float *x, int M, Precision p, uint8_t *out, int tile0, int tile1);
  void (*run)(const Weight &w, const uint8_t *packed, int M, Precision p, float *y, size_t ldy, int b0, int b1);
  // The same for x and y that lie in tiles of 16 rows side by side, x [K][16], y [N, padded to whole blocks][16]: no
  // transposition anywhere. Pack one tile; multiply all of them, tile t of y at t * pitch, replaced or added to.
  void (*pack_tile)(const Weight &w, const float *x, Precision p, uint8_t *out);
  void (*run_tiles)(const Weight &w, const uint8_t *packed, int tiles, Precision p, float *y, size_t pitch, bool add,
                    int b0, int b1);
  // As `rows`, where that depends on the weight: where the instruction set has tiles for few rows too. Null: `rows`.
  int (*rows_of)(const Weight &w, Precision p) = nullptr;

  bool is_faster(const Weight &w, Precision p, int M) const { return M >= (rows_of ? rows_of(w, p) : rows); }
};

extern const Gemm kF32Generic;

constexpr int kTileRows = 16;
inline int tiles_of(int M) { return (M + kTileRows - 1) / kTileRows; }

#if defined(__x86_64__)
extern const Gemm kF32Avx2, kF32Avx512;                  // f32_tiles.h
extern const Gemm kAmxGemm, kAmxInt8Gemm, kAmxBf16Gemm;  // the faster; int8 wherever it can be done; nowhere
// Rows of few: as Isa::matmul of VBMI, and the same bits, by tiles where that is faster.
void matmul_digits(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1);
bool request_amx();  // ask the kernel for the tile registers; false when it refuses
#endif

}  // namespace crelle::cpu
