// Traces of training steps that the planner's tests share.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/policy/planner.h"

namespace misa::policy {

// A step of equal matrices: weights are facet 3i, gradients 3i + 1, optimizer state (twice as large) 3i + 2.
struct TrainingStep {
  uint32_t matrices = 24;
  uint64_t weight_bytes = 37748736;
  double compute_seconds = 18;  // a third forward, two thirds backward
  uint64_t least_other_bytes = 100'000'000;
  uint64_t most_other_bytes = 400'000'000;  // at the turn
  uint64_t budget_bytes = 1'200'000'000;
  LinkRates link = {1.1e9, 3.2e9, 0.8e9, 0.8e9};
};

// The optimizer step of a matrix at its next touch, in forward.
PlanInput Deferred(const TrainingStep& step);
// The optimizer step of a matrix as soon as its gradient is complete; gradients are no facets.
PlanInput InBackward(const TrainingStep& step);
// Forward, backward, then a pass of the optimizer.
PlanInput Eager(const TrainingStep& step);

// Read-only uses of facets of one byte, one a position; `capacity` of them fit.
PlanInput UnitTrace(const std::vector<uint32_t>& order, uint64_t capacity);

// Small traces of all kinds: mixed sizes, capacities that vary, all accesses, equal facets, zero times.
PlanInput RandomTrace(uint64_t seed);

}  // namespace misa::policy
