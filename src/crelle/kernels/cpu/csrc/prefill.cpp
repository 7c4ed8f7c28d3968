#include "prefill.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>

#include "matmul.h"

namespace crelle::cpu {
namespace {

constexpr int kBlocksOfItem = 4;    // of a coded matrix
constexpr int kOutputsOfItem = 64;  // of a plain matrix
constexpr int kPlainRows = 32;      // of x that pass by a plain item at a time: both stay in L2
constexpr int kPadding = 64;        // features: a multiple of every block

// Tokens that go through the last layer when one is wanted: enough for tiles, so that it is computed like the others.
constexpr int kKept = 24;

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// fn(i) for i in [0, count): threads take the next one as they come.
template <class F>
void for_each(int count, F &&fn) {
  std::atomic<int> next{0};
  Pool::get().run([&](int, int) {
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) fn(i);
  });
}

int tokens_of(int T, int tile) { return std::min(kTileRows, T - tile * kTileRows); }

const Isa &isa_of(const Model &model) {
  for (const LayerWeights &l : model.layers)
    for (const Matrix *m : {&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down})
      if (m->coded) return *m->coded->isa;
  return model.head.coded ? *model.head.coded->isa : isa();
}

}  // namespace

Prefill::Prefill(const Model &model) : model_(model), ops_(ops_of(isa_of(model))) {
  for (const LayerWeights &l : model_.layers) inner_ = std::max(inner_, l.gate.N);
}

void Prefill::done(Phase phase) {
  const double t = now();
  seconds_[phase] += t - last_;
  last_ = t;
}

Prefill::Times Prefill::seconds() {
  std::lock_guard lock(mutex_);
  return seconds_;
}

void Prefill::run(const Cache &cache, const int32_t *pages, const int64_t *token, int T, int position, int row,
                  bool last, float *logits) {
  std::lock_guard lock(mutex_);
  cache_ = &cache, pages_ = pages, row_ = row;
  seconds_ = {};
  last_ = now();
  const int portions = (T + kPortion - 1) / kPortion;
  const int each = tiles_of((T + portions - 1) / portions) * kTileRows;  // about equal, whole tiles
  for (int t = 0; t < T; t += each) {
    const int count = std::min(each, T - t);
    const int wanted = !last ? count : t + count == T;  // rows of logits
    portion(token + t, count, position + t, last, wanted, logits + (last ? 0 : size_t(t) * model_.head.N));
  }
}

Prefill::Tiles Prefill::grow(Buffer &b, int T, int features) {
  const size_t pitch = size_t(features + kPadding - 1) / kPadding * kPadding * kTileRows;
  b.grow(tiles_of(T) * pitch * sizeof(float));
  return {floats_of(b), pitch};
}

void Prefill::portion(const int64_t *token, int T, int position, bool last, int wanted, float *logits) {
  const int q = model_.heads * model_.head_size, kv = model_.kv_heads * model_.head_size;
  Buffer *b = buffers_;
  stream_ = grow(*b++, T, model_.width), normed_ = grow(*b++, T, model_.width);
  q_ = grow(*b++, T, q), attended_ = grow(*b++, T, q), k_ = grow(*b++, T, kv), v_ = grow(*b++, T, kv);
  gate_ = grow(*b++, T, inner_), up_ = grow(*b++, T, inner_), angles_ = grow(*b++, T, model_.head_size);

  for_each(tiles_of(T), [&](int t) { embed(token, T, position, t); });
  done(Embed);
  const int layers = int(model_.layers.size()), kept = std::max(0, T - kKept) / kTileRows;  // from which tile on
  for (int i = 0; i + 1 < layers; ++i) layer(i, T, position, 0);
  layer(layers - 1, T, position, !last ? 0 : wanted ? kept : tiles_of(T));
  if (wanted) finish(T, wanted, logits);
}

void Prefill::embed(const int64_t *token, int T, int position, int tile) {
  const int width = model_.width, half = model_.head_size / 2, count = tokens_of(T, tile);
  static thread_local Buffer scratch;
  scratch.grow(size_t{kTileRows} * width * sizeof(float));
  float *const rows = floats_of(scratch);
  for (int i = 0; i < count; ++i) {
    const int n = int(token[tile * kTileRows + i]);
    if (model_.embedding.coded)
      dequantize_row(*model_.embedding.coded, n, rows + size_t(i) * width);
    else
      ops_.load(model_.embedding.dense.type, model_.embedding.dense.row(n), rows + size_t(i) * width, width);
  }
  ops_.tile_of_rows(rows, width, count, width, false, stream_.tile(tile));
  float *const cos = angles_.tile(tile), *const sin = cos + half * kTileRows;
  for (int d = 0; d < half; ++d)
    for (int i = 0; i < kTileRows; ++i) {
      const float angle = static_cast<float>(position + tile * kTileRows + i) * model_.frequency[d];
      cos[d * kTileRows + i] = std::cos(angle), sin[d * kTileRows + i] = std::sin(angle);
    }
}

