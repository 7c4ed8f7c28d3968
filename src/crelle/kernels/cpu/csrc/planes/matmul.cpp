#include "planes/matmul.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <limits>
#include <memory>
#include <vector>

namespace crelle::cpu {

void Activations::shape(const Weight &w, int rows, Precision wanted) {
  isa = w.isa;
  stream = w.stream;
  precision = wanted;
  M = rows;
  partition = w.partition;
  factor_buffer.grow(sizeof(float) * M);
  mixed = w.mixed;
  integer = w.integer;
  trellis = w.trellis;
  if (stream == Stream::Integer) {
    row_bytes = integer->row_bytes;
    codes.grow(size_t(tiles_of(M)) * kTileRows * row_bytes);  // tiles read whole ones
    return;
  }
  if (stream == Stream::Trellis) {
    row_bytes = trellis->row_bytes;
    codes.grow(M * row_bytes);
    return;
  }
  if (stream == Stream::Mixed) {
    row_bytes = MixedInputs(w.K, partition.G, digits()).bytes;
    codes.grow(M * row_bytes);
    return;
  }
  row_bytes = size_t(partition.chunks) * (takes_tables(stream) ? 128 : 32) * digits();
  row_bytes = (row_bytes + 63) / 64 * 64;
  codes.grow(M * row_bytes);
  scale_buffer.grow(sizeof(float) * M * partition.segments);
  sum_buffer.grow(sizeof(float) * M * partition.groups);
}

namespace {

// The bits of the largest magnitude: finite < infinity < NaN.
uint32_t top_bits(const float *x, int n) {
  uint32_t top = 0;
  for (int i = 0; i < n; ++i) top = std::max(top, std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu);
  return top;
}

constexpr uint32_t kInfinity = 0x7f800000u, kOne = 0x3f800000u, kLarge = 0x71800000u, kSmall = 0x21800000u;

void encode(Activations &a, const Weight &w, const float *x, size_t ldx, int m0, int m1) {
  if (a.stream == Stream::Mixed)
    a.isa->mixed->encode(w, a, x, ldx, m0, m1);
  else if (a.stream == Stream::Integer)
    a.isa->integer->encode(w, a, x, ldx, m0, m1);
  else if (a.stream == Stream::Trellis)
    a.isa->trellis->encode(w, a, x, ldx, m0, m1);
  else
    a.isa->encode(a, x, ldx, m0, m1);
}

// A row that the encoders leave to us: see activations.h.
void encode_unusual(Activations &a, const Weight &w, const float *x, int m) {
  const int K = a.partition.K;
  const uint32_t top = top_bits(x, K);
  std::vector<float> copy(K, 0.0f);
  float factor = std::numeric_limits<float>::quiet_NaN();
  if (top < kInfinity) {
    const float up = top < kOne ? 0x1p100f : 0x1p-64f;
    for (int k = 0; k < K; ++k) copy[k] = x[k] * up;
    factor = 1.0f / up;
  }
  encode(a, w, copy.data(), 0, m, m + 1);
  a.factor(m) = factor;
}

}  // namespace

void encode_rows(Activations &a, const Weight &w, const float *x, size_t ldx, int m0, int m1) {
  assert(a.same_shape(w));
  encode(a, w, x, ldx, m0, m1);
  for (int m = m0; m < m1; ++m)
    if (a.factor(m) == 0.0f) encode_unusual(a, w, x + size_t(m) * ldx, m);
}

namespace {

// Keeps the floats of a product of 16 bits, as far as they are few: a large block of memory that is asked for in every
// call is new pages in every call.
constexpr size_t kKeptFloats = size_t{4} << 20;

struct Floats {
  std::unique_ptr<float[]> own;
  float *data;

