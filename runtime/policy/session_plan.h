// What a session's trace is answered with: the one way in which the daemon, and a simulated node, plan a session.
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/policy/planner.h"

namespace misa::policy {

inline constexpr uint64_t kDefaultReserveBytes = 16ull << 20;

// What a session's plan keeps free of facets: so many bytes, and no more than a 32nd of a small budget.
constexpr uint64_t SessionReserve(uint64_t budget_bytes, uint64_t reserve_bytes = kDefaultReserveBytes) {
  return std::min(reserve_bytes, budget_bytes / 32);
}

struct SessionPlan {
  Result<Plan> plan;
  Result<Bound> bound;
};

// MakeSteadyPlan, without the reserve where none can be made with it: what the reserve is for is loaded on demand then. The
// bound is that of the input without a reserve, as no schedule has to keep one.
SessionPlan MakeSessionPlan(const PlanInput& input);

}  // namespace misa::policy
