// The decoder and the small ops for Python: plain arrays and objects with attributes in, the GIL released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <stdexcept>

#include "decoder.h"
#include "prefill.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace crelle::cpu;

namespace {

template <class T, int Dim>
using In = nb::ndarray<const T, nb::ndim<Dim>, nb::c_contig, nb::device::cpu>;
template <class T, int Dim>
using Out = nb::ndarray<T, nb::ndim<Dim>, nb::c_contig, nb::device::cpu>;
using AnyMatrix = nb::ndarray<nb::ro, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using AnyCache = nb::ndarray<nb::ndim<5>, nb::c_contig, nb::device::cpu>;

void require(bool ok, const std::string &what) {
  if (!ok) throw std::invalid_argument(what);
}

Number number_of(nb::dlpack::dtype d) {
  if (d == nb::dtype<float>()) return Number::F32;
  require(d.bits == 16 && d.lanes == 1, "numbers must be f32, f16 or bf16");
  if (d.code == uint8_t(nb::dlpack::dtype_code::Float)) return Number::F16;
  require(d.code == uint8_t(nb::dlpack::dtype_code::Bfloat), "numbers must be f32, f16 or bf16");
  return Number::BF16;
}

Dense dense_of(const AnyMatrix &a) {
  return {static_cast<const uint8_t *>(a.data()), number_of(a.dtype()), int(a.shape(0)), int(a.shape(1))};
}

// A Decoder and the Python objects whose memory it reads.
struct Owned {
  std::vector<nb::object> owners;
  std::vector<nb::ndarray<>> arrays, cache;
  std::unique_ptr<Decoder> decoder;
  std::unique_ptr<Prefill> prefill;  // over the decoder's model

  template <class Array>
  Array take(nb::handle h) {
    Array a = nb::cast<Array>(h);
    arrays.emplace_back(nb::ndarray<>(a.handle()));
    return a;
  }

  const float *vector(nb::handle h, size_t n, const char *what) {
    if (h.is_none()) return nullptr;
    const auto a = take<In<float, 1>>(h);
    require(a.shape(0) == n, std::string(what) + " must have " + std::to_string(n) + " numbers");
    return a.data();
  }

  // A Weight or a plain array.
  Matrix matrix(nb::handle h) {
    Matrix m;
    if (nb::isinstance<Weight>(h)) {
      owners.push_back(nb::borrow(h));
      m.coded = nb::cast<const Weight *>(h);
      m.N = m.coded->N, m.K = m.coded->K;
    } else {
      m.dense = dense_of(take<AnyMatrix>(h));
      m.N = m.dense.N, m.K = m.dense.K;
    }
    return m;
  }

  // An object with `weight` and `bias`.
  Matrix linear(nb::handle h) {
    Matrix m = matrix(h.attr("weight"));
    m.bias = vector(h.attr("bias"), m.N, "a bias");
    return m;
  }

