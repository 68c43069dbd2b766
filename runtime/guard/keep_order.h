// Which modules keep their place on the device while the budget shrinks, step by step: hot ones go first, by
// importance, critical ones last.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/guard/dependencies.h"

namespace misa::guard {

struct KeepCandidate {
  uint64_t bytes = 0;
  double rank = 0;        // of its importance, [0, 1]; what is not finite counts as 0
  bool critical = false;  // pinned
  bool hot = false;
};

// The modules that may stay, the last to go first: critical ones by falling rank, then hot ones by falling rank, of
// equals the first. Each comes right behind what it needs; one that is apart from an earlier one is left out. Modules
// that are neither critical nor hot are not in it unless one that is needs them. `dependencies` may be empty.
std::vector<uint32_t> KeepOrder(const std::vector<KeepCandidate>& candidates, const ResolvedDependencies& dependencies);

// How many of the order's first modules fit into the room together, each with what it needs. Less room never keeps a
// module that more room does not: each step down lets go of the last ones, and none of those that stay moves.
size_t KeepCount(const std::vector<uint32_t>& order, const std::vector<KeepCandidate>& candidates,
                 const ResolvedDependencies& dependencies, uint64_t room_bytes);

}  // namespace misa::guard
