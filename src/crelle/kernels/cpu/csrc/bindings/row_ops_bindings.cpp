// Norms, rotary positions, gated activations and sums over many rows for Python: each one pass over memory, on all
// threads. A thread takes a piece that stays in its first cache, widens it to f32, works on it, and rounds it once.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <limits>

#include "bindings/bindings.h"
#include "base/memory.h"
#include "base/pool.h"

using namespace nb::literals;

namespace crelle::cpu {
namespace {

using Values = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;  // of any shape
using Results = nb::ndarray<nb::c_contig, nb::device::cpu>;

// Where pieces begin depends on the shape only, so that a value's bits do not depend on the number of threads.
constexpr size_t kPiece = 2048;  // floats; two pieces of them, and what they are read from, are less than 32 KB

constexpr const char *kTypes = "values must be f32 or bf16";

// What is read: f32 as it lies, bf16 as floats in `room`.
struct Source {
  explicit Source(const Values &a)
      : data(static_cast<const uint8_t *>(a.data())), type(f32_or_bf16(a.dtype(), kTypes)) {}

  const float *read(const Ops &ops, size_t at, size_t n, float *room) const {
    if (type == DType::F32) return reinterpret_cast<const float *>(data) + at;
    copy(ops, at, n, room);
    return room;
  }
  void copy(const Ops &ops, size_t at, size_t n, float *to) const {
    ops.load(type, data + at * size_of(type), to, int(n));
  }

  const uint8_t *data;
  DType type;
};

// What is written: f32 is computed where it will lie, bf16 in `room`.
struct Target {
  explicit Target(const Results &a) : data(static_cast<uint8_t *>(a.data())), type(f32_or_bf16(a.dtype(), kTypes)) {}

  float *begin(size_t at, float *room) const {
    return type == DType::F32 ? reinterpret_cast<float *>(data) + at : room;
  }
  void end(const Ops &ops, size_t at, size_t n, const float *from) const {
    if (type != DType::F32) ops.store(type, from, data + at * size_of(type), int(n));
  }

  uint8_t *data;
  DType type;
};

// Calls fn(piece, room) for each of `count` pieces; every thread has room for `floats`.
template <class F>
void share(size_t count, size_t floats, F &&fn) {
  nb::gil_scoped_release release;
  Pool::get().run([&](int t, int n) {
    static thread_local Buffer room;
    room.grow(floats * sizeof(float));
    for (size_t i = count * t / n; i < count * (t + 1) / n; ++i) fn(i, floats_of(room));
  });
}

template <class F>
void share_pieces(size_t n, F &&fn) {
  share((n + kPiece - 1) / kPiece, 2 * kPiece,
        [&](size_t i, float *room) { fn(i * kPiece, std::min(kPiece, n - i * kPiece), room, room + kPiece); });
}

void check_width(size_t n) { require(n < size_t(std::numeric_limits<int>::max()), "a row is too long"); }

void norm_rows(Values x, In<float, 1> weight, float eps, Results y) {
  const size_t n = weight.shape(0);
  require(x.ndim() && x.shape(x.ndim() - 1) == n && y.size() == x.size(), "x and y must be [..., K], weight [K]");
  check_width(n);
  if (!x.size()) return;
  const size_t rows = x.size() / n;
  const Source from(x);
  const Target to(y);
  const Ops &ops = ops_of(isa());
  const size_t block = std::max<size_t>(1, kPiece / n);  // rows of a piece
  share((rows + block - 1) / block, block * n, [&](size_t i, float *room) {
    const size_t at = i * block * n, count = std::min(block, rows - i * block) * n;
    const float *const in = from.read(ops, at, count, room);
    float *const out = to.begin(at, room);
    for (size_t r = 0; r < count; r += n) ops.rms_norm(in + r, weight.data(), eps, int(n), out + r);
    to.end(ops, at, count, out);
  });
}

void rotate_rows(Values x, In<float, 3> cos, In<float, 3> sin, Results y) {
  const size_t dims = x.ndim(), T = cos.shape(0), R = cos.shape(2);
  require(dims >= 3 && x.shape(dims - 3) == T && y.size() == x.size(), "x and y must be [..., T, H, D]");
  const size_t H = x.shape(dims - 2), D = x.shape(dims - 1), n = H * D;
  require(cos.size() == T * R && sin.size() == T * R && R % 2 == 0 && R <= D,
          "cos and sin must be [T, 1, R], R even and at most D");
  check_width(n);
  if (!x.size()) return;
  const size_t tokens = x.size() / n;
  const Source from(x);
  const Target to(y);
  const Ops &ops = ops_of(isa());
  share(tokens, n, [&](size_t i, float *room) {
    const size_t angle = i % T * R;
    float *const out = to.begin(i * n, room);
    from.copy(ops, i * n, n, out);
    for (size_t h = 0; h < H; ++h) ops.rope(out + h * D, cos.data() + angle, sin.data() + angle, int(R));
    to.end(ops, i * n, n, out);
  });
}

void gate_rows(const std::string &kind, Values gate, Values up, Results y) {
  const size_t n = gate.size();
  require(up.size() == n && y.size() == n, "gate, up and y must be alike");
  const Activation f = activation_of(kind);
  const Source from(gate), factor(up);
  const Target to(y);
  const Ops &ops = ops_of(isa());
  share_pieces(n, [&](size_t at, size_t count, float *a, float *b) {
    float *const out = to.begin(at, a);
    from.copy(ops, at, count, out);
    ops.activate(f, out, factor.read(ops, at, count, b), int(count));
    to.end(ops, at, count, out);
  });
}

void add_rows(Values x, Values y, Results sum) {
  const size_t n = x.size();
  require(y.size() == n && sum.size() == n, "x, y and their sum must be alike");
  const Source first(x), second(y);
  const Target to(sum);
  const Ops &ops = ops_of(isa());
  share_pieces(n, [&](size_t at, size_t count, float *a, float *b) {
    float *const out = to.begin(at, a);
    first.copy(ops, at, count, out);
    ops.add(out, second.read(ops, at, count, b), int(count));
    to.end(ops, at, count, out);
  });
}

}  // namespace

void bind_row_ops(nb::module_ &m) {
  m.def("norm_rows", &norm_rows, "x"_a.noconvert(), "weight"_a.noconvert(), "eps"_a, "y"_a.noconvert());
  m.def("rotate_rows", &rotate_rows, "x"_a.noconvert(), "cos"_a.noconvert(), "sin"_a.noconvert(), "y"_a.noconvert());
  m.def("gate_rows", &gate_rows, "kind"_a, "gate"_a.noconvert(), "up"_a.noconvert(), "y"_a.noconvert());
  m.def("add_rows", &add_rows, "x"_a.noconvert(), "y"_a.noconvert(), "sum"_a.noconvert());
}

}  // namespace crelle::cpu
