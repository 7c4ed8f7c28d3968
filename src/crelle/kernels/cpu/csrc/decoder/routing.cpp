#include "decoder/routing.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "decoder/decoder.h"

namespace crelle::cpu {
namespace {

// The `top` largest scores of a token and their softmax, over all experts or over those alone. Of equal scores the
// first is taken. A score of NaN or +infinity makes all weights NaN, as a softmax would.
void choose(const Experts &experts, const float *scores, int token, std::vector<Slot> &out) {
  const auto begin = out.size();
  for (int i = 0; i < experts.top; ++i) {
    int best = -1;
    for (int e = 0; e < experts.count; ++e) {
      if (best >= 0 && !(scores[e] > scores[best])) continue;
      if (std::any_of(out.begin() + begin, out.end(), [&](const Slot &s) { return s.expert == e; })) continue;
      best = e;
    }
    out.push_back({token, best, scores[best]});
  }
  const float top = out[begin].weight;
  float sum = 0;
  for (int e = 0; e < experts.count; ++e)
    if (!(scores[e] <= std::numeric_limits<float>::max())) sum = std::numeric_limits<float>::quiet_NaN();
  if (experts.normalize)
    for (auto s = out.begin() + begin; s != out.end(); ++s) sum += std::exp(s->weight - top);
  else
    for (int e = 0; e < experts.count; ++e) sum += std::exp(scores[e] - top);
  for (auto s = out.begin() + begin; s != out.end(); ++s) s->weight = std::exp(s->weight - top) / sum;
}

}  // namespace

void Routing::route(const Experts &experts, const float *scores, size_t pitch, int tokens) {
  unsorted_.clear();
  for (int i = 0; i < tokens; ++i, scores += pitch) {
    choose(experts, scores, i, unsorted_);
    if (experts.shared()) unsorted_.push_back({i, experts.count, 1.0f / (1.0f + std::exp(-scores[experts.count]))});
  }
  sort(int(experts.each.size()));
}

// Counting sort: stable, so that an expert's tokens are in order.
void Routing::sort(int experts) {
  first_.assign(experts + 1, 0);
  for (const Slot &s : unsorted_) ++first_[s.expert + 1];
  groups.clear();
  for (int e = 0; e < experts; ++e) {
    const int count = first_[e + 1];
    first_[e + 1] += first_[e];
    if (count) groups.push_back({e, first_[e], count});
  }
  slots.resize(unsorted_.size());
  for (const Slot &s : unsorted_) slots[first_[s.expert]++] = s;
}

}  // namespace crelle::cpu
