// The products of prefill: x in every form in which its readers take it, and their items on the pool.
#include <algorithm>

#include "decoder/for_each.h"
#include "decoder/prefill.h"
#include "planes/matmul.h"

namespace crelle::cpu {
namespace {

constexpr int kBlocksOfItem = 4;    // of a coded matrix, at most
constexpr int kOutputsOfItem = 64;  // of a plain matrix
constexpr int kPlainRows = 32;      // of x that pass by a plain item at a time: both stay in L2
constexpr int kRowsOfItem = 128;    // of x, where a plain matrix has too few outputs for all threads

// Blocks of an item where threads share `blocks`: a number of items that they can share out equally.
int blocks_of_item(int blocks) {
  const int threads = Pool::get().threads(), each = (blocks + threads - 1) / threads;
  const int items = std::max(1, (each + kBlocksOfItem - 1) / kBlocksOfItem);
  return std::clamp((each + items - 1) / items, 1, kBlocksOfItem);
}

}  // namespace

bool Prefill::by_tiles(const Matrix &m) const { return m.coded && gemm_of(*m.coded, model_.precision); }

bool Prefill::packs_alike(const Weight &a, const Weight &b) const {
  const Gemm &gemm = *a.isa->gemm;
  const auto own = [](const Weight &w) { return w.stream == Stream::Mixed || w.stream == Stream::Trellis; };
  if ((own(a) || own(b)) && (a.stream != b.stream || !same_inputs(a, b))) return false;
  if (a.trellis && a.trellis->pair != b.trellis->pair) return false;  // other bytes of x meet those of a product
  return a.isa == b.isa && a.partition == b.partition &&
         gemm.tiles(a, model_.precision) == gemm.tiles(b, model_.precision);
}

// Announce x [rows, K] for the products of `group`: afterwards `pack` is called for each tile, then `multiply`.
void Prefill::expect(int K, std::initializer_list<const Matrix *> group) {
  expect_nothing(K);
  for (const Matrix *m : group) expect(*m, 0, tiles());
  expected();
}

// The same for matrices that read tiles of their own: this first, then those below for each of them, `expected` last.
void Prefill::expect_nothing(int K) {
  Operand &o = operand_;
  o.K = K, o.as_rows = false, o.packed_bytes = 0;
  o.ways.clear();
}

void Prefill::expect(const Matrix &m, int begin, int end) {
  Operand &o = operand_;
  if (!by_tiles(m)) {
    o.as_rows = true;
    return;
  }
  for (auto way = o.ways.rbegin(); way != o.ways.rend() && way->begin == begin; ++way)
    if (packs_alike(*way->weight, *m.coded)) return;
  o.ways.push_back({m.coded, begin, end, o.packed_bytes});
  o.packed_bytes += m.coded->isa->gemm->pack_bytes(*m.coded, (end - begin) * kTileRows, model_.precision);
}

void Prefill::expected() {
  Operand &o = operand_;
  o.packed.grow(o.packed_bytes);
  if (o.as_rows) o.rows.grow(size_t(rows()) * o.K * sizeof(float));
}

// A tile of x, while it is in L1.
void Prefill::pack(int tile, const float *x) {
  Operand &o = operand_;
  for (const Way &way : o.ways) {
    if (tile < way.begin || tile >= way.end) continue;
    const Gemm &gemm = *way.weight->isa->gemm;
    const size_t each = gemm.pack_bytes(*way.weight, kTileRows, model_.precision);
    gemm.pack_tile(*way.weight, x, model_.precision, o.packed.data() + way.at + (tile - way.begin) * each);
  }
  const Tile &t = tiles_[tile];
  if (o.as_rows) ops_.rows_of_tile(x, t.count, o.K, floats_of(o.rows) + size_t(t.row) * o.K, o.K);
}

// y = x W^T, or y += x W^T, without bias.
void Prefill::multiply(std::span<const Product> products, bool add) {
  Operand &o = operand_;
  if (o.as_rows) multiply_by_rows(products, add);
  items_.clear();
  int blocks = 0;
  for (const Product &p : products)
    if (by_tiles(*p.m)) blocks += p.m->coded->blocks;
  const int step = blocks_of_item(blocks);
  for (const Product &p : products) {
    const Matrix &m = *p.m;
    if (!by_tiles(m)) continue;
    const auto way = std::find_if(o.ways.begin(), o.ways.end(),
                                  [&](const Way &w) { return w.begin == p.begin && packs_alike(*w.weight, *m.coded); });
    for (int b = 0; b < m.coded->blocks; b += step)
      items_.push_back({&p, o.packed.data() + way->at, b, std::min(m.coded->blocks, b + step)});
  }
  if (items_.empty()) return;
  for_each(int(items_.size()), [&](int i) {
    const auto &[product, packed, from, to] = items_[i];
    const Weight &w = *product->m->coded;
    w.isa->gemm->run_tiles(w, packed, end_of(*product) - product->begin, model_.precision,
                           product->y.tile(product->begin), product->y.pitch, add, from, to);
  });
}

// The products that are not by tiles. Coded ones that take the same integers share them, and are spread over the pool
// by blocks and rows: small matrices have fewer blocks than would keep all threads busy.
void Prefill::multiply_by_rows(std::span<const Product> products, bool add) {
  size_t room = 0;
  for (const Product &p : products)
    if (!by_tiles(*p.m)) room += size_t(rows_of(p.begin, end_of(p))) * p.m->N;
  product_rows_.grow(room * sizeof(float));
  encode_operand(products);
  row_items_.clear();
  std::vector<std::tuple<const Product *, int, const float *>> results;  // a tile's rows
  float *y = floats_of(product_rows_);
  for (const Product &p : products) {
    if (by_tiles(*p.m)) continue;
    p.m->coded ? add_row_items(p, y) : add_plain_items(p, y);
    for (int t = p.begin; t < end_of(p); y += size_t(tiles_[t++].count) * p.m->N) results.emplace_back(&p, t, y);
  }
  run_row_items();
  for_each(int(results.size()), [&](int i) {
    const auto &[p, t, rows] = results[i];
    ops_.tile_of_rows(rows, p->m->N, tiles_[t].count, p->m->N, add, p->y.tile(t));
  });
}

void Prefill::run_row_items() {
  const float *const x = floats_of(operand_.rows);
  for_each(int(row_items_.size()), [&](int i) {
    const RowItem &item = row_items_[i];
    const Matrix &m = *item.product->m;
    if (m.coded)
      return matmul_rows(*m.coded, *item.x, item.y, m.N, item.from * m.coded->R, std::min(m.N, item.to * m.coded->R));
    for (int r = 0; r < item.rows; r += kPlainRows)
      ops_.dense(m.dense, x + size_t(item.row + r) * operand_.K, operand_.K, std::min(kPlainRows, item.rows - r),
                 item.y + size_t(r) * m.N, m.N, item.from, item.to);
  });
}

void Prefill::add_row_items(const Product &p, float *y) {
  const Weight &w = *p.m->coded;
  const Encoded &x = *std::find_if(operand_.encoded.begin(), operand_.encoded.begin() + operand_.encodings,
                                   [&](const Encoded &e) { return e.begin == p.begin && e.chunks.front().fits(w); });
  const int at_once = rows_at_once(w), step = std::min(w.blocks, kBlocksOfItem), M = rows_of(p.begin, end_of(p));
  for (int c = 0; c * at_once < M; ++c)
    for (int b = 0; b < w.blocks; b += step)
      row_items_.push_back({&p, &x.chunks[c], 0, 0, y + size_t(c) * at_once * w.N, b, std::min(w.blocks, b + step)});
}

void Prefill::add_plain_items(const Product &p, float *y) {
  const int N = p.m->N, M = rows_of(p.begin, end_of(p)), row = tiles_[p.begin].row;
  const int step = N < kOutputsOfItem * Pool::get().threads() ? kRowsOfItem : M;
  for (int r = 0; r < M; r += step)
    for (int from = 0; from < N; from += kOutputsOfItem)
      row_items_.push_back(
          {&p, nullptr, row + r, std::min(step, M - r), y + size_t(r) * N, from, std::min(N, from + kOutputsOfItem)});
}

// Encode the operand's rows once for all coded products that take the same integers.
void Prefill::encode_operand(std::span<const Product> products) {
  Operand &o = operand_;
  o.encodings = 0;
  std::vector<std::pair<int, int>> items;  // encoding, chunk
  for (const Product &p : products) {
    if (by_tiles(*p.m) || !p.m->coded) continue;
    const Weight &w = *p.m->coded;
    const auto end = o.encoded.begin() + o.encodings;
    if (std::any_of(o.encoded.begin(), end,
                    [&](const Encoded &e) { return e.begin == p.begin && e.chunks.front().fits(w); }))
      continue;
    if (o.encodings == int(o.encoded.size())) o.encoded.emplace_back();
    Encoded &e = o.encoded[o.encodings];
    e.weight = &w, e.begin = p.begin, e.end = end_of(p);
    const int M = rows_of(e.begin, e.end), at_once = rows_at_once(w), chunks = (M + at_once - 1) / at_once;
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
    const size_t first = tiles_[e.begin].row + size_t(items[i].second) * rows_at_once(*e.weight);
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
