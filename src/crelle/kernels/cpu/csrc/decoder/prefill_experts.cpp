// The experts of prefill: the tokens of the pass sorted by expert into tiles, and products of all experts side by side.
//
//   input      norm; the router's product                                      by tiles; by runs of outputs
//   route      the experts of each token; slots in order (routing.h)           one thread
//   gate, up   pack the slots' tokens; products                                by tiles; by experts and outputs
//   down       activation, pack; product                                       by tiles; by experts and outputs
//   sum        a token's slots, weighted, in order; added to the stream        by tiles
#include <algorithm>

#include "decoder/for_each.h"
#include "decoder/prefill.h"

namespace crelle::cpu {

void Prefill::experts(const LayerWeights &l) {
  const Experts &x = l.experts;
  const int width = model_.width;
  const Tiles input =
      x.shared() ? input_of(l.norm_mlp, {&x.router, &x.shared_gate}) : input_of(l.norm_mlp, {&x.router});
  token_rows_.grow(size_t(rows()) * width * sizeof(float));
  for_each(tiles(), [&](int t) {
    norm_input(l.norm_mlp, t);
    pack(t, input.tile(t));
    const Tile &tile = tiles_[t];
    ops_.rows_of_tile(input.tile(t), tile.count, width, floats_of(token_rows_) + size_t(tile.row) * width, width);
  });
  const Tiles scores = grow(score_tiles_, x.count), shared = grow(shared_scores_, 1);
  x.shared() ? multiply({{&x.router, scores}, {&x.shared_gate, shared}}) : multiply({{&x.router, scores}});
  route(x, scores, shared);
  done(MlpInput);
  tiles_.swap(slot_tiles_);
  multiply_experts(l);
  tiles_.swap(slot_tiles_);
  sum_experts(l);
}

void Prefill::route(const Experts &x, Tiles scores, Tiles shared) {
  const size_t pitch = x.each.size();
  scores_.resize(rows() * pitch);
  for (int t = 0; t < tiles(); ++t) {
    float *const of_tile = scores_.data() + tiles_[t].row * pitch;
    ops_.rows_of_tile(scores.tile(t), tiles_[t].count, x.count, of_tile, pitch);
    for (int i = 0; i < tiles_[t].count; ++i) {
      float *const row = of_tile + i * pitch;
      if (x.router.bias) ops_.add(row, x.router.bias, x.count);
      if (x.shared()) row[x.count] = shared.tile(t)[i] + (x.shared_gate.bias ? *x.shared_gate.bias : 0.0f);
    }
  }
  routing_.route(x, scores_.data(), pitch, rows());
  const int each = x.of_token();
  slots_of_.assign(size_t(rows()) * each, -1);
  for (int s = 0; s < int(routing_.slots.size()); ++s) {
    int *place = &slots_of_[size_t(routing_.slots[s].token) * each];
    while (*place >= 0) ++place;
    *place = s;
  }
  slot_tiles_.clear();
  for (const Group &g : routing_.groups)
    for (int first = g.first; first < g.first + g.count; first += kTileRows)
      slot_tiles_.push_back({nullptr, first, std::min(kTileRows, g.first + g.count - first), first, -1});
}

// While `tiles_` are those of the slots: their rows of y, without weights, in `slot_rows_`.
void Prefill::multiply_experts(const LayerWeights &l) {
  const int width = model_.width;
  int inner = 0;
  for (const FeedForward &f : l.experts.each) inner = std::max(inner, f.gate.N);
  const auto each_group = [&](auto &&fn) {  // fn(the group's expert, its first tile, one past its last)
    int begin = 0;
    for (const Group &g : routing_.groups) {
      const int end = begin + tiles_of(g.count);
      fn(l.experts.each[g.expert], begin, end);
      begin = end;
    }
  };
  const auto expert_of = [&](int t) -> const FeedForward & {
    return l.experts.each[routing_.slots[tiles_[t].first].expert];
  };
  const Tiles gate = grow(slot_gate_, inner), up = grow(slot_up_, l.gated ? inner : 1), y = grow(slot_y_, width);

  expect_nothing(width);
  expert_products_.clear();
  each_group([&](const FeedForward &f, int begin, int end) {
    expect(f.gate, begin, end);
    expert_products_.push_back({&f.gate, gate, begin, end});
    if (!l.gated) return;
    expect(f.up, begin, end);
    expert_products_.push_back({&f.up, up, begin, end});
  });
  expected();
  for_each(tiles(), [&](int t) {
    static thread_local Buffer scratch;
    scratch.grow(size_t{2} * kTileRows * width * sizeof(float));
    float *const rows = floats_of(scratch), *const tile = rows + size_t{kTileRows} * width;
    for (int i = 0; i < tiles_[t].count; ++i)
      std::copy_n(floats_of(token_rows_) + size_t(routing_.slots[tiles_[t].first + i].token) * width, width,
                  rows + size_t(i) * width);
    ops_.tile_of_rows(rows, width, tiles_[t].count, width, false, tile);
    pack(t, tile);
  });
  multiply(expert_products_);
  done(GateUp);

  expect_nothing(inner);
  expert_products_.clear();
  each_group([&](const FeedForward &f, int begin, int end) {
    expect(f.down, begin, end);
    expert_products_.push_back({&f.down, y, begin, end});
  });
  expected();
  for_each(tiles(), [&](int t) {
    activate(l, expert_of(t), gate.tile(t), up.tile(t));
    pack(t, gate.tile(t));
  });
  done(Activate);
  multiply(expert_products_);
  slot_rows_.grow(size_t(rows()) * width * sizeof(float));
  for_each(tiles(), [&](int t) {
    if (const float *bias = expert_of(t).down.bias) ops_.add_to_tile(y.tile(t), bias, width);
    ops_.rows_of_tile(y.tile(t), tiles_[t].count, width, floats_of(slot_rows_) + size_t(tiles_[t].row) * width, width);
  });
}

void Prefill::sum_experts(const LayerWeights &l) {
  const int width = model_.width, each = l.experts.of_token();
  for_each(tiles(), [&](int t) {
    static thread_local Buffer scratch;
    scratch.grow(size_t{kTileRows} * width * sizeof(float));
    float *const sums = floats_of(scratch);
    std::fill_n(sums, size_t{kTileRows} * width, 0.0f);
    const Tile &tile = tiles_[t];
    for (int i = 0; i < tile.count; ++i)
      for (int j = 0; j < each; ++j) {
        const int slot = slots_of_[size_t(tile.row + i) * each + j];
        ops_.add_scaled(sums + size_t(i) * width, floats_of(slot_rows_) + size_t(slot) * width,
                        routing_.slots[slot].weight, width);
      }
    ops_.tile_of_rows(sums, width, tile.count, width, false, normed_.tile(t));
    add_tile(l, t, normed_.tile(t), l.post_mlp_norm, l.stream_mlp_norm);
  });
}

}  // namespace crelle::cpu
