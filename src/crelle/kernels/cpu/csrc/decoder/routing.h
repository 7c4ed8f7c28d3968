// Which experts the tokens of a pass take, and the pass's tokens sorted by expert.
//
// A slot is one token at one expert. Slots are sorted by expert, then by token, so that a token's experts are added up
// in the same order whatever else is in the pass, and the slots of an expert are the rows of its products.
#pragma once

#include <cstddef>
#include <vector>

namespace crelle::cpu {

struct Experts;

struct Slot {
  int token, expert;
  float weight;  // of the expert's output
};

// The slots [first, first + count) of one expert.
struct Group {
  int expert, first, count;
};

struct Routing {
  std::vector<Slot> slots;
  std::vector<Group> groups;  // of the experts that have tokens

  // The slots of `tokens` tokens: token i has the scores [experts.count], and one of the shared gate where there is a
  // shared expert, at scores + i * pitch; biases are part of them.
  void route(const Experts &experts, const float *scores, size_t pitch, int tokens);

private:
  void sort(int experts);

  std::vector<Slot> unsorted_;
  std::vector<int> first_;
};

}  // namespace crelle::cpu