// Layer i. Behind its keys and values only the tokens from tile `from` on go on.
void Prefill::layer(int i, int T, int position, int from) {
  const LayerWeights &l = model_.layers[i];
  const int width = model_.width, inner = l.gate.N, tiles = tiles_of(T);
  const auto norm = [&](Tiles x, const float *weight) {
    return [=, this](int t) {
      ops_.norm_tile(x.tile(t), weight, model_.norm_eps, width, normed_.tile(t));
      pack(t);
    };
  };
  expect(normed_, T, width, {&l.q, &l.k, &l.v});
  for_each(tiles, norm(stream_, l.norm_attention));
  done(Input);
  multiply({{&l.q, q_}, {&l.k, k_}, {&l.v, v_}});
  done(Qkv);
  for_each(tiles, [&](int t) { place(l, i, T, position, t); });
  done(Place);
  if (from >= tiles) return;

  const int blocks = (T - from * kTileRows + kBlockTokens - 1) / kBlockTokens, Hkv = model_.kv_heads;
  for_each(blocks * Hkv, [&](int item) {  // the longest first
    attend(l, i, T, position, from + (blocks - 1 - item / Hkv) * (kBlockTokens / kTileRows), item % Hkv);
  });
  done(Attention);

  const Tiles stream = stream_.from(from);
  const int M = T - from * kTileRows, rest = tiles_of(M);
  const auto add_bias = [&](const Matrix &m) {
    if (m.bias) for_each(rest, [&](int t) { ops_.add_to_tile(stream.tile(t), m.bias, width); });
  };
  expect(attended_.from(from), M, model_.heads * model_.head_size, {&l.o});
  for_each(rest, [&](int t) { pack(t); });
  multiply({{&l.o, stream}}, true);
  add_bias(l.o);
  done(Output);

  expect(normed_, M, width, {&l.gate, &l.up});
  for_each(rest, norm(stream, l.norm_mlp));
  done(MlpInput);
  multiply({{&l.gate, gate_}, {&l.up, up_}});
  done(GateUp);
  expect(gate_, M, inner, {&l.down});
  for_each(rest, [&](int t) {
    if (l.gate.bias) ops_.add_to_tile(gate_.tile(t), l.gate.bias, inner);
    if (l.up.bias) ops_.add_to_tile(up_.tile(t), l.up.bias, inner);
    ops_.silu_mul(gate_.tile(t), up_.tile(t), inner * kTileRows);
    pack(t);
  });
  done(Silu);
  multiply({{&l.down, stream}}, true);
  add_bias(l.down);
  done(Down);
}

// Bias, norm and rope of a tile's queries and keys; keys and values into the cache.
void Prefill::place(const LayerWeights &l, int layer, int T, int position, int tile) {
  const int H = model_.heads, Hkv = model_.kv_heads, D = model_.head_size, head = D * kTileRows;
  const int at = position + tile * kTileRows, count = tokens_of(T, tile);
  const Number type = cache_->type;
  const size_t row = D * size_of(type), plane = cache_->paged() ? 0 : cache_->capacity * row;
  uint8_t *const keys = cache_->paged() ? nullptr : cache_->layers[layer] + size_t(row_) * Hkv * plane + at * row;
  uint8_t *const values = cache_->paged() ? nullptr : keys + size_t(cache_->rows) * Hkv * plane;
  float *const q = q_.tile(tile), *const k = k_.tile(tile), *const v = v_.tile(tile);
  const float *cos = angles_.tile(tile), *sin = cos + head / 2;
  if (l.q.bias) ops_.add_to_tile(q, l.q.bias, H * D);
  if (l.k.bias) ops_.add_to_tile(k, l.k.bias, Hkv * D);
  if (l.v.bias) ops_.add_to_tile(v, l.v.bias, Hkv * D);
  const auto turn = [&](float *x, const float *norm, float factor) {
    if (norm) ops_.norm_tile(x, norm, model_.norm_eps, D, x);
    ops_.turn_tile(x, cos, sin, factor, D);
  };
  static thread_local Buffer scratch;
  scratch.grow(head * sizeof(float));
  const auto keep = [&](const float *x, uint8_t *to) {  // the tokens' rows are neighbours
    float *const rows = type == Number::F32 ? reinterpret_cast<float *>(to) : floats_of(scratch);
    ops_.rows_of_tile(x, count, D, rows, D);
    if (type != Number::F32) ops_.store(type, rows, to, count * D);
  };
  const auto into_pages = [&](int h, int kind, const float *x) {
    const PagedHead where{*cache_, pages_, layer, h, Hkv, D};
    ops_.rows_of_tile(x, count, D, floats_of(scratch), D);
    for (int i = 0; i < count; ++i) where.write(ops_, kind, at + i, floats_of(scratch) + size_t(i) * D, true, nullptr);
  };
  for (int h = 0; h < H; ++h) turn(q + h * head, l.q_norm, 1.0f / std::sqrt(static_cast<float>(D)));
  if (cache_->turned) turn_back(q, H, count);
  for (int h = 0; h < Hkv; ++h) {
    turn(k + h * head, l.k_norm, 1.0f);
    if (cache_->paged()) {
      into_pages(h, 0, k + h * head), into_pages(h, 1, v + h * head);
      continue;
    }
    keep(k + h * head, keys + h * plane);
    keep(v + h * head, values + h * plane);
  }
}

