// Causal attention over whole sequences in f32, by the loops of prefill_attention.h, on all threads.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "bindings/bindings.h"
#include "base/memory.h"
#include "base/pool.h"
#include "decoder/ops.h"

using namespace nb::literals;

namespace crelle::cpu {
namespace {

struct WholeSequences {
  int B, T, H, Hkv, D, window;
  const float *q, *k, *v;
  float *y;

  int blocks() const { return (T - 1) / kBlockTokens + 1; }
  // A block of queries of the heads that share keys.
  size_t units() const { return size_t(B) * Hkv * blocks(); }
};

// What a thread needs to itself, in floats.
struct Room {
  size_t keys, queries, scratch;

  Room(const WholeSequences &a, const Ops &ops)
      : keys(size_t(a.T) * a.D),
        queries(size_t(a.H / a.Hkv) * a.D * kBlockTokens),
        scratch(ops.attend_block_scratch(a.H / a.Hkv, a.D)) {}
  // Keys and values, queries and outputs; each begins on 64 bytes.
  static size_t whole(size_t n) { return (n + 15) / 16 * 16; }
  size_t bytes() const { return (2 * whole(keys) + 2 * whole(queries) + scratch) * sizeof(float); }
};

void attend(const WholeSequences &a, const Ops &ops, size_t begin, size_t end, float *room) {
  const int G = a.H / a.Hkv, D = a.D;
  const Room sizes(a, ops);
  float *const k = room, *const v = k + Room::whole(sizes.keys), *const q = v + Room::whole(sizes.keys),
               *const out = q + Room::whole(sizes.queries), *const scratch = out + Room::whole(sizes.queries);
  const float factor = 1.0f / std::sqrt(float(D));
  size_t known = size_t(a.B) * a.Hkv;  // the head whose keys are in the room
  for (size_t unit = begin; unit < end; ++unit) {
    const size_t head = unit / a.blocks(), b = head / a.Hkv, kv = head % a.Hkv;
    if (head != known) {
      for (int t = 0; t < a.T; ++t) {
        const size_t at = ((b * a.T + t) * a.Hkv + kv) * D;
        std::memcpy(k + size_t(t) * D, a.k + at, D * sizeof(float));
        std::memcpy(v + size_t(t) * D, a.v + at, D * sizeof(float));
      }
      known = head;
    }
    AttendBlock block{};
    block.type = DType::F32, block.D = D, block.heads = G, block.window = a.window;
    block.position = static_cast<int>(unit % a.blocks()) * kBlockTokens;
    block.count = std::min(kBlockTokens, a.T - block.position);
    block.pitch = size_t(G) * D * kTileRows;
    block.q = q, block.k = reinterpret_cast<const uint8_t *>(k), block.v = reinterpret_cast<const uint8_t *>(v);
    block.out = out;
    const auto each_tile = [&](auto &&use) {
      for (int t = 0; t < block.count; t += kTileRows)
        for (int h = 0; h < G; ++h)
          use(((b * a.T + block.position + t) * a.H + kv * G + h) * D, std::min(kTileRows, block.count - t),
              t / kTileRows * block.pitch + size_t(h) * D * kTileRows);
    };
    const size_t row = size_t(a.H) * D;
    each_tile([&](size_t from, int count, size_t to) { ops.tile_of_rows(a.q + from, row, count, D, false, q + to); });
    ops.scale(q, factor, static_cast<int>((block.count - 1) / kTileRows + 1) * static_cast<int>(block.pitch));
    ops.attend_block(block, scratch);
    each_tile([&](size_t to, int count, size_t from) { ops.rows_of_tile(out + from, count, D, a.y + to, row); });
  }
}

void causal_attention_f32(In<float, 4> q, In<float, 4> k, In<float, 4> v, Out<float, 4> y, int window) {
  const size_t B = q.shape(0), T = q.shape(1), H = q.shape(2), D = q.shape(3), Hkv = k.shape(2);
  const auto alike = [](const auto &a, const auto &b) {
    for (size_t i = 0; i < 4; ++i)
      if (a.shape(i) != b.shape(i)) return false;
    return true;
  };
  require(D >= 16 && D % 16 == 0 && D <= 1024, "heads must have a multiple of 16 channels, at most 1024");
  require(k.shape(0) == B && k.shape(1) == T && k.shape(3) == D, "q must be [B, T, H, D] and k [B, T, Hkv, D]");
  require(alike(k, v), "k and v must be alike");
  require(alike(q, y), "q and y must be alike");
  require(H >= 1 && Hkv >= 1 && H % Hkv == 0, "the heads of q must be a multiple of those of k");
  require(std::max({B, T}) < kMostCount && H <= 4096, "q must be smaller");
  require(window >= 0, "the window must not be negative");
  if (!B || !T) return;
  const WholeSequences a{int(B), int(T), int(H), int(Hkv), int(D), window, q.data(), k.data(), v.data(), y.data()};
  const Ops &ops = ops_of(isa());
  nb::gil_scoped_release release;
  Pool::get().run([&](int t, int n) {
    static thread_local Buffer room;
    const size_t begin = a.units() * t / n, end = a.units() * (t + 1) / n;
    if (begin == end) return;
    room.grow(Room(a, ops).bytes());
    attend(a, ops, begin, end, floats_of(room));
  });
}

}  // namespace

void bind_f32_attention(nb::module_ &m) {
  m.def("causal_attention_f32", &causal_attention_f32, "q"_a.noconvert(), "k"_a.noconvert(), "v"_a.noconvert(),
        "y"_a.noconvert(), "window"_a,
        "y [B, T, H, D] = softmax(q kᵀ D^-0.5) v, k and v [B, T, Hkv, D]; window 0: a token sees all before it.");
}

}  // namespace crelle::cpu
