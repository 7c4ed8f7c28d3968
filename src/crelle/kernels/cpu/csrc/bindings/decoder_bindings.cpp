// The decoder for Python: plain arrays and objects with attributes in, the GIL released.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>

#include "bindings/bindings.h"
#include "decoder/decoder.h"
#include "decoder/prefill.h"

using namespace nb::literals;

namespace crelle::cpu {
namespace {

// A Decoder and the Python objects whose memory it reads.
struct Owned {
  std::vector<nb::object> owners;
  std::vector<nb::ndarray<>> arrays;
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
    require(a.shape(0) == n, std::string(what) + " must have " + std::to_string(n) + " values");
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

  // An object with `kind`, `eps`, `weight` and `bias`, or None.
  Norm norm(nb::handle h, size_t n, const char *what) {
    Norm made;
    if (h.is_none()) return made;
    const auto kind = nb::cast<std::string>(h.attr("kind"));
    require(kind == "rms" || kind == "layer", "a norm is 'rms' or 'layer', not '" + kind + "'");
    made.kind = kind == "rms" ? NormKind::Rms : NormKind::Layer;
    made.eps = nb::cast<float>(h.attr("eps"));
    made.weight = vector(h.attr("weight"), n, what);
    made.bias = vector(h.attr("bias"), n, what);
    require(made.weight, std::string(what) + " needs its weight");
    require(!made.bias || made.kind == NormKind::Layer, std::string(what) + ": only layer norms have a bias");
    return made;
  }

  // An object with `gate` (None unless gated), `up` and `down`.
  FeedForward feed_forward(nb::handle h, bool gated) {
    FeedForward f;
    f.up = linear(h.attr("up")), f.down = linear(h.attr("down"));
    require(gated == !h.attr("gate").is_none(), "a feed-forward has a gate if its layer is gated");
    f.gate = gated ? linear(h.attr("gate")) : std::exchange(f.up, {});
    return f;
  }

  // An object with `top`, `normalize`, `router`, `shared_gate` (or None) and `each`.
  Experts experts(nb::handle h, bool gated) {
    Experts e;
    e.top = nb::cast<int>(h.attr("top")), e.normalize = nb::cast<bool>(h.attr("normalize"));
    e.router = linear(h.attr("router"));
    e.count = e.router.N;
    if (const nb::object gate = h.attr("shared_gate"); !gate.is_none()) e.shared_gate = linear(gate);
    for (nb::handle one : h.attr("each")) e.each.push_back(feed_forward(one, gated));
    return e;
  }

