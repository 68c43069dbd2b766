// What a session's trace is answered with: the one way in which the daemon, and a simulated node, plan a session.
#pragma once

#include "runtime/policy/planner.h"

namespace misa::policy {

struct SessionPlan {
  Result<Plan> plan;
  Result<Bound> bound;
};

// MakeSteadyPlan, without the reserve where none can be made with it: what the reserve is for is loaded on demand then. The
// bound is that of the input without a reserve, as no schedule has to keep one.
SessionPlan MakeSessionPlan(const PlanInput& input);

}  // namespace misa::policy
