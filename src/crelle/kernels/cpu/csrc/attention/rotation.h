// H diag(signs) of blocks of channels (crelle.formats.wrappers.rotated): H = P x S, Paley's matrix of `order` rows and
// Sylvester's of `step`, a power of two.
#pragma once

#include <cmath>
#include <vector>

namespace crelle::cpu {

struct Rotation {
  std::vector<float> signs;  // of the channels, 1 or -1; empty: they are not rotated
  int block = 1;             // channels that are rotated together: order * step
  int order = 1, step = 1;
  std::vector<float> paley;  // P [order, order], 1 or -1; empty: order is 1

  bool empty() const { return signs.empty(); }
  float root() const { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(block))); }
  bool operator==(const Rotation &o) const { return block == o.block && signs == o.signs; }
};

// y [n], whole blocks from channel `first` on: signs (H y), which undoes the rotation, or applies that of outputs.
void undo_rotation(const Rotation &r, float *y, int first, int n);

}  // namespace crelle::cpu
