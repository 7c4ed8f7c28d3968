// Prompts through a decoder, or chunks of prompts: T tokens of several sequences in, logits of the last ones (or of
// all) out.
//
// The same weights, the same cache and the same numerics as the decode step (decoder.h), another balance: products
// have hundreds of rows, so that they are computed as tiles (gemm.h), and attention is as much work as a product. All
// activations lie in tiles of 16 tokens of one sequence side by side, [feature][16] (transposed_ops.h): what products
// of tiles take and give. Products by other kernels (grids without AMX, plain matrices) see rows, transposed before and
// after; there the last tile of a sequence has no padding.
//
// Each phase is spread over the pool in small independent items that threads take as they come: a thread that wakes
// late or has to share its core takes fewer. Nothing depends on who computed an item.
//
//   input      norm, pack                                                      by tiles
//   q, k, v    products that share the packed tiles                            by runs of outputs
//   place      bias, norm and rope of q and k; k and v into the cache          by tiles
//   attention                                                                  by key/value head and 48 tokens
//   output     pack; product, added to the stream                              by tiles; by runs of outputs
//   mlp input  norm, pack                                                      by tiles
//   gate, up   products;  activation, pack                                     by runs of outputs; by tiles
//   down       product, added to the stream                                    by runs of outputs
//
// Where a layer has experts, tokens are sorted by expert into tiles of their own before gate, up and down; products of
// different experts are items of one phase (prefill_experts.cpp).
//
// A pass takes up to kTiles tiles, which bounds the memory. Where only last tokens' logits are wanted, the last layer
// computes keys and values of all tokens but the rest of their tiles only.
//
// Batch-invariant: the bits of a token depend on the tokens before it in its sequence, not on how the prompt is split
// into chunks, nor on the other sequences of the pass. What is fixed:
//   products   tiles wherever the instruction set has them, whatever the number of rows (short tiles are padded);
//              sums over K run in order for each row, alone or beside others
//   attention  keys in runs of 64 that begin at multiples of 64 from position 0 on; within a run sums run in order, and
//              keys that a query does not see have the weight 0 and change nothing; keys and values are read from the
//              cache, also those of the same chunk
//   head       the last tokens of chunks: products by rows, as in the decode step; all tokens: tiles where there are
//              any. The caller chooses, not the number of rows
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <mutex>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "decoder/decoder.h"

namespace crelle::cpu {

class Prefill {
public:
  static constexpr int kTiles = 32;
  enum Phase { Embed, Input, Qkv, Place, Attention, Output, MlpInput, GateUp, Activate, Down, Head, kPhases };

  // The next `count` tokens of a sequence: they stand at `position`, position + 1, … of a row of the cache, which holds
  // all before them. Where the cache has pages, `pages` are those of the sequence and `row` is not looked at.
  struct Sequence {
    const int64_t *token;
    int count, position, row;
    const int32_t *pages;
    bool wanted;  // the logits of its last token
  };

  explicit Prefill(const Model &model);  // borrowed

  // No two sequences share memory of the cache that one of them writes. logits: [all tokens, V] with `all`, else
  // [sequences that are wanted, V]. Tokens and pages are the caller's own copy: arrays that Python hands over may
  // change at any time. Any number of threads may call; they take turns.
  void run(const Cache &cache, const std::vector<Sequence> &sequences, bool all, float *logits);

  using Times = std::array<double, kPhases>;
  Times seconds();  // in each phase, of the latest run

private:
  // Up to 16 tokens of one sequence, or of one expert.
  struct Tile {
    const Sequence *sequence;
    int first, count;  // tokens [first, first + count) of the sequence's, or slots
    int row;           // of the first token among the rows of the pass
    int logits;        // the first row of logits that it gives; -1: none