// The tokens of a block from `tile` on, for all query heads of one key/value head.
// The Hadamard matrix times all heads of a tile; it is its own inverse.
void Prefill::turn_back(float *tile, int heads, int count) const {
  const int D = model_.head_size;
  static thread_local Buffer scratch;
  scratch.grow(size_t(D) * kTileRows * sizeof(float));
  float *const rows = floats_of(scratch);
  for (int h = 0; h < heads; ++h) {
    float *const x = tile + size_t(h) * D * kTileRows;
    ops_.rows_of_tile(x, count, D, rows, D);
    for (int i = 0; i < count; ++i) hadamard(rows + size_t(i) * D, D, cache_->turned);
    ops_.tile_of_rows(rows, D, count, D, false, x);
  }
}

void Prefill::attend(const LayerWeights &l, int layer, int T, int position, int tile, int kv) {
  const int Hkv = model_.kv_heads, D = model_.head_size, G = model_.heads / Hkv;
  const size_t head = size_t(kv) * G * D * kTileRows;
  static thread_local Buffer scratch;  // of the thread that runs this
  scratch.grow(ops_.attend_block_scratch(G, D) * sizeof(float));
  AttendBlock a{};
  a.type = cache_->type, a.D = D, a.heads = G, a.window = l.window;
  a.position = position + tile * kTileRows, a.count = std::min(kBlockTokens, T - tile * kTileRows);
  a.pitch = q_.pitch, a.q = q_.tile(tile) + head, a.out = attended_.tile(tile) + head;
  const std::pair<const Ops &, PagedHead> pages{ops_, {*cache_, pages_, layer, kv, Hkv, D}};
  if (cache_->paged()) {
    a.pages = &pages;
    a.read = [](const void *p, int from, int count, float *k, float *v) {
      const auto &[ops, where] = *static_cast<const std::pair<const Ops &, PagedHead> *>(p);
      where.read(ops, 0, from, count, k);
      where.read(ops, 1, from, count, v);
    };
  } else {
    const size_t plane = cache_->capacity * D * size_of(cache_->type);
    a.k = cache_->layers[layer] + (size_t(row_) * Hkv + kv) * plane;
    a.v = a.k + size_t(cache_->rows) * Hkv * plane;
  }
  ops_.attend_block(a, floats_of(scratch));
  if (cache_->turned)
    for (int i = 0; i < a.count; i += kTileRows)
      turn_back(attended_.tile(tile + i / kTileRows) + head, G, std::min(kTileRows, a.count - i));
}

// The head of the last `wanted` tokens, as rows.
void Prefill::finish(int T, int wanted, float *logits) {
  const int width = model_.width, first = (T - wanted) / kTileRows, skipped = T - wanted - first * kTileRows;
  const Matrix &head = model_.head;
  const int M = T - first * kTileRows;
  operand_.M = wanted, operand_.K = width;
  operand_.rows.grow(size_t(M) * width * sizeof(float));
  float *const rows = floats_of(operand_.rows);
  for_each(tiles_of(M), [&](int t) {
    float *x = normed_.tile(t);
    ops_.norm_tile(stream_.tile(first + t), model_.norm, model_.norm_eps, width, x);
    ops_.rows_of_tile(x, tokens_of(M, t), width, rows + size_t(t) * kTileRows * width, width);
  });
  if (skipped) std::copy_n(rows + size_t(skipped) * width, size_t(wanted) * width, rows);
  multiply_rows(head, logits);
  if (head.bias) for_each(wanted, [&](int m) { ops_.add(logits + size_t(m) * head.N, head.bias, head.N); });
  done(Head);
}

