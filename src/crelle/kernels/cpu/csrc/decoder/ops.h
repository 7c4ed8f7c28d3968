// The small work between the products of a decode step: one table of functions per instruction set.
//
// All of it is written once, over vectors of 16 floats (simd.h), and compiled once per set of compiler flags:
//   small_ops.h   norms, rope, activations, sums, conversions
//   dense.h       products with matrices that are not quantized
//   attention.h   query heads over a run of cached keys and values
//   sweep.h, grid_search.h, nested_sweep.h, normal_equations.h   inner loops of quantizers
// A result depends on its inputs only, never on which thread computed it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa/isa.h"
#include "solver/solver.h"

namespace crelle::cpu {

enum class DType : uint8_t { F32, F16, BF16 };
inline size_t size_of(DType n) { return n == DType::F32 ? 4 : 2; }

struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

// A plain matrix [N, K], rows one after the other; the memory belongs to the caller, any alignment.
struct Dense {
  const uint8_t *data = nullptr;
  DType type = DType::F32;
  int N = 0, K = 0;

  const uint8_t *row(int n) const { return data + size_t(n) * K * size_of(type); }
};

// Query heads that share keys and values, over the keys and values [count, D] of neighbouring positions and, apart from
// them, of the token itself, which another thread may be writing into the cache at this moment.
constexpr int kHeads = 3;  // at once: a value is widened once for all of them, and their sums stay in registers
struct Attend {
  DType type;  // of the cache
  int D, heads;
  const float *q;        // [heads][D rounded up to 16, zeros behind], rotated and scaled
  const uint8_t *k, *v;  // [count, D]
  int count;
  const uint8_t *k_own, *v_own;  // [D] or null
  float *scores;                 // scratch, [heads][count + 1 rounded up to 16]
  // Where they do not lie in a row: keys and values [16, D] of tokens 0, 16, 32 …; k and v are not looked at then.
  const uint8_t *const *k16 = nullptr, *const *v16 = nullptr;
  float softcap = 0;  // of the scores; 0: none
};

// sum = sum_i exp(score_i - top), out [D] = sum_i exp(score_i - top) v_i; parts of a sequence are combined later.
struct AttentionPartial {
  float top, sum;
};

// A block of tokens, all query heads of one key/value head: see prefill_attention.h. Queries and outputs lie in tiles
// of 16 tokens, [heads * D][16], `pitch` floats from tile to tile.
constexpr int kBlockTokens = 48;
struct AttendBlock {
  DType type;            // of the cache
  int D, heads, window;  // heads that share the keys; window 0: all the way back
  int position, count;   // of the first token; tokens, at most kBlockTokens
  size_t pitch;
  const float *q;        // rotated and scaled
  const uint8_t *k, *v;  // from position 0 on; the tokens' own are there
  float *out;
  // Where they do not lie in a row: writes keys and values [from, from + count) as floats.
  void (*read)(const void *pages, int from, int count, float *k, float *v) = nullptr;
  const void *pages = nullptr;
  float softcap = 0;             // of the scores; 0: none
  const float *sinks = nullptr;  // [heads]: one more score of each head, which has no value; or none
};

// rms: x / rms(x) * weight; layer: (x - mean) / std * weight + bias. Sums in f32.
enum class NormKind : uint8_t { Rms, Layer };
struct Norm {
  NormKind kind = NormKind::Rms;
  float eps = 0;
  const float *weight = nullptr, *bias = nullptr;  // [n]; bias: layer norms only, or none

