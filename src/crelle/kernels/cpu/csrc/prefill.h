// A prompt through a Llama-family model: T tokens in, logits of the last one (or of all) out.
//
// The same weights, the same cache and the same numerics as the decode step (decoder.h), another balance: products
// have hundreds of rows, so that they are computed as tiles (gemm.h), and attention is as much work as a product. All
// activations lie in tiles of 16 tokens side by side, [feature][16] (tiles.h): what products of tiles take and give.
// Products by other kernels (no AMX, plain matrices, few tokens) see rows, turned before and after.
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
//   gate, up   products;  SiLU * mul, pack                                     by runs of outputs; by tiles
//   down       product, added to the stream                                    by runs of outputs
//
// A long prompt goes through in portions of up to kPortion tokens, which bounds the memory. Where only the last
// token's logits are wanted, the last layer computes keys and values of all tokens but the rest of a few only.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <mutex>
#include <utility>
#include <vector>

#include "decoder.h"

namespace crelle::cpu {

class Prefill {
public:
  static constexpr int kPortion = 512;
  enum Phase { Embed, Input, Qkv, Place, Attention, Output, MlpInput, GateUp, Silu, Down, Head, kPhases };

  explicit Prefill(const Model &model);  // borrowed

  // Tokens [T] stand at `position`, position + 1, ... of a row of the cache. logits [T, V], or [1, V] of the last.
  // Tokens are the caller's own copy, and so are the pages of the sequence (where the cache has pages; `row` is not
  // looked at then): arrays that Python hands over may change at any time. Any number of threads may call; they take
  // turns.
  void run(const Cache &cache, const int32_t *pages, const int64_t *token, int T, int position, int row, bool last,
           float *logits);

  using Times = std::array<double, kPhases>;
  Times seconds();  // in each phase, of the latest run

private:
  // Activations of a portion: tile t at data + t * pitch, features padded to what products of tiles write.
  struct Tiles {
    float *data = nullptr;
    size_t pitch = 0;
    float *tile(int t) const { return data + t * pitch; }
    Tiles from(int t) const { return {tile(t), pitch}; }
  };
  struct Product {
    const Matrix *m;
    Tiles y;
  };
  struct Item {  // blocks of a coded matrix or rows of a plain one
    const Product *product;
    const uint8_t *packed;
    int from, to;
  };
  // x [M, K] of one or several products: as rows where some product wants them, packed in every way that others want.
  struct Operand {
    Tiles x;
    int M = 0, K = 0, ways = 0;
    bool as_rows = false;
    Buffer rows;                                            // float [M, K]
    std::vector<std::pair<const Weight *, Buffer>> packed;  // the first `ways` are in use
  };

  void portion(const int64_t *token, int T, int position, bool last, int wanted, float *logits);
  void embed(const int64_t *token, int T, int position, int tile);
  void layer(int i, int T, int position, int from);
  void finish(int T, int wanted, float *logits);
  void place(const LayerWeights &l, int layer, int T, int position, int tile);
  void attend(const LayerWeights &l, int layer, int T, int position, int tile, int kv);
  void turn_back(float *tile, int heads, int count) const;

  void expect(Tiles x, int M, int K, std::initializer_list<const Matrix *> group);
  void pack(int tile);
  void multiply(std::initializer_list<Product> products, bool add = false);
  void multiply_rows(const Matrix &m, float *y);
  bool by_tiles(const Matrix &m, int M) const;
  bool packs_alike(const Weight &a, const Weight &b) const;
  Tiles grow(Buffer &b, int T, int features);
  void done(Phase phase);

  const Model &model_;
  const Ops &ops_;
  int inner_ = 0;
  std::mutex mutex_;  // guards everything below
  const Cache *cache_ = nullptr;
  const int32_t *pages_ = nullptr;
  int row_ = 0;
  Operand operand_;
  std::vector<Item> items_;
  Tiles stream_, normed_, q_, k_, v_, attended_, gate_, up_, angles_;
  Buffer buffers_[9], product_rows_;
  Times seconds_ = {};
  double last_ = 0;
};

}  // namespace crelle::cpu