bool Prefill::by_tiles(const Matrix &m, int M) const {
  return m.coded && m.coded->isa->gemm && M >= m.coded->isa->gemm->rows;
}

bool Prefill::packs_alike(const Weight &a, const Weight &b) const {
  const Gemm &gemm = *a.isa->gemm;
  return a.isa == b.isa && a.plan == b.plan && gemm.tiles(a, model_.precision) == gemm.tiles(b, model_.precision);
}

// Announce x [M, K] for the products of `group`: afterwards `pack` is called for each tile, then `multiply`.
void Prefill::expect(Tiles x, int M, int K, std::initializer_list<const Matrix *> group) {
  Operand &o = operand_;
  o.x = x, o.M = M, o.K = K, o.ways = 0, o.as_rows = false;
  for (const Matrix *m : group) {
    if (!by_tiles(*m, M)) {
      o.as_rows = true;
      continue;
    }
    const auto end = o.packed.begin() + o.ways;
    if (std::any_of(o.packed.begin(), end, [&](const auto &p) { return packs_alike(*p.first, *m->coded); })) continue;
    if (o.ways == int(o.packed.size())) o.packed.emplace_back();
    auto &[weight, buffer] = o.packed[o.ways++];
    weight = m->coded;
    buffer.grow(weight->isa->gemm->pack_bytes(*weight, M, model_.precision));
  }
  if (o.as_rows) o.rows.grow(size_t(M) * K * sizeof(float));
}

// A tile of x, while it is in L1.
void Prefill::pack(int tile) {
  Operand &o = operand_;
  for (int i = 0; i < o.ways; ++i) {
    auto &[weight, buffer] = o.packed[i];
    const Gemm &gemm = *weight->isa->gemm;
    gemm.pack_tile(*weight, o.x.tile(tile), model_.precision,
                   buffer.data() + tile * gemm.pack_bytes(*weight, kTileRows, model_.precision));
  }
  if (o.as_rows)
    ops_.rows_of_tile(o.x.tile(tile), tokens_of(o.M, tile), o.K, floats_of(o.rows) + size_t(tile) * kTileRows * o.K,
                      o.K);
}

// y = x W^T, or y += x W^T, without bias.
void Prefill::multiply(std::initializer_list<Product> products, bool add) {
  const Operand &o = operand_;
  const int tiles = tiles_of(o.M);
  items_.clear();
  for (const Product &p : products) {
    const Matrix &m = *p.m;
    if (!by_tiles(m, o.M)) {
      product_rows_.grow(size_t(o.M) * m.N * sizeof(float));
      multiply_rows(m, floats_of(product_rows_));
      for_each(tiles, [&](int t) {
        ops_.tile_of_rows(floats_of(product_rows_) + size_t(t) * kTileRows * m.N, m.N, tokens_of(o.M, t), m.N, add,
                          p.y.tile(t));
      });
      continue;
    }
    const auto way =
        std::find_if(o.packed.begin(), o.packed.end(), [&](const auto &w) { return packs_alike(*w.first, *m.coded); });
    for (int b = 0; b < m.coded->blocks; b += kBlocksOfItem)
      items_.push_back({&p, way->second.data(), b, std::min(m.coded->blocks, b + kBlocksOfItem)});
  }
  if (items_.empty()) return;
  for_each(int(items_.size()), [&](int i) {
    const auto &[product, packed, from, to] = items_[i];
    const Weight &w = *product->m->coded;
    w.isa->gemm->run_tiles(w, packed, tiles, model_.precision, product->y.data, product->y.pitch, add, from, to);
  });
}

// y [M, N] = rows W^T.
void Prefill::multiply_rows(const Matrix &m, float *y) {
  const float *const x = floats_of(operand_.rows);
  const int M = operand_.M;
  if (m.coded) return matmul(x, M, *m.coded, y, model_.precision);
  for_each((m.N + kOutputsOfItem - 1) / kOutputsOfItem, [&](int i) {
    const int from = i * kOutputsOfItem, to = std::min(m.N, from + kOutputsOfItem);
    for (int r = 0; r < M; r += kPlainRows)
      ops_.dense(m.dense, x + size_t(r) * m.K, m.K, std::min(kPlainRows, M - r), y + size_t(r) * m.N, m.N, from, to);
  });
}

}  // namespace crelle::cpu