  LayerWeights layer(nb::handle h, const Model &model) {
    LayerWeights l;
    l.q = linear(h.attr("q")), l.k = linear(h.attr("k")), l.v = linear(h.attr("v")), l.o = linear(h.attr("o"));
    l.gate = linear(h.attr("gate")), l.up = linear(h.attr("up")), l.down = linear(h.attr("down"));
    l.norm_attention = vector(h.attr("norm_attention"), model.width, "norm_attention");
    l.norm_mlp = vector(h.attr("norm_mlp"), model.width, "norm_mlp");
    l.q_norm = vector(h.attr("q_norm"), model.head_size, "q_norm");
    l.k_norm = vector(h.attr("k_norm"), model.head_size, "k_norm");
    require(l.norm_attention && l.norm_mlp, "a layer needs both of its norms");
    const nb::object window = h.attr("window");
    l.window = window.is_none() ? 0 : nb::cast<int>(window);
    require(window.is_none() || l.window > 0, "a window must be positive");
    return l;
  }
};

Precision precision_of(const std::string &name) {
  if (name == "int8") return Precision::Int8;
  if (name == "exact") return Precision::Exact;
  throw std::invalid_argument("precision must be 'int8' or 'exact', got '" + name + "'");
}

void build(Owned *self, nb::object parts, const std::string &precision) {
  Owned made;  // on the stack: if anything below throws, what it holds is let go
  Model m;
  m.width = nb::cast<int>(parts.attr("width")), m.heads = nb::cast<int>(parts.attr("heads"));
  m.kv_heads = nb::cast<int>(parts.attr("kv_heads")), m.head_size = nb::cast<int>(parts.attr("head_size"));
  m.norm_eps = nb::cast<float>(parts.attr("norm_eps"));
  m.precision = precision_of(precision);
  const auto frequency = nb::cast<In<float, 1>>(parts.attr("frequency"));
  m.frequency.assign(frequency.data(), frequency.data() + frequency.shape(0));
  m.embedding = made.matrix(parts.attr("embedding"));
  m.norm = made.vector(parts.attr("norm"), m.width, "norm");
  require(m.norm, "the model needs its last norm");
  m.head = made.linear(parts.attr("head"));
  for (nb::handle h : parts.attr("layers")) m.layers.push_back(made.layer(h, m));
  const std::string problem = m.problem();
  require(problem.empty(), problem);
  made.decoder = std::make_unique<Decoder>(std::move(m));
  made.prefill = std::make_unique<Prefill>(made.decoder->model());
  new (self) Owned(std::move(made));
}

void set_cache(Owned &self, std::vector<AnyCache> layers) {
  const Model &m = self.decoder->model();
  require(layers.size() == m.layers.size(), "the cache must have one array per layer");
  Cache c;
  c.type = number_of(layers[0].dtype());
  c.rows = int(layers[0].shape(1)), c.capacity = int(layers[0].shape(3));
  std::vector<nb::ndarray<>> kept;
  for (const AnyCache &a : layers) {
    require(number_of(a.dtype()) == c.type && a.shape(0) == 2 && int(a.shape(1)) == c.rows &&
                int(a.shape(2)) == m.kv_heads && int(a.shape(3)) == c.capacity && int(a.shape(4)) == m.head_size,
            "a layer's cache must be [2, rows, kv_heads, capacity, head_size], alike in all layers");
    c.layers.push_back(static_cast<uint8_t *>(a.data()));
    kept.emplace_back(nb::ndarray<>(a.handle()));
  }
  self.decoder->set_cache(std::move(c));
  self.cache = std::move(kept);
}

using Words = Out<int16_t, 5>;

// The table is read anew in every step: what it names for the tokens of a row must be there.
void require_pages(const Cache &c, int64_t row, int64_t tokens) {
  if (!c.paged()) return;
  for (int64_t i = 0; i * c.page < tokens; ++i) {
    const int32_t page = c.table[row * c.width + i];
    require(page >= 0 && page < c.pages, "the table names a page that is not there");
  }
}

// Pages instead: codes (or numbers) and words of every layer, a table [rows, pages of a row] of int32.
void set_pages(Owned &self, std::vector<AnyCache> layers, std::vector<Words> words, In<int32_t, 2> table, int bits,
               int turned, std::vector<In<float, 2>> center) {
  const Model &m = self.decoder->model();
  require(layers.size() == m.layers.size() && (bits == 16 ? words.empty() : words.size() == layers.size()),
          "pages must have one array of codes per layer, and one of words where they are coded");
  require(bits == 16 || bits == 8 || bits == 4, "pages have 16, 8 or 4 bits");
  require(m.head_size <= 512 && (turned == 0 || (m.head_size % turned == 0 && (turned & (turned - 1)) == 0)),
          "channels are turned together in powers of two that divide the head");
  require(center.empty() || center.size() == layers.size(), "one centre per layer");
  Cache c;
  c.bits = bits, c.turned = turned;
  c.type = bits == 16 ? number_of(layers[0].dtype()) : Number::F32;
  c.page = int(layers[0].shape(3)), c.rows = int(table.shape(0)), c.width = int(table.shape(1));
  c.capacity = c.page * c.width;
  c.table = table.data();
  std::vector<nb::ndarray<>> kept{nb::ndarray<>(table.handle())};
  const size_t count = layers[0].shape(0), row = bits == 16 ? m.head_size : size_t(m.head_size) * bits / 8;
  for (size_t i = 0; i < layers.size(); ++i) {
    const AnyCache &a = layers[i];
    require(a.shape(0) == count && a.shape(1) == 2 && int(a.shape(2)) == m.kv_heads && int(a.shape(3)) == c.page &&
                a.shape(4) == row && (bits == 16 ? number_of(a.dtype()) == c.type : a.dtype() == nb::dtype<uint8_t>()),
            "pages must be [pages, 2, kv_heads, page, numbers or bytes of a head], alike in all layers");
    c.layers.push_back(static_cast<uint8_t *>(a.data()));
    kept.emplace_back(nb::ndarray<>(a.handle()));
    if (bits == 16) continue;
    const Words &w = words[i];
    c.groups = int(words[0].shape(4));
    require(w.shape(0) == count && w.shape(1) == 2 && int(w.shape(2)) == m.kv_heads && int(w.shape(3)) == c.page &&
                int(w.shape(4)) == c.groups && c.groups >= 1 && c.groups <= 64 && m.head_size % c.groups == 0 &&
                m.head_size / c.groups % 2 == 0,
            "words must be [pages, 2, kv_heads, page, groups], groups of an even number of channels");
    c.words.push_back(w.data());
    kept.emplace_back(nb::ndarray<>(w.handle()));
  }
  for (const auto &v : center) {
    require(int(v.shape(0)) == m.kv_heads && int(v.shape(1)) == m.head_size, "a centre must be [kv_heads, head_size]");
    c.center.push_back(v.data());
    kept.emplace_back(nb::ndarray<>(v.handle()));
  }
  c.pages = int(count);
  self.decoder->set_cache(std::move(c));
  self.cache = std::move(kept);
}

void step(Owned &self, In<int64_t, 1> token, In<int64_t, 1> position, std::optional<In<int64_t, 1>> row,
          std::optional<Out<float, 2>> logits, std::optional<Out<int64_t, 1>> best,
          std::optional<In<int64_t, 1>> want) {
  const int B = int(token.shape(0)), V = self.decoder->model().head.N;
  const Cache &c = self.decoder->cache();
  require(B >= 1 && B <= Decoder::kRows, "a step takes 1 to " + std::to_string(Decoder::kRows) + " tokens");
  require(position.shape(0) == size_t(B) && (!row || row->shape(0) == size_t(B)), "one position (and row) per token");
  const int W = want ? int(want->shape(0)) : B;
  require(W <= B, "logits can be wanted of each token once");
  for (int i = 0; i < W && want; ++i)
    require(want->data()[i] >= 0 && want->data()[i] < B, "logits are wanted of a token that is not in the step");
  require(!logits || (logits->shape(0) == size_t(W) && logits->shape(1) == size_t(V)), "logits must be [B, V]");
  require(!best || best->shape(0) == size_t(W), "best must be [B]");
  int64_t rows[Decoder::kRows];
  for (int b = 0; b < B; ++b) {
    rows[b] = row ? row->data()[b] : b;
    require(token.data()[b] >= 0 && token.data()[b] < self.decoder->model().embedding.N, "no such token");
    require(position.data()[b] >= 0 && position.data()[b] < c.capacity, "the position is outside of the cache");
    require(rows[b] >= 0 && rows[b] < c.rows, "no such row of the cache");
    for (int i = 0; i < b; ++i)
      require(rows[i] != rows[b] || position.data()[i] != position.data()[b],
              "two tokens of a step cannot share a place of the cache");
    require_pages(c, rows[b], position.data()[b] + 1);
  }
  nb::gil_scoped_release release;
  self.decoder->step(token.data(), position.data(), rows, B, want ? want->data() : nullptr, W,
                     logits ? logits->data() : nullptr, best ? best->data() : nullptr);
}

// Go on alone from one token until n are made or one of `ends` is: returns how many, the end included.
int generate(Owned &self, int64_t token, int64_t position, Out<int64_t, 1> out, const std::vector<int64_t> &ends) {
  const Cache &c = self.decoder->cache();
  const int n = int(out.shape(0));
  require(token >= 0 && token < self.decoder->model().embedding.N, "no such token");
  require(self.decoder->model().embedding.N >= self.decoder->model().head.N, "a token without an embedding");
  require(position >= 0 && position + n <= c.capacity && c.rows == 1, "the cache must have one row with room for all");
  require_pages(c, 0, position + n);
  nb::gil_scoped_release release;
  const int64_t row = 0;
  for (int i = 0; i < n; ++i, ++position) {
    self.decoder->step(&token, &position, &row, 1, nullptr, 1, nullptr, out.data() + i);
    token = out.data()[i];
    for (const int64_t end : ends)
      if (token == end) return i + 1;
  }
  return n;
}

// A prompt of one row of the cache; logits [1, V] are those of its last token, [T, V] those of all.
void prefill(Owned &self, In<int64_t, 1> token, int64_t position, int64_t row, Out<float, 2> logits, bool last) {
  const Model &m = self.decoder->model();
  const Cache cache = self.decoder->cache();
  const auto kept = self.cache;  // alive while this runs, whatever another thread sets
  const int64_t T = int64_t(token.shape(0));
  require(T >= 1, "a prompt has at least one token");
  require(row >= 0 && row < cache.rows, "no such row of the cache");
  require(position >= 0 && position + T <= cache.capacity, "the prompt does not fit the cache");
  require_pages(cache, row, position + T);
  require(logits.shape(0) == size_t(last ? 1 : T) && logits.shape(1) == size_t(m.head.N), "logits must be [1 or T, V]");
  for (int64_t t = 0; t < T; ++t) require(token.data()[t] >= 0 && token.data()[t] < m.embedding.N, "no such token");
  nb::gil_scoped_release release;
  self.prefill->run(cache, token.data(), int(T), int(position), int(row), last, logits.data());
}

nb::dict prefill_phases(const Owned &self) {
  static constexpr const char *kNames[] = {"embed",     "input",   "qkv",  "place", "attention", "output",
                                           "mlp_input", "gate_up", "silu", "down",  "head"};
  nb::dict d;
  for (int i = 0; i < Prefill::kPhases; ++i) d[kNames[i]] = self.prefill->seconds()[i];
  return d;
}

nb::dict phases(const Owned &self) {
  static constexpr const char *kNames[] = {"embed", "qkv", "attention", "output", "gate_up", "down", "head"};
  nb::dict d;
  for (int i = 0; i < Decoder::kPhases; ++i) d[kNames[i]] = self.decoder->seconds()[i];
  d["waiting"] = self.decoder->waited();
  d["preparing"] = self.decoder->prepared();
  return d;
}

// The building blocks, each on its own, for tests; they use the instruction set that is chosen now.

void rms_norm(In<float, 2> x, In<float, 1> weight, float eps, Out<float, 2> y) {
  const size_t K = x.shape(1);
  require(weight.shape(0) == K && y.shape(0) == x.shape(0) && y.shape(1) == K, "x, y [M, K], weight [K]");
  for (size_t m = 0; m < x.shape(0); ++m)
    ops_of(isa()).rms_norm(x.data() + m * K, weight.data(), eps, int(K), y.data() + m * K);
}

void rope(Out<float, 2> x, In<float, 1> cos, In<float, 1> sin) {
  const size_t D = x.shape(1);
  require(D % 2 == 0 && cos.shape(0) == D / 2 && sin.shape(0) == D / 2, "x [M, D], cos and sin [D/2]");
  for (size_t m = 0; m < x.shape(0); ++m) ops_of(isa()).turn(x.data() + m * D, cos.data(), sin.data(), int(D));
}

void silu_mul(Out<float, 1> gate, In<float, 1> up) {
  require(gate.shape(0) == up.shape(0), "gate and up must be alike");
  ops_of(isa()).silu_mul(gate.data(), up.data(), int(up.shape(0)));
}

int argmax(In<float, 1> x) { return ops_of(isa()).argmax(x.data(), int(x.shape(0))); }

void dense_matmul(In<float, 2> x, AnyMatrix weight, Out<float, 2> y) {
  const Dense w = dense_of(weight);
  require(x.shape(1) == size_t(w.K) && y.shape(0) == x.shape(0) && y.shape(1) == size_t(w.N), "x [M, K], y [M, N]");
  const Ops &ops = ops_of(isa());
  nb::gil_scoped_release release;
  Pool::get().run([&](int t, int n) {
    ops.dense(w, x.data(), w.K, int(x.shape(0)), y.data(), w.N, part(w.N, t, n), part(w.N, t + 1, n));
  });
}

// One query [D], already turned, over keys and values [S, D], in runs of kRun.
void attention(In<float, 1> q, AnyMatrix keys, AnyMatrix values, Out<float, 1> out) {
  const Dense k = dense_of(keys), v = dense_of(values);
  const int D = k.K, S = k.N, runs = (S + Decoder::kRun - 1) / Decoder::kRun;
  require(S >= 1 && v.K == D && v.N == S && v.type == k.type, "keys and values must be [S, D], alike");
  require(q.shape(0) == size_t(D) && out.shape(0) == size_t(D), "q and out must be [D]");
  const Ops &ops = ops_of(isa());
  std::vector<float> query((D + 15) / 16 * 16), scores(Decoder::kRun + 16), sums(size_t(runs) * D);
  std::copy_n(q.data(), D, query.data());
  ops.scale(query.data(), 1.0f / std::sqrt(static_cast<float>(D)), D);
  std::vector<Attended> parts(runs);
  for (int r = 0; r < runs; ++r) {
    const int from = r * Decoder::kRun, count = std::min(S - from, Decoder::kRun);
    const bool last = r + 1 == runs;  // its last key as the token's own
    const Attend a{k.type,
                   D,
                   1,
                   query.data(),
                   k.row(from),
                   v.row(from),
                   count - last,
                   last ? k.row(S - 1) : nullptr,
                   last ? v.row(S - 1) : nullptr,
                   scores.data()};
    ops.attend(a, &parts[r], 0, sums.data() + size_t(r) * D, 0);
  }
  ops.combine(parts.data(), sums.data(), D, runs, D, out.data());
}

}  // namespace

