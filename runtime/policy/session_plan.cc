#include "runtime/policy/session_plan.h"

#include <utility>

#include "runtime/policy/steady_room.h"

namespace misa::policy {

SessionPlan MakeSessionPlan(const PlanInput& input) {
  PlanInput bare = input;
  bare.reserve_bytes = 0;
  SessionPlan made{MakeSteadyPlan(input), LowerBound(bare)};
  if (!made.plan.ok() && input.reserve_bytes > 0) {
    if (Result<Plan> plan = MakeSteadyPlan(bare); plan.ok()) made.plan = std::move(plan);
  }
  return made;
}

}  // namespace misa::policy
