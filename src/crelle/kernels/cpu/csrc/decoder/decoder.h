// One decode step of a decoder (crelle/kernels/spec.py): B tokens in, B rows of logits out, one parallel region in
// between. The tokens are of different sequences, or some of them of one sequence, one behind the other: a row has the
// same bits either way.
//
// A step of a small model is 150 products of 5 to 10 microseconds each; what a framework does between two of them
// costs as much. Here all threads walk through the layers together and wait at five barriers a layer:
//
//   attention input   norm, encode           q, k, v rows                       |
//   attention         rope, append           (row, kv head, run of keys, head)  |
//   attention output  combine, encode        o rows, added to the stream        |
//   mlp input         norm, encode           gate and up rows, activation       |
//   mlp output        encode                 down rows, added to the stream     |
//
// Models that norm what attention and feed-forward give before it is added, or the sum, have a barrier more for each.
// Where a layer has experts, the router's product is one more phase; then a token's experts are read, and no others.
//
// What comes before a product is small and every thread does all of it for itself when B = 1: that is cheaper than one
// more barrier. With more rows the threads share them and wait once more; where several are of one sequence, keys and
// values of all are appended first, and there is one more barrier. Which thread computes a row never changes
// the row, so results are the same for any number of threads.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "planes/activations.h"
#include "base/barrier.h"
#include "base/memory.h"
#include "decoder/ops.h"
#include "decoder/routing.h"
#include "attention/kv_pages.h"
#include "base/pool.h"
#include "planes/weight.h"

namespace crelle::cpu {

// A prepared quantized matrix, or a plain one where it lies; borrowed.
struct Matrix {
  const Weight *coded = nullptr;
  Dense dense;
  const float *bias = nullptr;  // [N] or none
  int N = 0, K = 0;
  int kind = -1;  // which of the decoder's encodings of its input it takes; -1: the plain floats

  int unit() const { return coded ? coded->R : 4; }  // rows that shares of threads are made of
  double bytes_per_row() const;
  std::pair<const uint8_t *, const uint8_t *> bytes(int row0, int row1) const;  // where the rows of a share lie
};

// gate: what the activation applies to; up: what multiplies it, if gated.
struct FeedForward {
  Matrix gate, up, down;
};

struct Experts {
  int count = 0, top = 0;         // of a layer, of a token
  bool normalize = true;          // the weights of a token's experts add up to 1
  Matrix router;                  // [count, width]
  Matrix shared_gate;             // [1, width], or none
  std::vector<FeedForward> each;  // the one that all tokens take, if there is one, is the last

  explicit operator bool() const { return count > 0; }
  bool shared() const { return shared_gate.N > 0; }
  int of_token() const { return top + shared(); }
};

struct LayerWeights {
  Matrix q, k, v, o;
  FeedForward mlp;                              // where there are no experts
  Experts experts;                              // or none
  Norm norm_attention, norm_mlp;                // [width] or none: of what attention and feed-forward read
  Norm post_attention_norm, post_mlp_norm;      // [width] or none: of what is added to the stream
  Norm stream_attention_norm, stream_mlp_norm;  // [width] or none: of the stream after that
  Norm q_norm, k_norm;                          // [D], or of all heads, or none
  bool whole_qk_norm = false;                   // of all heads of q, and of k, as one vector
  const float *sinks = nullptr;                 // [heads] or none
  float softcap = 0;                            // of the scores; 0: none
  float residual_scale = 1;                     // of what is added to the stream
  bool parallel = false;                        // attention and feed-forward read the same stream
  Activation activation = Activation::Silu;
  bool gated = true;
  int window = 0;           // how far back attention sees; 0: all the way
  int rope = -1;            // of the model's; -1: none
  float scale = 0;          // of the scores
  float rotated_scale = 1;  // also, of the rotated channels of queries
};

// Rotates pairs (i, i + R/2) of the first R channels of a head.
struct Rope {
  std::vector<float> frequency;  // [R/2], radians per position
  int at = 0;                    // its cos [R/2] and sin [R/2] among the angles of a token

