// One table of functions per instruction set; which of them this machine can run; which one is in use.
//
// Every isa_*.cpp is compiled with its own flags and defines one `Isa`. What they share lies in headers that are
// compiled once per file, inside a namespace of the file's own: a linker that merged two copies could otherwise hand
// an AVX-512 function to a machine without it.
#pragma once

#include <string>
#include <vector>

#include "planes/activations.h"
#include "tiles/gemm.h"
#include "planes/weight.h"

namespace crelle::cpu {

// Stream::Mixed.
struct MixedKernel {
  void (*encode)(const Weight &w, Activations &a, const float *x, size_t ldx, int m0, int m1);
  void (*matmul)(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1);
};

// Stream::Integer, which is laid out alike for all.
struct IntegerKernel {
  void (*encode)(const Weight &w, Activations &a, const float *x, size_t ldx, int m0, int m1);
  void (*matmul)(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1);
  int rows;  // of x that are multiplied at a time
};

// Stream::Trellis, likewise.
struct TrellisKernel {
  void (*encode)(const Weight &w, Activations &a, const float *x, size_t ldx, int m0, int m1);
  void (*matmul)(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1);
  int rows;  // of x that are multiplied at a time
};

struct Isa {
  const char *name;
  int rows;                            // R, rows of a block
  Stream (*stream)(Kind kind, int P);  // the layout it wants for a matrix
  // Fill rows [m0, m1) of `a` (already shaped) from x, row stride ldx.
  void (*encode)(Activations &a, const float *x, size_t ldx, int m0, int m1);
  // y[m, n] for all rows of `a` and the outputs of blocks [b0, b1); row stride ldy.
  void (*matmul)(const Weight &w, const Activations &a, float *y, size_t ldy, int b0, int b1);
  uint64_t (*read)(const uint8_t *data, size_t bytes);  // touch every line (64-byte aligned): for the roofline
  const MixedKernel *mixed;  // the same two for Stream::Mixed, which is laid out alike for all
  const IntegerKernel *integer;
  const TrellisKernel *trellis;
  const Gemm *gemm = nullptr;  // another way for many rows of x, or none
};

// How many rows of x are multiplied by w as tiles; null: they are not.
inline const Gemm *gemm_of(const Weight &w, Precision p) {
  return w.isa->gemm && w.isa->gemm->takes(w, p) ? w.isa->gemm : nullptr;
}

extern const Isa kGeneric;
#if defined(__x86_64__)
extern const Isa kAvx2, kAvxVnni, kAvx512, kAvx512Vnni, kVbmi;
// Of several sets: these are compiled once.
extern const MixedKernel kMixedAvx2, kMixedVnni;
extern const IntegerKernel kIntegerAvx2, kIntegerVnni, kIntegerAmx;
extern const TrellisKernel kTrellisAvx2;
#elif defined(__aarch64__)
extern const Isa kNeon, kDotprod;
#endif

const std::vector<const Isa *> &isas();  // those this machine can run, the best first
const Isa &isa();                        // the one in use for weights prepared from now on
// One of them, or a variant for tests: "-tiles" of some (f32_tiles.h), amx-int8, amx-bf16 (gemm.h). False when it is
// not to be had.
bool set_isa(const std::string &name);

}  // namespace crelle::cpu