  LayerWeights layer(nb::handle h, const Model &model) {
    LayerWeights l;
    l.q = linear(h.attr("q")), l.k = linear(h.attr("k")), l.v = linear(h.attr("v")), l.o = linear(h.attr("o"));
    l.gated = nb::cast<bool>(h.attr("gated"));
    if (const nb::object of = h.attr("experts"); of.is_none())
      l.mlp = feed_forward(h, l.gated);
    else
      l.experts = experts(of, l.gated);
    l.activation = activation_of(nb::cast<std::string>(h.attr("activation")));
    l.norm_attention = norm(h.attr("norm_attention"), model.width, "norm_attention");
    l.norm_mlp = norm(h.attr("norm_mlp"), model.width, "norm_mlp");
    l.post_attention_norm = norm(h.attr("post_attention_norm"), model.width, "post_attention_norm");
    l.post_mlp_norm = norm(h.attr("post_mlp_norm"), model.width, "post_mlp_norm");
    l.stream_attention_norm = norm(h.attr("stream_attention_norm"), model.width, "stream_attention_norm");
    l.stream_mlp_norm = norm(h.attr("stream_mlp_norm"), model.width, "stream_mlp_norm");
    l.whole_qk_norm = nb::cast<bool>(h.attr("whole_qk_norm"));
    const int D = model.head_size;
    l.q_norm = norm(h.attr("q_norm"), l.whole_qk_norm ? size_t(model.heads) * D : D, "q_norm");
    l.k_norm = norm(h.attr("k_norm"), l.whole_qk_norm ? size_t(model.kv_heads) * D : D, "k_norm");
    require(!l.whole_qk_norm || (l.q_norm && l.k_norm), "norms of all heads need their weights");
    l.sinks = vector(h.attr("sinks"), model.heads, "sinks");
    l.softcap = nb::cast<float>(h.attr("softcap"));
    l.residual_scale = nb::cast<float>(h.attr("residual_scale"));
    l.parallel = nb::cast<bool>(h.attr("parallel"));
    const nb::object window = h.attr("window");
    l.window = window.is_none() ? 0 : nb::cast<int>(window);
    require(window.is_none() || l.window > 0, "a window must be positive");
    l.rope = nb::cast<int>(h.attr("rope"));
    l.scale = nb::cast<float>(h.attr("scale")), l.rotated_scale = nb::cast<float>(h.attr("rotated_scale"));
    // The usual scale has the bits of this division; what Python makes of D ** -0.5 may be a neighbour of it.
    const float usual = 1.0f / std::sqrt(static_cast<float>(model.head_size));
    if (std::abs(l.scale - usual) < 4e-7f * usual) l.scale = usual;
    return l;
  }
};

void build(Owned *self, nb::object parts, const std::string &precision) {
  Owned made;  // on the stack: if anything below throws, what it holds is let go
  Model m;
  m.width = nb::cast<int>(parts.attr("width")), m.heads = nb::cast<int>(parts.attr("heads"));
  m.kv_heads = nb::cast<int>(parts.attr("kv_heads")), m.head_size = nb::cast<int>(parts.attr("head_size"));
  m.precision = precision_of(precision);
  for (nb::handle h : parts.attr("ropes")) {
    const auto frequency = nb::cast<In<float, 1>>(h);
    m.ropes.push_back({{frequency.data(), frequency.data() + frequency.shape(0)}, m.angles()});
  }
  m.embedding = made.matrix(parts.attr("embedding"));
  m.embedding_scale = nb::cast<float>(parts.attr("embedding_scale"));
  if (const nb::object table = parts.attr("positions"); !table.is_none()) {
    m.positions = dense_of(made.take<AnyMatrix>(table));
    m.position_offset = nb::cast<int>(parts.attr("position_offset"));
  }
  m.norm = made.norm(parts.attr("norm"), m.width, "norm");
  m.logit_scale = nb::cast<float>(parts.attr("logit_scale")), m.softcap = nb::cast<float>(parts.attr("softcap"));
  m.head = made.linear(parts.attr("head"));
  if (const nb::object in = parts.attr("project_in"); !in.is_none()) m.project_in = made.linear(in);
  if (const nb::object out = parts.attr("project_out"); !out.is_none()) m.project_out = made.linear(out);
  for (nb::handle h : parts.attr("layers")) m.layers.push_back(made.layer(h, m));
  const std::string problem = m.problem();
  require(problem.empty(), problem);
  made.decoder = std::make_unique<Decoder>(std::move(m));
  made.prefill = std::make_unique<Prefill>(made.decoder->model());
  new (self) Owned(std::move(made));
}

// A cache and the Python objects whose memory it is. It never changes after it was made, so that any number of calls,
// from any threads, can use one while others are made and dropped: a call holds on to the one it was given.
struct BoundCache {
  Cache cache;
  std::vector<nb::ndarray<>> arrays;
};

BoundCache blocks(const Owned &self, std::vector<AnyCache> layers) {
  const Model &m = self.decoder->model();
  require(layers.size() == m.layers.size(), "the cache must have one array per layer");
  BoundCache made;
  Cache &c = made.cache;
  c.type = dtype_of(layers[0].dtype());
  c.heads = m.kv_heads, c.head_size = m.head_size;
  c.rows = int(layers[0].shape(1)), c.capacity = int(layers[0].shape(3));
  for (const AnyCache &a : layers) {
    require(dtype_of(a.dtype()) == c.type && a.shape(0) == 2 && int(a.shape(1)) == c.rows &&
                int(a.shape(2)) == m.kv_heads && int(a.shape(3)) == c.capacity && int(a.shape(4)) == m.head_size,
            "a layer's cache must be [2, rows, kv_heads, capacity, head_size], alike in all layers");
    c.layers.push_back(static_cast<uint8_t *>(a.data()));
    made.arrays.emplace_back(nb::ndarray<>(a.handle()));
  }
  return made;
}

using AnyPages = nb::ndarray<nb::c_contig, nb::device::cpu>;

// Pages instead. Each layer: codes (bytes, or values of 16 bits), words, center (both or one may be None), and for keys
// and values bits, groups and whether they are rotated; `values`: the dtype of 16 bits, as an array of it.
BoundCache pages(const Owned &self, nb::sequence layers, int page, AnyPages values) {
  const Model &m = self.decoder->model();
  require(nb::len(layers) == m.layers.size(), "pages must have one array of codes per layer");
  require(page >= 1, "a page holds at least one token");
  require(m.head_size <= 512, "pages hold heads of at most 512 channels");
  BoundCache made;
  Cache &c = made.cache;
  c.type = dtype_of(values.dtype()), c.page = page;
  c.hadamard_block = m.head_size & -m.head_size;
  c.heads = m.kv_heads, c.head_size = m.head_size;
  for (nb::handle h : layers) {
    LayerPages l;
    const auto bits = nb::cast<std::pair<int, int>>(h.attr("bits")),
               groups = nb::cast<std::pair<int, int>>(h.attr("groups"));
    const auto rotate = nb::cast<std::pair<bool, bool>>(h.attr("rotate"));
    l.kind[0].bits = bits.first, l.kind[0].groups = groups.first, l.kind[0].rotate = rotate.first;
    l.kind[1].bits = bits.second, l.kind[1].groups = groups.second, l.kind[1].rotate = rotate.second;
    for (const KindOfPages &k : l.kind) {
      require(k.bits == 16 || k.bits == 8 || k.bits == 4 || k.bits == 3 || k.bits == 2,
              "pages have 16, 8, 4, 3 or 2 bits");
      require(k.coded()
                  ? k.groups >= 1 && k.groups <= 64 && m.head_size % k.groups == 0 && m.head_size / k.groups % 2 == 0
                  : k.groups == 0 && !k.rotate,
              "codes have groups of an even number of channels, values of 16 bits none");
    }
    l.lay_out(m.kv_heads, page, m.head_size, size_of(c.type));
    const auto codes = nb::cast<AnyPages>(h.attr("codes"));
    const bool floats = !l.kind[0].coded() && !l.kind[1].coded();
    require(codes.ndim() >= 1 && (floats ? dtype_of(codes.dtype()) == c.type : codes.dtype() == nb::dtype<uint8_t>()) &&
                codes.nbytes() == codes.shape(0) * l.page_bytes,
            "pages must be [pages, 2, kv_heads, page, values or bytes of a head], or [pages, bytes]");
    require(made.arrays.empty() || int(codes.shape(0)) == c.pages, "all layers must have the same number of pages");
    c.pages = int(codes.shape(0));
    l.codes = static_cast<uint8_t *>(codes.data());
    made.arrays.emplace_back(nb::ndarray<>(codes.handle()));
    c.layers.push_back(l.codes);
    require(floats == h.attr("words").is_none(), "codes, and only those, come with packed scales");
    if (!floats) {
      const auto words = nb::cast<AnyPages>(h.attr("words"));
      require(words.dtype() == nb::dtype<int16_t>() && words.ndim() >= 1 && words.shape(0) == codes.shape(0) &&
                  words.size() == words.shape(0) * l.page_words,
              "words must be [pages, 2, kv_heads, page, groups], or [pages, words]");
      l.words = static_cast<int16_t *>(words.data());
      made.arrays.emplace_back(nb::ndarray<>(words.handle()));
    }
    if (!h.attr("center").is_none()) {
      const auto v = nb::cast<In<float, 2>>(h.attr("center"));
      require(l.kind[0].coded() && int(v.shape(0)) == m.kv_heads && int(v.shape(1)) == m.head_size,
              "a centre must be [kv_heads, head_size], of keys that are coded");
      l.center = v.data();
      made.arrays.emplace_back(nb::ndarray<>(v.handle()));
    }
    c.paged_layers.push_back(l);
  }
  return made;
}

// A value of an array that another thread may write at this moment: read once, then only the copy is looked at.
template <class T>
T read_once(const T *at) {
  return __atomic_load_n(at, __ATOMIC_RELAXED);
}

// How many sequences and tokens there is room for. With pages this is a matter of the table [rows, pages of a row],
// which comes with every call.
using Table = std::optional<In<int32_t, 2>>;
struct Room {
  const Cache &c;
  const Table &table;
  int64_t rows, capacity;

