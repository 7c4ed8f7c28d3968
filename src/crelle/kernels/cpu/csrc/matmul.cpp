#include "matmul.h"

#include <algorithm>
#include <cassert>

namespace crelle::cpu {

void Activations::shape(const Weight &w, int rows, Precision wanted) {
  isa = w.isa;
  stream = w.stream;
  precision = wanted;
  M = rows;
  plan = w.plan;
  row_bytes = size_t(plan.chunks) * (takes_tables(stream) ? 128 : 32) * digits();
  row_bytes = (row_bytes + 63) / 64 * 64;
  codes.grow(M * row_bytes);
  scale_buffer.grow(sizeof(float) * M * plan.segments);
  sum_buffer.grow(sizeof(float) * M * plan.groups);
}

void encode_rows(Activations &a, const float *x, size_t ldx, int m0, int m1) { a.isa->encode(a, x, ldx, m0, m1); }

void prepare_activations(Activations &a, const float *x, int M, const Weight &w, Precision precision) {
  a.shape(w, M, precision);
  encode_rows(a, x, w.K, 0, M);
}

std::pair<int, int> rows_of_thread(const Weight &w, int t, int n) {
  return {part(w.blocks, t, n) * w.R, std::min(w.N, part(w.blocks, t + 1, n) * w.R)};
}

void matmul_rows(const Weight &w, const Activations &a, float *y, size_t ldy, int row0, int row1) {
  assert(a.fits(w) && row0 % w.R == 0);
  if (row0 < row1) w.isa->matmul(w, a, y, ldy, row0 / w.R, (row1 + w.R - 1) / w.R);
}

void matmul(const Weight &w, const Activations &a, float *y, size_t ldy) {
  Pool::get().run([&](int t, int n) {
    const auto [row0, row1] = rows_of_thread(w, t, n);
    matmul_rows(w, a, y, ldy, row0, row1);
  });
}

namespace {

void matmul_tiles(const float *x, int M, const Weight &w, float *y, Precision precision) {
  static thread_local Buffer scratch;
  const Gemm &gemm = *w.isa->gemm;
  scratch.grow(gemm.pack_bytes(w, M, precision));
  uint8_t *packed = scratch.data();
  const int tiles = tiles_of(M);
  Pool::get().run(
      [&](int t, int n) { gemm.pack(w, x, M, precision, packed, part(tiles, t, n), part(tiles, t + 1, n)); });
  Pool::get().run(
      [&](int t, int n) { gemm.run(w, packed, M, precision, y, w.N, part(w.blocks, t, n), part(w.blocks, t + 1, n)); });
}

}  // namespace

void matmul(const float *x, int M, const Weight &w, float *y, Precision precision) {
  static thread_local Activations scratch;
  Activations &a = scratch;  // this thread's, also in the workers' lambdas
  // Rows taken at a time: tables of 64 rows of 4096 inputs are 1 MB and stay in L2; tiles are read in order.
  const bool tiles = w.isa->gemm && M >= w.isa->gemm->rows;
  const int at_once = tiles ? 1024 : 64;
  for (int m = 0; m < M; m += at_once) {
    const int rows = std::min(at_once, M - m);
    const float *xm = x + size_t(m) * w.K;
    float *ym = y + size_t(m) * w.N;
    if (tiles) {
      matmul_tiles(xm, rows, w, ym, precision);
      continue;
    }
    a.shape(w, rows, precision);
    if (rows == 1)
      encode_rows(a, xm, w.K, 0, 1);
    else
      Pool::get().run([&](int t, int n) { encode_rows(a, xm, w.K, part(rows, t, n), part(rows, t + 1, n)); });
    matmul(w, a, ym, w.N);
  }
}

}  // namespace crelle::cpu