void bind_decoder(nb::module_ &m) {
  nb::class_<Owned>(m, "Decoder", "One decode step of a whole model; see crelle.kernels.cpu.decoder.")
      .def("__init__", &build, "parts"_a, "precision"_a)
      .def("set_cache", &set_cache, "layers"_a)
      .def("set_pages", &set_pages, "layers"_a, "words"_a, "table"_a.noconvert(), "bits"_a, "turned"_a, "center"_a)
      .def("step", &step, "token"_a.noconvert(), "position"_a.noconvert(), "row"_a.none().noconvert() = nb::none(),
           "logits"_a.none().noconvert() = nb::none(), "best"_a.none().noconvert() = nb::none(),
           "want"_a.none().noconvert() = nb::none())
      .def("prefill", &prefill, "token"_a.noconvert(), "position"_a, "row"_a, "logits"_a.noconvert(), "last"_a)
      .def("prefill_phases", &prefill_phases, "Seconds per phase of the latest prefill.")
      .def("generate", &generate, "token"_a, "position"_a, "out"_a.noconvert(), "ends"_a)
      .def(
          "time_phases", [](Owned &o, bool on) { o.decoder->time_phases(on); }, "on"_a)
      .def("phases", &phases,
           "Seconds of the first thread per phase; of them, at barriers and on norms and encodings.");

  m.def("rms_norm", &rms_norm, "x"_a.noconvert(), "weight"_a.noconvert(), "eps"_a, "y"_a.noconvert());
  m.def("rope", &rope, "x"_a.noconvert(), "cos"_a.noconvert(), "sin"_a.noconvert());
  m.def("silu_mul", &silu_mul, "gate"_a.noconvert(), "up"_a.noconvert());
  m.def("argmax", &argmax, "x"_a.noconvert());
  m.def("dense_matmul", &dense_matmul, "x"_a.noconvert(), "weight"_a.noconvert(), "y"_a.noconvert());
  m.def("attention", &attention, "q"_a.noconvert(), "keys"_a.noconvert(), "values"_a.noconvert(), "out"_a.noconvert());
}