  int channels() const { return 2 * int(frequency.size()); }
};

struct Model {
  int width = 0, heads = 0, kv_heads = 0, head_size = 0;
  std::vector<Rope> ropes;
  Matrix embedding, head;
  Matrix project_in, project_out;  // between embedding, or head, and layers where those have another width; or none
  float embedding_scale = 1;
  Dense positions;                     // learned, [any, width]; no rows: none
  int position_offset = 0;             // its row for position 0
  Norm norm;                           // before the head, or none
  float logit_scale = 1, softcap = 0;  // of the logits; no cap: 0
  std::vector<LayerWeights> layers;
  Precision precision = Precision::Exact;

  std::string problem() const;  // what does not fit together, or empty
  int words() const { return embedding.K; }
  int angles() const { return ropes.empty() ? 0 : ropes.back().at + ropes.back().channels(); }   // of a token
  int positions_end() const { return positions.N ? positions.N - position_offset : INT32_MAX; }  // the first too many
};

// Logits as the model bounds them.
inline void finish_logits(const Ops &ops, const Model &model, float *logits, int n) {
  if (model.logit_scale != 1) ops.scale(logits, model.logit_scale, n);
  if (model.softcap > 0) ops.cap(logits, model.softcap, n);
}

constexpr int kMatrices = 7;  // of a layer
inline size_t padded(size_t floats) { return (floats + 15) / 16 * 16; }

class Decoder {
public:
  static constexpr int kRows = 16;  // tokens of a step, at most
  static constexpr int kRun = 64;   // keys of one piece of attention work
  enum Phase { Embed, Qkv, Attention, Output, GateUp, Down, Head, kPhases };

  explicit Decoder(Model model);

  const Model &model() const { return model_; }

  // What a step is about. Filled and checked by the caller of `step`, in memory of its own: arrays that Python hands
  // over may be changed by another thread at any time.
  //
  // Token i stands at position[i] of sequence row[i] and sees all up to there, also what this step appends: several
  // tokens of one row are a part of its prompt. want: the tokens whose logits are asked for.
  struct Tokens {
    int count = 0, wanted = 0;
    int64_t token[kRows], position[kRows], row[kRows], want[kRows];
    // Pages: those of row r, as far as the step needs them, from pages[r * width] on.
    const int32_t *pages = nullptr;
    size_t width = 0;
    // `prepare` finds these.
    bool together = false;  // whether some belong to one row
    int64_t upto[kRows];    // the last position of each token's row in this step
    int64_t last = 0;       // of all positions

    void prepare();
  };

  // logits [wanted, V]. Any number of threads may call; they take turns.
  void step(const Cache &cache, const Tokens &tokens, float *logits);

  // Seconds that thread 0 has spent in each phase, the barrier at its end included, since it was asked to look.
  struct Times {
    double phase[kPhases] = {};
    double waited = 0;    // of these, at barriers
    double prepared = 0;  // of these, on norms and encodings before a product
  };
  void time_phases(bool on);
  Times times();

private:
  struct Share {
    int row0, row1;
  };
  struct Work;  // what one thread does in one step

  void arrange(int threads, int B, int runs);
  void arrange_shares(int threads);
  void find_kinds(std::initializer_list<Matrix *> group);  // of matrices that read one input
  int kind_of(const Matrix &m, int i);

  Model model_;
  const Ops *ops_;
  std::mutex mutex_;  // guards everything below
  Barrier barrier_;
  int threads_ = 0, B_ = 0;  // what the buffers below are arranged for
  // One weight for every way in which activations are encoded, and which of those that read one input it is.
  std::vector<std::pair<const Weight *, int>> kinds_;
  std::vector<std::vector<Activations>> encoded_;   // [kind][thread]
  std::vector<std::vector<Share>> shares_;          // [layer * 7 + matrix, then head, project_in, project_out][thread]
  std::vector<std::array<Activations, 2>> routed_;  // inputs of the groups' matrices
  std::vector<Routing> routing_;                    // [thread]; each finds the same
  Buffer stream_, qkv_, hidden_, branch_, sums_, parts_, angles_, scratch_, scores_, gathered_;
  size_t scratch_floats_ = 0;  // of one thread
  int runs_ = 0;               // of the longest sequence that the buffers are large enough for
  bool timing_ = false;
  Times times_;
};

}  // namespace crelle::cpu
