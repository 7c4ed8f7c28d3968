#include "decoder/prefill.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>

#include "attention/hadamard.h"
#include "planes/matmul.h"

namespace crelle::cpu {
namespace {

constexpr int kBlocksOfItem = 4;    // of a coded matrix, at most
constexpr int kOutputsOfItem = 64;  // of a plain matrix
constexpr int kPlainRows = 32;      // of x that pass by a plain item at a time: both stay in L2
constexpr int kPadding = 64;        // features: a multiple of every block

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// fn(i) for i in [0, count): threads take the next one as they come.
template <class F>
void for_each(int count, F &&fn) {
  std::atomic<int> next{0};
  Pool::get().run([&](int, int) {
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) fn(i);
  });
}

// Blocks of an item where threads share `blocks`: a number of items that they can share out equally.
int blocks_of_item(int blocks) {
  const int threads = Pool::get().threads(), each = (blocks + threads - 1) / threads;
  const int items = std::max(1, (each + kBlocksOfItem - 1) / kBlocksOfItem);
  return std::max(1, (each + items - 1) / items);
}

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

void Prefill::run(const Cache &cache, const std::vector<Sequence> &sequences, bool all, float *logits) {
  std::lock_guard lock(mutex_);
  cache_ = &cache;
  seconds_ = {};
  last_ = now();
  std::vector<Tile> tiles;
  int made = 0;  // rows of logits
  for (const Sequence &s : sequences)
    for (int first = 0; first < s.count; first += kTileRows) {
      const int count = std::min(kTileRows, s.count - first);
      const bool wanted = all || (s.wanted && first + count == s.count);
      tiles.push_back({&s, first, count, 0, wanted ? made : -1});
      if (wanted) made += all ? count : 1;
    }
  const int passes = (int(tiles.size()) + kTiles - 1) / kTiles;
  for (int i = 0; i < passes; ++i) {  // about equal
    tiles_.assign(tiles.begin() + part(int(tiles.size()), i, passes),
                  tiles.begin() + part(int(tiles.size()), i + 1, passes));
    count_rows();
    pass(all, logits);
  }
}

void Prefill::count_rows() {
  int row = 0;
  for (Tile &t : tiles_) t.row = row, row += t.count;
}

Prefill::Tiles Prefill::grow(Buffer &b, int features) {
  const size_t pitch = size_t(features + kPadding - 1) / kPadding * kPadding * kTileRows;
  b.grow(tiles() * pitch * sizeof(float));
  return {floats_of(b), pitch};
}

void Prefill::pass(bool all, float *logits) {
  const int q = model_.heads * model_.head_size, kv = model_.kv_heads * model_.head_size;
  Buffer *b = buffers_;
  stream_ = grow(*b++, model_.width), normed_ = grow(*b++, model_.width);
  q_ = grow(*b++, q), attended_ = grow(*b++, q), k_ = grow(*b++, kv), v_ = grow(*b++, kv);
  gate_ = grow(*b++, inner_), up_ = grow(*b++, inner_), angles_ = grow(*b++, model_.angles());

  for_each(tiles(), [&](int t) { embed(t); });
  done(Embed);
  const int layers = int(model_.layers.size());
  for (int i = 0; i < layers; ++i) layer(i, i + 1 == layers && !all);
  if (!tiles_.empty()) finish(all, logits);
}

void Prefill::embed(int tile) {
  const int width = model_.width;
  const Tile &at = tiles_[tile];
  static thread_local Buffer scratch;
  scratch.grow(size_t{kTileRows + 1} * width * sizeof(float));
  float *const rows = floats_of(scratch), *const learned = rows + size_t{kTileRows} * width;
  for (int i = 0; i < at.count; ++i) {
    const int n = int(at.sequence->token[at.first + i]);
    float *const x = rows + size_t(i) * width;
    if (model_.embedding.coded)
      dequantize_row(*model_.embedding.coded, n, x);
    else
      ops_.load(model_.embedding.dense.type, model_.embedding.dense.row(n), x, width);
    if (model_.embedding_scale != 1.0f) ops_.scale(x, model_.embedding_scale, width);
    if (!model_.positions.N) continue;
    ops_.load(model_.positions.type, model_.positions.row(at.position() + i + model_.position_offset), learned, width);
    ops_.add(x, learned, width);
  }
  ops_.tile_of_rows(rows, width, at.count, width, false, stream_.tile(tile));
  for (const Rope &rope : model_.ropes) {
    const int half = rope.channels() / 2;
    float *const cos = angles_.tile(tile) + rope.at * kTileRows, *const sin = cos + half * kTileRows;
    for (int d = 0; d < half; ++d)
      for (int i = 0; i < kTileRows; ++i) {
        const float angle = static_cast<float>(at.position() + i) * rope.frequency[d];
        cos[d * kTileRows + i] = std::cos(angle), sin[d * kTileRows + i] = std::sin(angle);
      }
  }
}

// Layer i. In the last one only the tiles whose logits are wanted go on behind its keys and values.
void Prefill::layer(int i, bool last) {
  const LayerWeights &l = model_.layers[i];
  const int width = model_.width, inner = l.gate.N;
  const auto norm = [&](const Norm &norm) {
    return [&norm, width, this](int t) {
      norm_tile(ops_, norm, stream_.tile(t), width, normed_.tile(t));
      pack(t);
    };
  };
  expect(normed_, width, {&l.q, &l.k, &l.v});
  for_each(tiles(), norm(l.norm_attention));
  done(Input);
  multiply({{&l.q, q_}, {&l.k, k_}, {&l.v, v_}});
  done(Qkv);
  for_each(tiles(), [&](int t) { place(l, i, t); });
  done(Place);
  if (last) keep_wanted();
  if (tiles_.empty()) return;

  std::vector<std::pair<int, int>> blocks;  // first tile, tiles: neighbours of one sequence
  for (int t = 0; t < tiles(); ++t)
    if (blocks.empty() || blocks.back().second == kBlockTokens / kTileRows || !tiles_[t - 1].before(tiles_[t]))
      blocks.emplace_back(t, 1);
    else
      ++blocks.back().second;
  std::stable_sort(blocks.begin(), blocks.end(), [&](const auto &a, const auto &b) {  // the longest first
    return tiles_[a.first].position() > tiles_[b.first].position();
  });
  const int Hkv = model_.kv_heads;
  for_each(int(blocks.size()) * Hkv, [&](int item) {
    const auto [tile, count] = blocks[item / Hkv];
    attend(l, i, tile, count, item % Hkv);
  });
  done(Attention);

  expect(attended_, model_.heads * model_.head_size, {&l.o});
  for_each(tiles(), [&](int t) { pack(t); });
  add_to_stream(l.o, l.post_attention_norm);
  done(Output);

  l.gated ? expect(normed_, width, {&l.gate, &l.up}) : expect(normed_, width, {&l.gate});
  for_each(tiles(), norm(l.norm_mlp));
  done(MlpInput);
  l.gated ? multiply({{&l.gate, gate_}, {&l.up, up_}}) : multiply({{&l.gate, gate_}});
  done(GateUp);
  expect(gate_, inner, {&l.down});
  for_each(tiles(), [&](int t) {
    if (l.gate.bias) ops_.add_to_tile(gate_.tile(t), l.gate.bias, inner);
    if (l.up.bias) ops_.add_to_tile(up_.tile(t), l.up.bias, inner);
    ops_.activate(l.activation, gate_.tile(t), l.gated ? up_.tile(t) : nullptr, inner * kTileRows);
    pack(t);
  });
  done(Activate);
  add_to_stream(l.down, l.post_mlp_norm);
  done(Down);
}

// Of the pass only the tiles that give logits are left, side by side.
void Prefill::keep_wanted() {
  int kept = 0;
  for (int t = 0; t < tiles(); ++t) {
    if (tiles_[t].logits < 0) continue;
    if (kept < t) {
      std::copy_n(stream_.tile(t), stream_.pitch, stream_.tile(kept));
      std::copy_n(q_.tile(t), q_.pitch, q_.tile(kept));
      tiles_[kept] = tiles_[t];
    }
    ++kept;
  }
  tiles_.resize(kept);
  count_rows();
}

// The residual stream += x W^T + bias, or the norm of that where the model has one there.
void Prefill::add_to_stream(const Matrix &m, const Norm &post) {
  const int width = model_.width;
  if (!post) {
    multiply({{&m, stream_}}, true);
    if (m.bias) for_each(tiles(), [&](int t) { ops_.add_to_tile(stream_.tile(t), m.bias, width); });
    return;
  }
  multiply({{&m, normed_}});  // free: what was normed has been packed and multiplied
  for_each(tiles(), [&](int t) {
    float *const x = normed_.tile(t);
    if (m.bias) ops_.add_to_tile(x, m.bias, width);
    norm_tile(ops_, post, x, width, x);
    ops_.add(stream_.tile(t), x, width * kTileRows);
  });
}

// Bias, norm and rope of a tile's queries and keys; keys and values into the cache.
void Prefill::place(const LayerWeights &l, int layer, int tile) {
  const int H = model_.heads, Hkv = model_.kv_heads, D = model_.head_size, head = D * kTileRows;
  const Tile &of = tiles_[tile];
  const int at = of.position(), count = of.count;
  const DType type = cache_->type;
  const size_t row = D * size_of(type), plane = cache_->paged() ? 0 : cache_->capacity * row;
  uint8_t *const keys =
      cache_->paged() ? nullptr : cache_->layers[layer] + size_t(of.sequence->row) * Hkv * plane + at * row;
  uint8_t *const values = cache_->paged() ? nullptr : keys + size_t(cache_->rows) * Hkv * plane;
  float *const q = q_.tile(tile), *const k = k_.tile(tile), *const v = v_.tile(tile);
  if (l.q.bias) ops_.add_to_tile(q, l.q.bias, H * D);
  if (l.k.bias) ops_.add_to_tile(k, l.k.bias, Hkv * D);
  if (l.v.bias) ops_.add_to_tile(v, l.v.bias, Hkv * D);
  const int rotated = l.rope < 0 ? 0 : model_.ropes[l.rope].channels();
  const float *cos = l.rope < 0 ? nullptr : angles_.tile(tile) + model_.ropes[l.rope].at * kTileRows;
  const auto norm_rope = [&](float *x, const Norm &norm, float factor) {
    if (norm) norm_tile(ops_, norm, x, D, x);
    if (rotated) ops_.rope_tile(x, cos, cos + rotated / 2 * kTileRows, factor, rotated);
    if (rotated < D && factor != 1.0f) ops_.scale(x + rotated * kTileRows, factor, (D - rotated) * kTileRows);
  };
  static thread_local Buffer scratch;
  scratch.grow(head * sizeof(float));
  const auto keep = [&](const float *x, uint8_t *to) {  // the tokens' rows are neighbours
    float *const rows = type == DType::F32 ? reinterpret_cast<float *>(to) : floats_of(scratch);
    ops_.rows_of_tile(x, count, D, rows, D);
    if (type != DType::F32) ops_.store(type, rows, to, count * D);
  };
  const auto into_pages = [&](int h, int kind, const float *x) {
    const PagedHead where{*cache_, of.sequence->pages, layer, h, Hkv, D};
    ops_.rows_of_tile(x, count, D, floats_of(scratch), D);
    for (int i = 0; i < count; ++i) where.write(ops_, kind, at + i, floats_of(scratch) + size_t(i) * D, true, nullptr);
  };
  for (int h = 0; h < H; ++h) norm_rope(q + h * head, l.q_norm, l.scale);
  if (cache_->rotates(layer, 0)) hadamard_tile(q, H, count);
  for (int h = 0; h < Hkv; ++h) {
    norm_rope(k + h * head, l.k_norm, 1.0f);
    if (cache_->paged()) {
      into_pages(h, 0, k + h * head), into_pages(h, 1, v + h * head);
      continue;
    }
    keep(k + h * head, keys + h * plane);
    keep(v + h * head, values + h * plane);
  }
}

// The Hadamard matrix times all heads of a tile; it is its own inverse.
void Prefill::hadamard_tile(float *tile, int heads, int count) const {
  const int D = model_.head_size;
  static thread_local Buffer scratch;
  scratch.grow(size_t(D) * kTileRows * sizeof(float));
  float *const rows = floats_of(scratch);
  for (int h = 0; h < heads; ++h) {
    float *const x = tile + size_t(h) * D * kTileRows;
    ops_.rows_of_tile(x, count, D, rows, D);
    for (int i = 0; i < count; ++i) hadamard(rows + size_t(i) * D, D, cache_->hadamard_block);
    ops_.tile_of_rows(rows, D, count, D, false, x);
  }
}

// A block of neighbouring tiles from `tile` on, for all query heads of one key/value head.
void Prefill::attend(const LayerWeights &l, int layer, int tile, int tiles, int kv) {
  const int Hkv = model_.kv_heads, D = model_.head_size, G = model_.heads / Hkv;
  const size_t head = size_t(kv) * G * D * kTileRows;
  const Sequence &sequence = *tiles_[tile].sequence;
  const Tile &end = tiles_[tile + tiles - 1];
  static thread_local Buffer scratch;  // of the thread that runs this
  scratch.grow(ops_.attend_block_scratch(G, D) * sizeof(float));
  AttendBlock a{};
  a.type = cache_->type, a.D = D, a.heads = G, a.window = l.window;
  a.position = tiles_[tile].position(), a.count = end.position() + end.count - a.position;
  a.pitch = q_.pitch, a.q = q_.tile(tile) + head, a.out = attended_.tile(tile) + head;
  const std::pair<const Ops &, PagedHead> pages{ops_, {*cache_, sequence.pages, layer, kv, Hkv, D}};
  if (cache_->paged()) {
    a.pages = &pages;
    a.read = [](const void *p, int from, int count, float *k, float *v) {
      const auto &[ops, where] = *static_cast<const std::pair<const Ops &, PagedHead> *>(p);
      where.read(ops, 0, from, count, k);
      where.read(ops, 1, from, count, v);
    };
  } else {
    const size_t plane = cache_->capacity * D * size_of(cache_->type);
    a.k = cache_->layers[layer] + (size_t(sequence.row) * Hkv + kv) * plane;
    a.v = a.k + size_t(cache_->rows) * Hkv * plane;
  }
  ops_.attend_block(a, floats_of(scratch));
  if (cache_->rotates(layer, 1))
    for (int t = tile; t < tile + tiles; ++t) hadamard_tile(attended_.tile(t) + head, G, tiles_[t].count);
}

// The head of all tokens of the pass, or of the last token of each tile, as rows.
void Prefill::finish(bool all, float *logits) {
  const int width = model_.width, M = all ? rows() : tiles();
  const Matrix &head = model_.head;
  logits += size_t(tiles_.front().logits) * head.N;
  operand_.rows.grow(size_t(M) * width * sizeof(float));
  for_each(tiles(), [&](int t) {
    const Tile &tile = tiles_[t];
    const float *x = stream_.tile(t);
    if (model_.norm) norm_tile(ops_, model_.norm, x, width, normed_.tile(t)), x = normed_.tile(t);
    if (all) return ops_.rows_of_tile(x, tile.count, width, floats_of(operand_.rows) + size_t(tile.row) * width, width);
    float *const row = floats_of(operand_.rows) + size_t(t) * width;
    for (int i = 0; i < width; ++i) row[i] = x[i * kTileRows + tile.count - 1];
  });
  multiply_rows(head, M, all && by_tiles(head), logits);
  if (head.bias) for_each(M, [&](int m) { ops_.add(logits + size_t(m) * head.N, head.bias, head.N); });
  done(Head);
}

bool Prefill::by_tiles(const Matrix &m) const { return m.coded && gemm_of(*m.coded, model_.precision); }

bool Prefill::packs_alike(const Weight &a, const Weight &b) const {
  const Gemm &gemm = *a.isa->gemm;
  const bool mixed = a.stream == Stream::Mixed;
  if (mixed != (b.stream == Stream::Mixed) || (mixed && !a.mixed->same_inputs(*b.mixed))) return false;
  return a.isa == b.isa && a.partition == b.partition &&
         gemm.tiles(a, model_.precision) == gemm.tiles(b, model_.precision);
}

// Announce x [rows, K] for the products of `group`: afterwards `pack` is called for each tile, then `multiply`.
void Prefill::expect(Tiles x, int K, std::initializer_list<const Matrix *> group) {
  Operand &o = operand_;
  o.x = x, o.K = K, o.ways = 0, o.as_rows = false;
  for (const Matrix *m : group) {
    if (!by_tiles(*m)) {
      o.as_rows = true;
      continue;
    }
    const auto end = o.packed.begin() + o.ways;
    if (std::any_of(o.packed.begin(), end, [&](const auto &p) { return packs_alike(*p.first, *m->coded); })) continue;
    if (o.ways == int(o.packed.size())) o.packed.emplace_back();
    auto &[weight, buffer] = o.packed[o.ways++];
    weight = m->coded;
    buffer.grow(weight->isa->gemm->pack_bytes(*weight, tiles() * kTileRows, model_.precision));
  }
  if (o.as_rows) o.rows.grow(size_t(rows()) * K * sizeof(float));
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
  const Tile &t = tiles_[tile];
  if (o.as_rows) ops_.rows_of_tile(o.x.tile(tile), t.count, o.K, floats_of(o.rows) + size_t(t.row) * o.K, o.K);
}

// y = x W^T, or y += x W^T, without bias.
void Prefill::multiply(std::initializer_list<Product> products, bool add) {
  const Operand &o = operand_;
  if (o.as_rows) multiply_by_rows(products, add);
  items_.clear();
  int blocks = 0;
  for (const Product &p : products)
    if (by_tiles(*p.m)) blocks += p.m->coded->blocks;
  const int step = blocks_of_item(blocks);
  for (const Product &p : products) {
    const Matrix &m = *p.m;
    if (!by_tiles(m)) continue;
    const auto way = std::find_if(o.packed.begin(), o.packed.begin() + o.ways,
                                  [&](const auto &w) { return packs_alike(*w.first, *m.coded); });
    for (int b = 0; b < m.coded->blocks; b += step)
      items_.push_back({&p, way->second.data(), b, std::min(m.coded->blocks, b + step)});
  }
  if (items_.empty()) return;
  for_each(int(items_.size()), [&](int i) {
    const auto &[product, packed, from, to] = items_[i];
    const Weight &w = *product->m->coded;
    w.isa->gemm->run_tiles(w, packed, tiles(), model_.precision, product->y.data, product->y.pitch, add, from, to);
  });
}

// The products that are not by tiles. Coded ones that take the same integers share them, and are spread over the pool
// by blocks and rows: small matrices have fewer blocks than would keep all threads busy.
void Prefill::multiply_by_rows(std::initializer_list<Product> products, bool add) {
  const int M = rows();
  size_t room = 0;
  for (const Product &p : products)
    if (!by_tiles(*p.m)) room += size_t(M) * p.m->N;
  product_rows_.grow(room * sizeof(float));
  encode_operand(products);
  row_items_.clear();
  float *y = floats_of(product_rows_);
  for (const Product &p : products) {
    if (by_tiles(*p.m)) continue;
    const int N = p.m->N;
    if (!p.m->coded)
      multiply_rows(*p.m, M, false, y);
    else
      add_row_items(p, y);
    y += size_t(M) * N;
  }
  for_each(int(row_items_.size()), [&](int i) {
    const RowItem &item = row_items_[i];
    const Weight &w = *item.product->m->coded;
    matmul_rows(w, *item.x, item.y, w.N, item.from * w.R, std::min(w.N, item.to * w.R));
  });
  y = floats_of(product_rows_);
  for (const Product &p : products) {
    if (by_tiles(*p.m)) continue;
    const int N = p.m->N;
    for_each(tiles(),
             [&](int t) { ops_.tile_of_rows(y + size_t(tiles_[t].row) * N, N, tiles_[t].count, N, add, p.y.tile(t)); });
    y += size_t(M) * N;
  }
}

void Prefill::add_row_items(const Product &p, float *y) {
  const Weight &w = *p.m->coded;
  const Encoded &x = *std::find_if(operand_.encoded.begin(), operand_.encoded.begin() + operand_.encodings,
                                   [&](const Encoded &e) { return e.chunks.front().fits(w); });
  const int at_once = rows_at_once(w), step = std::min(w.blocks, kBlocksOfItem);
  for (int c = 0; c * at_once < rows(); ++c)
    for (int b = 0; b < w.blocks; b += step)
      row_items_.push_back({&p, &x.chunks[c], y + size_t(c) * at_once * w.N, b, std::min(w.blocks, b + step)});
}

// Encode the operand's rows once for all coded products that take the same integers.
void Prefill::encode_operand(std::initializer_list<Product> products) {
  Operand &o = operand_;
  const int M = rows();
  o.encodings = 0;
  std::vector<std::pair<int, int>> items;  // encoding, chunk
  for (const Product &p : products) {
    if (by_tiles(*p.m) || !p.m->coded) continue;
    const Weight &w = *p.m->coded;
    const auto end = o.encoded.begin() + o.encodings;
    if (std::any_of(o.encoded.begin(), end, [&](const Encoded &e) { return e.chunks.front().fits(w); })) continue;
    if (o.encodings == int(o.encoded.size())) o.encoded.emplace_back();
    Encoded &e = o.encoded[o.encodings];
    e.weight = &w;
    const int at_once = rows_at_once(w), chunks = (M + at_once - 1) / at_once;
    if (int(e.chunks.size()) < chunks) e.chunks.resize(chunks);
    for (int c = 0; c < chunks; ++c) {
      e.chunks[c].shape(w, std::min(at_once, M - c * at_once), model_.precision);
      items.emplace_back(o.encodings, c);
    }
    ++o.encodings;
  }
  for_each(int(items.size()), [&](int i) {
    Encoded &e = o.encoded[items[i].first];
    Activations &a = e.chunks[items[i].second];
    const size_t first = size_t(items[i].second) * rows_at_once(*e.weight);
    encode_rows(a, *e.weight, floats_of(o.rows) + first * o.K, o.K, 0, a.M);
  });
}

// y [M, N] = the operand's rows W^T.
void Prefill::multiply_rows(const Matrix &m, int M, bool by_tiles, float *y) {
  const float *const x = floats_of(operand_.rows);
  if (m.coded) return matmul(x, M, *m.coded, y, model_.precision, by_tiles);
  for_each((m.N + kOutputsOfItem - 1) / kOutputsOfItem, [&](int i) {
    const int from = i * kOutputsOfItem, to = std::min(m.N, from + kOutputsOfItem);
    for (int r = 0; r < M; r += kPlainRows)
      ops_.dense(m.dense, x + size_t(r) * m.K, m.K, std::min(kPlainRows, M - r), y + size_t(r) * m.N, m.N, from, to);
  });
}

}  // namespace crelle::cpu
