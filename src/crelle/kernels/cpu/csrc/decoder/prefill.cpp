#include "decoder/prefill.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "attention/hadamard.h"
#include "decoder/for_each.h"
#include "planes/matmul.h"

namespace crelle::cpu {
namespace {

constexpr int kPadding = 64;     // features: a multiple of every block
constexpr int kSlots = 1 << 13;  // of tokens at experts in a pass: what they need of memory

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

const Isa &isa_of(const Model &model) {
  for (const LayerWeights &l : model.layers)
    for (const Matrix *m : {&l.q, &l.k, &l.v, &l.o, &l.mlp.gate, &l.mlp.up, &l.mlp.down})
      if (m->coded) return *m->coded->isa;
  return model.head.coded ? *model.head.coded->isa : isa();
}

}  // namespace

Prefill::Prefill(const Model &model) : model_(model), ops_(ops_of(isa_of(model))) {
  for (const LayerWeights &l : model_.layers) {
    inner_ = std::max(inner_, l.mlp.gate.N);
    if (l.experts) tiles_of_pass_ = std::min(tiles_of_pass_, std::max(1, kSlots / kTileRows / l.experts.of_token()));
  }
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
  const int passes = (int(tiles.size()) + tiles_of_pass_ - 1) / tiles_of_pass_;
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
  const int widest = std::max(model_.width, model_.words());
  stream_ = grow(*b++, model_.width), normed_ = grow(*b++, widest);
  q_ = grow(*b++, q), attended_ = grow(*b++, q), k_ = grow(*b++, kv), v_ = grow(*b++, kv);
  gate_ = grow(*b++, inner_), up_ = grow(*b++, inner_), angles_ = grow(*b++, model_.angles());
  branch_ = grow(*b++, widest);

  for_each(tiles(), [&](int t) { embed(t); });
  if (model_.project_in.N) project_in();
  done(Embed);
  const int layers = int(model_.layers.size());
  for (int i = 0; i < layers; ++i) layer(i, i + 1 == layers && !all);
  if (!tiles_.empty()) finish(all, logits);
}

void Prefill::embed(int tile) {
  const int width = model_.width, words = model_.words();
  const Tile &at = tiles_[tile];
  static thread_local Buffer scratch;
  scratch.grow(size_t{kTileRows} * words * sizeof(float));
  float *const rows = floats_of(scratch);
  for (int i = 0; i < at.count; ++i) {
    const int n = int(at.sequence->token[at.first + i]);
    float *const x = rows + size_t(i) * words;
    if (model_.embedding.coded)
      dequantize_row(*model_.embedding.coded, n, x);
    else
      ops_.load(model_.embedding.dense.type, model_.embedding.dense.row(n), x, words);
    if (model_.embedding_scale != 1.0f) ops_.scale(x, model_.embedding_scale, words);
  }
  ops_.tile_of_rows(rows, words, at.count, words, false, words == width ? stream_.tile(tile) : normed_.tile(tile));
  if (words == width) add_positions(tile);
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

void Prefill::add_positions(int tile) {
  if (!model_.positions.N) return;
  const int width = model_.width;
  const Tile &at = tiles_[tile];
  static thread_local Buffer scratch;
  scratch.grow(size_t{kTileRows} * width * sizeof(float));
  float *const rows = floats_of(scratch);
  for (int i = 0; i < at.count; ++i)
    ops_.load(model_.positions.type, model_.positions.row(at.position() + i + model_.position_offset),
              rows + size_t(i) * width, width);
  ops_.tile_of_rows(rows, width, at.count, width, true, stream_.tile(tile));
}

// Embeddings of another width, which wait in `normed_`, as the stream.
void Prefill::project_in() {
  expect(model_.words(), {&model_.project_in});
  for_each(tiles(), [&](int t) { pack(t, normed_.tile(t)); });
  multiply({{&model_.project_in, stream_}});
  for_each(tiles(), [&](int t) {
    if (model_.project_in.bias) ops_.add_to_tile(stream_.tile(t), model_.project_in.bias, model_.width);
    add_positions(t);
  });
}

// What a head of another width reads, in `branch_`.
void Prefill::project_out() {
  expect(model_.width, {&model_.project_out});
  for_each(tiles(), [&](int t) {
    if (model_.norm) norm_tile(ops_, model_.norm, stream_.tile(t), model_.width, normed_.tile(t));
    pack(t, model_.norm ? normed_.tile(t) : stream_.tile(t));
  });
  multiply({{&model_.project_out, branch_}});
  if (model_.project_out.bias)
    for_each(tiles(), [&](int t) { ops_.add_to_tile(branch_.tile(t), model_.project_out.bias, model_.words()); });
}

// Layer i. In the last one only the tiles whose logits are wanted go on behind its keys and values.
void Prefill::layer(int i, bool last) {
  const LayerWeights &l = model_.layers[i];
  const Tiles x = input_of(l.norm_attention, {&l.q, &l.k, &l.v});
  for_each(tiles(), [&](int t) {
    norm_input(l.norm_attention, t);
    pack(t, x.tile(t));
  });
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

  expect(model_.heads * model_.head_size, {&l.o});
  for_each(tiles(), [&](int t) { pack(t, attended_.tile(t)); });
  add_to_stream(l, l.o, l.post_attention_norm, l.stream_attention_norm, l.parallel);
  done(Output);
  l.experts ? experts(l) : feed_forward(l);
  done(Down);
}

void Prefill::feed_forward(const LayerWeights &l) {
  const FeedForward &f = l.mlp;
  const int inner = f.gate.N;
  const Tiles x = l.gated ? input_of(l.norm_mlp, {&f.gate, &f.up}) : input_of(l.norm_mlp, {&f.gate});
  for_each(tiles(), [&](int t) {
    norm_input(l.norm_mlp, t);
    pack(t, x.tile(t));
  });
  done(MlpInput);
  l.gated ? multiply({{&f.gate, gate_}, {&f.up, up_}}) : multiply({{&f.gate, gate_}});
  done(GateUp);
  expect(inner, {&f.down});
  for_each(tiles(), [&](int t) {
    activate(l, f, gate_.tile(t), up_.tile(t));
    pack(t, gate_.tile(t));
  });
  done(Activate);
  add_to_stream(l, f.down, l.post_mlp_norm, l.stream_mlp_norm, false);
}

// Announce what attention or feed-forward reads: the stream, or the norm of it.
Prefill::Tiles Prefill::input_of(const Norm &norm, std::initializer_list<const Matrix *> group) {
  expect(model_.width, group);
  return norm ? normed_ : stream_;
}

void Prefill::norm_input(const Norm &norm, int tile) {
  if (norm) norm_tile(ops_, norm, stream_.tile(tile), model_.width, normed_.tile(tile));
}

// What a feed-forward's last product reads, in place of what the first two returned.
void Prefill::activate(const LayerWeights &l, const FeedForward &f, float *gate, float *up) const {
  if (f.gate.bias) ops_.add_to_tile(gate, f.gate.bias, f.gate.N);
  if (l.gated && f.up.bias) ops_.add_to_tile(up, f.up.bias, f.gate.N);
  ops_.activate(l.activation, gate, l.gated ? up : nullptr, f.gate.N * kTileRows);
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

// The residual stream += x W^T + bias, or the norm of that where the model has one there; later: not yet.
void Prefill::add_to_stream(const LayerWeights &l, const Matrix &m, const Norm &post, const Norm &after, bool later) {
  const int width = model_.width;
  if (!post && !later && l.residual_scale == 1) {
    multiply({{&m, stream_}}, true);
    if (m.bias || after || l.parallel)
      for_each(tiles(), [&](int t) {
        if (m.bias) ops_.add_to_tile(stream_.tile(t), m.bias, width);
        if (l.parallel) ops_.add(stream_.tile(t), branch_.tile(t), width * kTileRows);
        if (after) norm_tile(ops_, after, stream_.tile(t), width, stream_.tile(t));
      });
    return;
  }
  const Tiles y = later ? branch_ : normed_;  // free: what was normed has been packed and multiplied
  multiply({{&m, y}});
  for_each(tiles(), [&](int t) {
    if (m.bias) ops_.add_to_tile(y.tile(t), m.bias, width);
    if (!later) add_tile(l, t, y.tile(t), post, after);
  });
}

// A tile of the stream += what attention or feed-forward returned.
void Prefill::add_tile(const LayerWeights &l, int tile, float *y, const Norm &post, const Norm &after) {
  const int width = model_.width;
  float *const stream = stream_.tile(tile);
  if (post) norm_tile(ops_, post, y, width, y);
  ops_.add_scaled(stream, y, l.residual_scale, width * kTileRows);
  if (l.parallel) ops_.add_scaled(stream, branch_.tile(tile), l.residual_scale, width * kTileRows);
  if (after) norm_tile(ops_, after, stream, width, stream);
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
  const auto norm_rope = [&](float *x, const Norm &norm, float factor, float more) {  // more: of rotated channels
    if (norm && !l.whole_qk_norm) norm_tile(ops_, norm, x, D, x);
    if (rotated) ops_.rope_tile(x, cos, cos + rotated / 2 * kTileRows, factor * more, rotated);
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
  if (l.whole_qk_norm) {
    norm_tile(ops_, l.q_norm, q, H * D, q);
    norm_tile(ops_, l.k_norm, k, Hkv * D, k);
  }
  for (int h = 0; h < H; ++h) norm_rope(q + h * head, l.q_norm, l.scale, l.rotated_scale);
  if (cache_->rotates(layer, 0)) hadamard_tile(q, H, count);
  for (int h = 0; h < Hkv; ++h) {
    norm_rope(k + h * head, l.k_norm, 1.0f, 1.0f);
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
  a.softcap = l.softcap, a.sinks = l.sinks ? l.sinks + kv * G : nullptr;
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
  const int width = model_.words(), M = all ? rows() : tiles();
  const Matrix &head = model_.head;
  if (model_.project_out.N) project_out();
  logits += size_t(tiles_.front().logits) * head.N;
  operand_.rows.grow(size_t(M) * width * sizeof(float));
  for_each(tiles(), [&](int t) {
    const Tile &tile = tiles_[t];
    const float *x = stream_.tile(t);
    if (model_.project_out.N)
      x = branch_.tile(t);
    else if (model_.norm)
      norm_tile(ops_, model_.norm, x, width, normed_.tile(t)), x = normed_.tile(t);
    if (all) return ops_.rows_of_tile(x, tile.count, width, floats_of(operand_.rows) + size_t(tile.row) * width, width);
    float *const row = floats_of(operand_.rows) + size_t(t) * width;
    for (int i = 0; i < width; ++i) row[i] = x[i * kTileRows + tile.count - 1];
  });
  multiply_rows(head, M, all && by_tiles(head), logits);
  if (head.bias || model_.logit_scale != 1 || model_.softcap > 0)
    for_each(M, [&](int m) {
      float *const row = logits + size_t(m) * head.N;
      if (head.bias) ops_.add(row, head.bias, head.N);
      finish_logits(ops_, model_, row, head.N);
    });
  done(Head);
}

}  // namespace crelle::cpu