  explicit operator bool() const { return weight != nullptr; }
};

enum class Activation : uint8_t { Silu, Gelu, GeluTanh, Relu, SwigluOai };

struct Ops {
  const char *name;
  void (*load)(DType type, const uint8_t *from, float *to, int n);
  void (*store)(DType type, const float *from, uint8_t *to, int n);
  void (*rms_norm)(const float *x, const float *weight, float eps, int n, float *y);                       // y may be x
  void (*layer_norm)(const float *x, const float *weight, const float *bias, float eps, int n, float *y);  // likewise
  void (*rope)(float *x, const float *cos, const float *sin, int D);    // rope: pairs (i, i + D/2), angles [D/2]
  void (*activate)(Activation kind, float *x, const float *up, int n);  // x = f(x) * up, or f(x) where up is null
  void (*add)(float *x, const float *y, int n);                         // x += y
  void (*add_scaled)(float *x, const float *y, float factor, int n);    // x += factor y
  void (*scale)(float *x, float factor, int n);
  void (*cap)(float *x, float softcap, int n);  // x = softcap tanh(x / softcap)
  // y[m, n] for M rows of x and outputs [row0, row1)
  void (*dense)(const Dense &w, const float *x, size_t ldx, int M, float *y, size_t ldy, int row0, int row1);
  // Head i's results: parts[i * parts_apart], and D sums from out + i * out_apart on.
  void (*attend)(const Attend &a, AttentionPartial *parts, size_t parts_apart, float *out, size_t out_apart);
  // out [D] = the softmax over `parts` runs; run i's sums are at sums + i * stride; sink: one more score, or null
  void (*combine)(const AttentionPartial *parts, const float *sums, size_t stride, int count, int D, const float *sink,
                  float *out);
  // Over tiles of 16 tokens, [n][16]: see transposed_ops.h.
  void (*tile_of_rows)(const float *rows, size_t ld, int count, int n, bool add, float *tile);
  void (*rows_of_tile)(const float *tile, int count, int n, float *rows, size_t ld);
  void (*norm_tile)(const float *x, const float *weight, float eps, int n, float *y);
  void (*layer_norm_tile)(const float *x, const float *weight, const float *bias, float eps, int n, float *y);
  void (*rope_tile)(float *x, const float *cos, const float *sin, float factor, int D);
  void (*add_to_tile)(float *x, const float *bias, int n);
  void (*attend_block)(const AttendBlock &a, float *scratch);
  size_t (*attend_block_scratch)(int heads, int D);  // in floats
  // `rows` rows of codes [D * bits / 8] and packed scales [groups] to floats: see kv_dequant.h
  void (*unpack)(int bits, const uint8_t *codes, const int16_t *words, int rows, int D, int groups, float *out);
  // 16 rows of a weight that is being quantized: see solver.h; scratch of 16 (K + 130) floats. Some take several tiles
  // of 16 rows at once, at most solver_tiles, each with scratch of its own.
  int solver_tiles;
  void (*sweep)(const Sweep &s, int tile, int tiles, float *scratch);
  void (*nested_sweep)(const NestedSweep &s, int tile, float *scratch);  // scratch: 16 K P floats
  void (*affine_sweep)(const AffineSweep &s, int tile, float *scratch);
  void (*descend_scales)(const ScaleDescent &s, int tile, float *scratch);
  void (*uniform_grids)(const UniformGrids &s, int tile, float *scratch);
  void (*search_grids)(const GridSearch &s, int tile, float *scratch);
  void (*second_order)(const SecondOrderSearch &s, int tile, float *scratch);
  void (*row_errors)(const RowErrors &s, int tile, int tiles, float *scratch);
  // scratch: as ScaleSolve says
  void (*solve_scales)(const ScaleSolve &s, int tile, int tiles, float *scratch, double *wide);
  // Paths through a trellis: the tables of a column [V, states], then the ring of a sequence.
  void (*viterbi_tables)(const Viterbi &p, int column, int16_t *to);
  void (*viterbi_ring)(const Viterbi &p, int sequence, uint8_t *scratch);
};

// A norm of either kind over one row, or over a tile; y may be x.
inline void norm_row(const Ops &ops, const Norm &norm, const float *x, int n, float *y) {
  if (norm.kind == NormKind::Rms) return ops.rms_norm(x, norm.weight, norm.eps, n, y);
  ops.layer_norm(x, norm.weight, norm.bias, norm.eps, n, y);
}
inline void norm_tile(const Ops &ops, const Norm &norm, const float *x, int n, float *y) {
  if (norm.kind == NormKind::Rms) return ops.norm_tile(x, norm.weight, norm.eps, n, y);
  ops.layer_norm_tile(x, norm.weight, norm.bias, norm.eps, n, y);
}

extern const Ops kOpsGeneric;
#if defined(__x86_64__)
extern const Ops kOpsAvx2, kOpsAvx512;
#endif

// The best of them for an instruction set that this machine can run.
const Ops &ops_of(const Isa &isa);

}  // namespace crelle::cpu
