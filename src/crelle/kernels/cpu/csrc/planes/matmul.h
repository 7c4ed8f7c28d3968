// y [M, N] = x [M, K] W^T: what the rest of the module calls.
//
// One shot:            matmul(x, M, w, y, Precision::Exact);
// Shared activations:  Activations a; prepare_activations(a, x, M, wq, Precision::Exact);
//                      if (a.fits(wk)) matmul(wk, a, yk, ldy);            // q, k, v and gate, up share one preparation
// Inside a parallel region of the caller (Pool::run_team), thread t of n:
//                      auto [row0, row1] = rows_of_thread(w, t, n);
//                      matmul_rows(w, a, y, ldy, row0, row1);
#pragma once

#include <cstddef>
#include <utility>

#include "decoder/ops.h"
#include "planes/activations.h"
#include "isa/isa.h"
#include "base/pool.h"
#include "planes/weight.h"

namespace crelle::cpu {

// Encode x [M, K] (row stride K) for w, on the pool.
void prepare_activations(Activations &a, const float *x, int M, const Weight &w, Precision precision);

// Encode rows [m0, m1) only; `a` has been shaped for w or one of its shape. For callers that are parallel themselves.
void encode_rows(Activations &a, const Weight &w, const float *x, size_t ldx, int m0, int m1);

// Rows of x that pass by a block of w at a time, where they are not multiplied as tiles.
int rows_at_once(const Weight &w);

// The output rows of thread t of n: whole blocks, so that no two threads write one cache line of the weights' block.
std::pair<int, int> rows_of_thread(const Weight &w, int t, int n);

// Outputs [row0, row1) for every row of `a`, still rotated where the matrix has rotated outputs. row0 is the start of a
// block; row1 too, or N.
void matmul_rows(const Weight &w, const Activations &a, float *y, size_t ldy, int row0, int row1);

// The same for all outputs, split over the pool.
void matmul(const Weight &w, const Activations &a, float *y, size_t ldy);

// Everything at once, with a scratch of the calling thread. by_tiles: by the instruction set's Gemm, which must be
// there; a row has the same bits in any number of rows with it, and other bits in any number without.
void matmul(const float *x, int M, const Weight &w, float *y, Precision precision, bool by_tiles);

// The same by tiles where there are enough rows for them to be faster.
void matmul(const float *x, int M, const Weight &w, float *y, Precision precision);

// The same for x and y of 16 bits: x is widened, y [M, N] is rounded once, by the threads that encode and multiply.
void matmul(const uint8_t *x, DType type, int M, const Weight &w, uint8_t *y, Precision precision);

}  // namespace crelle::cpu