  Room(const Model &m, const Cache &cache, const Table &pages_of_rows) : c(cache), table(pages_of_rows) {
    require(c.layers.size() == m.layers.size() && c.heads == m.kv_heads && c.head_size == m.head_size,
            "the cache was made for a model of other sizes");
    require(c.paged() == table.has_value(), "a cache of pages, and only that, comes with a table");
    rows = table ? int64_t(table->shape(0)) : c.rows;
    capacity = table ? std::min<int64_t>(int64_t(table->shape(1)) * c.page, INT32_MAX) : c.capacity;
  }

  size_t pages_for(int64_t tokens) const { return c.paged() ? size_t((tokens + c.page - 1) / c.page) : 0; }

  // Copy the pages of the first `tokens` tokens of a row, and check the copy.
  void copy_pages(int64_t row, int64_t tokens, int32_t *to) const {
    const size_t count = pages_for(tokens);
    for (size_t i = 0; i < count; ++i) {
      to[i] = read_once(table->data() + size_t(row) * table->shape(1) + i);
      require(to[i] >= 0 && to[i] < c.pages, "the table names a page that is not there");
    }
  }
};

void step(Owned &self, const BoundCache &bound, In<int64_t, 1> token, In<int64_t, 1> position,
          std::optional<In<int64_t, 1>> row, Table table, Out<float, 2> logits, std::optional<In<int64_t, 1>> want) {
  const Model &m = self.decoder->model();
  const Room room(m, bound.cache, table);
  const int B = int(token.shape(0)), V = m.head.N;
  require(token.shape(0) >= 1 && token.shape(0) <= Decoder::kRows,
          "a step takes 1 to " + std::to_string(Decoder::kRows) + " tokens");
  require(position.shape(0) == size_t(B) && (!row || row->shape(0) == size_t(B)), "one position (and row) per token");
  require(!want || want->shape(0) <= size_t(B), "logits can be wanted of each token once");
  const int W = want ? int(want->shape(0)) : B;
  require(logits.shape(0) == size_t(W) && logits.shape(1) == size_t(V), "logits must be [B, V]");
  Decoder::Tokens in;
  in.count = B, in.wanted = W;
  for (int i = 0; i < W; ++i) {
    in.want[i] = want ? read_once(want->data() + i) : i;
    require(in.want[i] >= 0 && in.want[i] < B, "logits are wanted of a token that is not in the step");
  }
  for (int b = 0; b < B; ++b) {
    in.token[b] = read_once(token.data() + b);
    in.position[b] = read_once(position.data() + b);
    in.row[b] = row ? read_once(row->data() + b) : b;
    require(in.token[b] >= 0 && in.token[b] < m.embedding.N, "no such token");
    require(in.position[b] >= 0 && in.position[b] < room.capacity, "the position is outside of the cache");
    require(in.position[b] < m.positions_end(), "the position is beyond the learned ones");
    require(in.row[b] >= 0 && in.row[b] < room.rows, "no such row of the cache");
    for (int i = 0; i < b; ++i)
      require(in.row[i] != in.row[b] || in.position[i] != in.position[b],
              "two tokens of a step cannot share a place of the cache");
  }
  in.prepare();
  std::vector<int32_t> copied;
  if (table) {  // rows become seats: a seat for each sequence of the step
    in.width = room.pages_for(in.last + 1);
    int64_t seats[Decoder::kRows];
    int count = 0;
    copied.resize(in.width * B);
    for (int b = 0; b < B; ++b) {
      const int seat = int(std::find(seats, seats + count, in.row[b]) - seats);
      if (seat == count) {
        seats[count++] = in.row[b];
        room.copy_pages(in.row[b], in.upto[b] + 1, copied.data() + size_t(seat) * in.width);
      }
      in.row[b] = seat;
    }
    in.pages = copied.data();
  }
  nb::gil_scoped_release release;
  self.decoder->step(bound.cache, in, logits.data());
}

// Prompts, or chunks of them: sequence s has the next count[s] tokens, which stand at position[s] and behind it in row
// row[s] (default: s) of the cache. logits: of all tokens, or of the last tokens of the sequences `want`, in order.
void prefill(Owned &self, const BoundCache &bound, In<int64_t, 1> token, In<int64_t, 1> count, In<int64_t, 1> position,
             std::optional<In<int64_t, 1>> row, Table table, Out<float, 2> logits, std::optional<In<int64_t, 1>> want) {
  const Model &m = self.decoder->model();
  const Room room(m, bound.cache, table);
  const int64_t N = int64_t(token.shape(0)), S = int64_t(count.shape(0));
  require(position.shape(0) == size_t(S) && (!row || row->shape(0) == size_t(S)),
          "one position (and row) per sequence");
  require(logits.shape(0) == (want ? want->shape(0) : size_t(N)) && logits.shape(1) == size_t(m.head.N),
          "logits must be [wanted, V]");
  std::vector<int64_t> tokens(N);
  for (int64_t t = 0; t < N; ++t) {
    tokens[t] = read_once(token.data() + t);
    require(tokens[t] >= 0 && tokens[t] < m.embedding.N, "no such token");
  }
  std::vector<Prefill::Sequence> sequences(S);
  std::vector<std::vector<int32_t>> copied(table ? S : 0);
  std::vector<int64_t> rows(S);
  int64_t done = 0;
  for (int64_t s = 0; s < S; ++s) {
    const int64_t T = read_once(count.data() + s), at = read_once(position.data() + s);
    rows[s] = row ? read_once(row->data() + s) : s;
    require(T >= 1, "a prompt has at least one token");
    require(T <= N - done, "the counts add up to more tokens than there are");
    require(rows[s] >= 0 && rows[s] < room.rows, "no such row of the cache");
    require(at >= 0 && at <= room.capacity && T <= room.capacity - at, "the prompt does not fit the cache");
    require(at + T <= m.positions_end(), "the prompt goes beyond the learned positions");
    for (int64_t i = 0; i < s; ++i)
      require(rows[i] != rows[s], "two sequences of a pass cannot share a row of the cache");
    if (table) {
      copied[s].resize(room.pages_for(at + T));
      room.copy_pages(rows[s], at + T, copied[s].data());
    }
    sequences[s] = {tokens.data() + done, int(T), int(at), int(rows[s]), table ? copied[s].data() : nullptr, !want};
    done += T;
  }
  require(done == N, "the counts add up to fewer tokens than there are");
  int64_t last = -1;
  for (size_t i = 0; want && i < want->shape(0); ++i) {
    const int64_t s = read_once(want->data() + i);
    require(s > last && s < S, "wanted sequences must be in order, and of the pass");
    sequences[s].wanted = true, last = s;
  }
  nb::gil_scoped_release release;
  self.prefill->run(bound.cache, sequences, !want, logits.data());
}

nb::dict prefill_phases(Owned &self) {
  static constexpr const char *kNames[] = {"embed",     "input",   "qkv",        "place", "attention", "output",
                                           "mlp_input", "gate_up", "activation", "down",  "head"};
  Prefill::Times times;
  {
    nb::gil_scoped_release release;
    times = self.prefill->seconds();
  }
  nb::dict d;
  for (int i = 0; i < Prefill::kPhases; ++i) d[kNames[i]] = times[i];
  return d;
}

void time_phases(Owned &self, bool on) {
  nb::gil_scoped_release release;
  self.decoder->time_phases(on);
}

nb::dict phases(Owned &self) {
  static constexpr const char *kNames[] = {"embed", "qkv", "attention", "output", "gate_up", "down", "head"};
  Decoder::Times times;
  {
    nb::gil_scoped_release release;
    times = self.decoder->times();
  }
  nb::dict d;
  for (int i = 0; i < Decoder::kPhases; ++i) d[kNames[i]] = times.phase[i];
  d["waiting"] = times.waited;
  d["preparing"] = times.prepared;
  return d;
}

}  // namespace

void bind_decoder(nb::module_ &m) {
  nb::class_<BoundCache>(m, "Cache", "Keys and values of all layers, made by Decoder.blocks or Decoder.pages.");

  const auto none = nb::none();
  nb::class_<Owned>(m, "Decoder", "One decode step of a whole model; see crelle.kernels.cpu.fused_decoder.")
      .def("__init__", &build, "parts"_a, "precision"_a)
      .def("blocks", &blocks, "layers"_a)
      .def("pages", &pages, "layers"_a, "page"_a, "values"_a)
      .def("step", &step, "cache"_a, "token"_a.noconvert(), "position"_a.noconvert(), "row"_a.none().noconvert(),
           "table"_a.none().noconvert(), "logits"_a.noconvert(), "want"_a.none().noconvert() = none)
      .def("prefill", &prefill, "cache"_a, "token"_a.noconvert(), "count"_a.noconvert(), "position"_a.noconvert(),
           "row"_a.none().noconvert(), "table"_a.none().noconvert(), "logits"_a.noconvert(),
           "want"_a.none().noconvert())
      .def("prefill_phases", &prefill_phases, "Seconds per phase of the latest prefill.")
      .def("time_phases", &time_phases, "on"_a)
      .def("phases", &phases,
           "Seconds of the first thread per phase; of them, at barriers and on norms and encodings.");
}

}  // namespace crelle::cpu
