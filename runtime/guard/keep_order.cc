#include "runtime/guard/keep_order.h"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace misa::guard {
namespace {

double Rank(const KeepCandidate& candidate) { return std::isfinite(candidate.rank) ? candidate.rank : 0; }

}  // namespace

std::vector<uint32_t> KeepOrder(const std::vector<KeepCandidate>& candidates,
                                const ResolvedDependencies& dependencies) {
  std::vector<uint32_t> wanted;
  for (uint32_t i = 0; i < candidates.size(); ++i) {
    if (candidates[i].critical || candidates[i].hot) wanted.push_back(i);
  }
  std::sort(wanted.begin(), wanted.end(), [&](uint32_t a, uint32_t b) {
    return std::make_tuple(!candidates[a].critical, -Rank(candidates[a]), a) <
           std::make_tuple(!candidates[b].critical, -Rank(candidates[b]), b);
  });
  std::vector<uint32_t> order;
  std::vector<bool> taken(candidates.size(), false);
  std::vector<bool> barred(candidates.size(), false);
  const auto take = [&](uint32_t module) {
    taken[module] = true;
    order.push_back(module);
    if (module < dependencies.apart.size()) {
      for (const uint32_t other : dependencies.apart[module]) barred[other] = true;
    }
  };
  for (const uint32_t module : wanted) {
    // What it needs is barred where it is: whatever is apart from a part of a unit is apart from the whole.
    if (taken[module] || barred[module]) continue;
    if (module < dependencies.needs.size()) {
      for (const uint32_t other : dependencies.needs[module]) {
        if (!taken[other]) take(other);
      }
    }
    take(module);
  }
  return order;
}

size_t KeepCount(const std::vector<uint32_t>& order, const std::vector<KeepCandidate>& candidates,
                 const ResolvedDependencies& dependencies, uint64_t room_bytes) {
  std::vector<bool> kept(candidates.size(), false);
  uint64_t left = room_bytes;
  size_t whole = 0;  // up to here every module has what it needs
  for (size_t i = 0; i < order.size(); ++i) {
    const uint32_t module = order[i];
    if (candidates[module].bytes > left) break;
    left -= candidates[module].bytes;
    kept[module] = true;
    bool complete = true;
    for (size_t k = whole; k <= i && complete; ++k) {
      if (order[k] >= dependencies.needs.size()) continue;
      const std::vector<uint32_t>& needs = dependencies.needs[order[k]];
      complete = std::all_of(needs.begin(), needs.end(), [&](uint32_t other) { return kept[other]; });
    }
    if (complete) whole = i + 1;
  }
  return whole;
}

}  // namespace misa::guard
