// A PlanInput, checked and laid out flat: what planning, bounds and simulation all read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/policy/planner.h"

namespace misa::policy {

// One use of a facet (all uses of one facet at one position are one), and the interval up to its next use.
struct FacetUse {
  uint32_t facet = 0;
  uint32_t position = 0;
  uint8_t access = 0;
  bool needs_content = false;  // reads what an earlier use left behind
  bool next_needs_content = false;
  uint32_t previous = 0;  // index of the facet's use before, around the period
  uint32_t next = 0;      // and of the one after
  uint32_t distance = 0;  // positions to the next use, 1 … positions

  // The facet differs from what the tier below holds after this use.
  bool dirties() const { return (access & (kWrite | kCreate)) != 0; }
  bool discards() const { return (access & kDiscard) != 0; }
};

struct StepModel {
  std::vector<FacetUse> uses;       // in order of position
  std::vector<uint32_t> first_use;  // index of a position's first use; one more at the end
  std::vector<int64_t> bytes;       // of each facet
  std::vector<int64_t> used;        // bytes of the facets used at each position
  std::vector<int64_t> capacity;    // bytes that facets may hold at each position: budget - reserve - other
  std::vector<double> compute;      // seconds of each position
  double compute_total = 0;
  LinkRates link;

  size_t positions() const { return compute.size(); }
};

// The checks of MakePlan and LowerBound, and the layout.
Result<StepModel> BuildStepModel(const PlanInput& input);

}  // namespace misa::policy