  Floats(Buffer &kept, size_t n) {
    if (n > kKeptFloats) {
      own.reset(new float[n]);
    } else {
      kept.grow(n * sizeof(float));
    }
    data = own ? own.get() : floats_of(kept);
  }
};

}  // namespace

void prepare_activations(Activations &a, const float *x, int M, const Weight &w, Precision precision) {
  a.shape(w, M, precision);
  if (M == 1) return encode_rows(a, w, x, w.K, 0, 1);
  Pool::get().run([&](int t, int n) { encode_rows(a, w, x, w.K, part(M, t, n), part(M, t + 1, n)); });
}

// Tables of 64 rows of 4096 inputs are 1 MB and stay in L2.
int rows_at_once(const Weight &w) {
  if (w.stream == Stream::Integer) return w.isa->integer->rows;
  return w.stream == Stream::Trellis ? w.isa->trellis->rows : 64;
}

std::pair<int, int> rows_of_thread(const Weight &w, int t, int n) {
  return {part(w.blocks, t, n) * w.R, std::min(w.N, part(w.blocks, t + 1, n) * w.R)};
}

void matmul_rows(const Weight &w, const Activations &a, float *y, size_t ldy, int row0, int row1) {
  assert(a.same_shape(w) && row0 % w.R == 0);
  if (row0 >= row1) return;
  const auto product = w.stream == Stream::Mixed     ? w.isa->mixed->matmul
                       : w.stream == Stream::Integer ? w.isa->integer->matmul
                       : w.stream == Stream::Trellis ? w.isa->trellis->matmul
                                                     : w.isa->matmul;
  product(w, a, y, ldy, row0 / w.R, (row1 + w.R - 1) / w.R);
  for (int m = 0; m < a.M; ++m)
    if (const float factor = a.factor(m); factor != 1.0f)
      for (int n = row0; n < row1; ++n) y[m * ldy + n] *= factor;
}

namespace {

// y [M, N], still rotated, of a matrix whose outputs are.
void finish_outputs(const Weight &w, float *y, size_t ldy, int M) {
  if (!w.trellis || w.trellis->outputs.empty()) return;
  const Rotation &r = w.trellis->outputs;
  const int blocks = w.N / r.block;
  Pool::get().run([&](int t, int n) {
    for (int i = part(M * blocks, t, n); i < part(M * blocks, t + 1, n); ++i)
      undo_rotation(r, y + i / blocks * ldy + i % blocks * r.block, i % blocks * r.block, r.block);
  });
}

}  // namespace

void matmul(const Weight &w, const Activations &a, float *y, size_t ldy) {
  Pool::get().run([&](int t, int n) {
    const auto [row0, row1] = rows_of_thread(w, t, n);
    matmul_rows(w, a, y, ldy, row0, row1);
  });
  finish_outputs(w, y, ldy, a.M);
}

namespace {

void matmul_tiles(const float *x, int M, const Weight &w, float *y, Precision precision) {
  static thread_local Buffer scratch;
  const Gemm &gemm = *w.isa->gemm;
  scratch.grow(gemm.pack_bytes(w, M, precision));
  uint8_t *packed = scratch.data();
  const int tiles = tiles_of(M);
  std::vector<uint8_t> unusual(M);  // rows for which tiles are too narrow
  Pool::get().run([&](int t, int n) {
    const int tile0 = part(tiles, t, n), tile1 = part(tiles, t + 1, n);
    for (int m = tile0 * kTileRows; m < std::min(M, tile1 * kTileRows); ++m) {
      const uint32_t top = top_bits(x + size_t(m) * w.K, w.K);
      unusual[m] = top != 0 && (top < kSmall || top >= kLarge);
    }
    gemm.pack(w, x, M, precision, packed, tile0, tile1);
  });
  Pool::get().run(
      [&](int t, int n) { gemm.run(w, packed, M, precision, y, w.N, part(w.blocks, t, n), part(w.blocks, t + 1, n)); });
  finish_outputs(w, y, w.N, M);
  for (int m = 0; m < M; ++m)
    if (unusual[m]) {
      static thread_local Activations one;
      prepare_activations(one, x + size_t(m) * w.K, 1, w, precision);
      matmul(w, one, y + size_t(m) * w.N, w.N);
    }
}

}  // namespace

void matmul(const float *x, int M, const Weight &w, float *y, Precision precision) {
  const Gemm *gemm = gemm_of(w, precision);
  matmul(x, M, w, y, precision, gemm && gemm->is_faster(w, precision, M));
}

void matmul(const float *x, int M, const Weight &w, float *y, Precision precision, bool by_tiles) {
  static thread_local Activations scratch;
  Activations &a = scratch;                               // this thread's, also in the workers' lambdas
  const int at_once = by_tiles ? 1024 : rows_at_once(w);  // tiles are read in order
  for (int m = 0; m < M; m += at_once) {
    const int rows = std::min(at_once, M - m);
    const float *xm = x + size_t(m) * w.K;
    float *ym = y + size_t(m) * w.N;
    if (by_tiles) {
      matmul_tiles(xm, rows, w, ym, precision);
      continue;
    }
    prepare_activations(a, xm, rows, w, precision);
    matmul(w, a, ym, w.N);
  }
}

void matmul(const uint8_t *x, DType type, int M, const Weight &w, uint8_t *y, Precision precision) {
  static thread_local Activations scratch;
  static thread_local Buffer x_floats, y_floats;
  Activations &a = scratch;
  const Ops &ops = ops_of(*w.isa);
  const Gemm *gemm = gemm_of(w, precision);
  const bool by_tiles = gemm && gemm->is_faster(w, precision, M);
  const int at_once = std::min(M, by_tiles ? 1024 : rows_at_once(w));
  const size_t size = size_of(type), K = w.K, N = w.N;
  const Floats xs(x_floats, at_once * K), ys(y_floats, at_once * N);
  float *const xf = xs.data, *const yf = ys.data;
  for (int m = 0; m < M; m += at_once, x += at_once * K * size, y += at_once * N * size) {
    const int rows = std::min(at_once, M - m);
    const auto widen = [&](int m0, int m1) { ops.load(type, x + m0 * K * size, xf + m0 * K, int((m1 - m0) * K)); };
    const auto narrow = [&](int row0, int row1) {
      for (int i = 0; i < rows && row0 < row1; ++i)
        ops.store(type, yf + i * N + row0, y + (i * N + row0) * size, row1 - row0);
    };
    if (by_tiles) {
      Pool::get().run([&](int t, int n) { widen(part(rows, t, n), part(rows, t + 1, n)); });
      matmul_tiles(xf, rows, w, yf, precision);
      Pool::get().run([&](int t, int n) { narrow(part(w.N, t, n), part(w.N, t + 1, n)); });
      continue;
    }
    a.shape(w, rows, precision);
    const auto encode = [&](int m0, int m1) {
      widen(m0, m1);
      encode_rows(a, w, xf, K, m0, m1);
    };
    if (rows == 1)
      encode(0, 1);
    else
      Pool::get().run([&](int t, int n) { encode(part(rows, t, n), part(rows, t + 1, n)); });
    Pool::get().run([&](int t, int n) {
      const auto [row0, row1] = rows_of_thread(w, t, n);
      matmul_rows(w, a, yf, N, row0, row1);
      narrow(row0, row1);
    });
  }
}

}  // namespace crelle::cpu