    int position() const { return sequence->position + first; }
    bool before(const Tile &o) const { return sequence == o.sequence && first + count == o.first; }
  };
  // Activations of a pass: tile t at data + t * pitch, features padded to what products of tiles write.
  struct Tiles {
    float *data = nullptr;
    size_t pitch = 0;
    float *tile(int t) const { return data + t * pitch; }
  };
  // Of the tiles [begin, end).
  struct Product {
    const Matrix *m;
    Tiles y;
    int begin = 0, end = -1;  // -1: all
  };
  struct Item {  // blocks of a coded matrix, for all of its tiles
    const Product *product;
    const uint8_t *packed;
    int from, to;
  };
  struct RowItem {  // of a product by rows
    const Product *product;
    const Activations *x;  // blocks [from, to) for the rows of one of Encoded::chunks
    int row, rows;         // or, of a plain matrix, outputs [from, to) for these rows of the pass
    float *y;
    int from, to;
  };
  // Rows of x as the matrices take them that are encoded alike: chunks of rows_at_once.
  struct Encoded {
    const Weight *weight;
    int begin, end;  // tiles
    std::vector<Activations> chunks;
  };
  // Tiles of x as the matrices take them that are packed alike.
  struct Way {
    const Weight *weight;
    int begin, end;  // tiles
    size_t at;       // in Operand::packed
  };
  // x [rows, K] of one or several products: as rows where some product wants them, packed in every way that others
  // want.
  struct Operand {
    int K = 0;
    bool as_rows = false;
    Buffer rows;  // float [rows, K]
    std::vector<Way> ways;
    Buffer packed;
    size_t packed_bytes = 0;
    std::vector<Encoded> encoded;  // the first `encodings` are in use
    int encodings = 0;
  };

  void pass(bool all, float *logits);
  void embed(int tile);
  void add_positions(int tile);
  void project_in();
  void project_out();
  void layer(int i, bool last);
  void keep_wanted();
  void finish(bool all, float *logits);
  void place(const LayerWeights &l, int layer, int tile);
  void attend(const LayerWeights &l, int layer, int tile, int tiles, int kv);
  void feed_forward(const LayerWeights &l);
  Tiles input_of(const Norm &norm, std::initializer_list<const Matrix *> group);
  void norm_input(const Norm &norm, int tile);
  void activate(const LayerWeights &l, const FeedForward &f, float *gate, float *up) const;
  void add_to_stream(const LayerWeights &l, const Matrix &m, const Norm &post, const Norm &after, bool later);
  void add_tile(const LayerWeights &l, int tile, float *y, const Norm &post, const Norm &after);
  void hadamard_tile(float *tile, int heads, int count) const;

  int tiles() const { return int(tiles_.size()); }
  int rows() const { return tiles_.empty() ? 0 : tiles_.back().row + tiles_.back().count; }
  void count_rows();

  // prefill_experts.cpp
  void experts(const LayerWeights &l);
  void route(const Experts &x, Tiles scores, Tiles shared);
  void multiply_experts(const LayerWeights &l);
  void sum_experts(const LayerWeights &l);

  // prefill_products.cpp
  void expect(int K, std::initializer_list<const Matrix *> group);
  void expect_nothing(int K);
  void expect(const Matrix &m, int begin, int end);
  void expected();
  void pack(int tile, const float *x);
  void multiply(std::initializer_list<Product> products, bool add = false) {
    multiply(std::span<const Product>(products.begin(), products.size()), add);
  }
  void multiply(std::span<const Product> products, bool add = false);
  void multiply_by_rows(std::span<const Product> products, bool add);
  void encode_operand(std::span<const Product> products);
  void add_row_items(const Product &p, float *y);
  void add_plain_items(const Product &p, float *y);
  void run_row_items();
  void multiply_rows(const Matrix &m, int M, bool by_tiles, float *y);
  int end_of(const Product &p) const { return p.end < 0 ? tiles() : p.end; }
  int rows_of(int begin, int end) const { return tiles_[end - 1].row + tiles_[end - 1].count - tiles_[begin].row; }
  bool by_tiles(const Matrix &m) const;
  bool packs_alike(const Weight &a, const Weight &b) const;
  Tiles grow(Buffer &b, int features);
  void done(Phase phase);

  const Model &model_;
  const Ops &ops_;
  int inner_ = 0, tiles_of_pass_ = kTiles;
  std::mutex mutex_;  // guards everything below
  const Cache *cache_ = nullptr;
  std::vector<Tile> tiles_;  // of the pass
  Operand operand_;
  std::vector<Item> items_;
  std::vector<RowItem> row_items_;
  Tiles stream_, normed_, q_, k_, v_, attended_, gate_, up_, angles_, branch_;
  Buffer buffers_[10], product_rows_;
  std::vector<Tile> slot_tiles_;  // of the slots, while `tiles_` are of the pass; else the other way around
  Routing routing_;
  std::vector<float> scores_;
  std::vector<int> slots_of_;  // [row][of_token]: a token's slots in order
  std::vector<Product> expert_products_;
  Buffer score_tiles_, shared_scores_, token_rows_, slot_gate_, slot_up_, slot_y_, slot_rows_;
  Times seconds_ = {};
  double last_ = 0;
};

}  // namespace crelle::cpu
