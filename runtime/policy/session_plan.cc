#include "runtime/policy/session_plan.h"

#include <utility>

#include "runtime/policy/steady_room.h"

namespace misa::policy {

SessionPlan MakeSessionPlan(const PlanInput& input) {
  SessionPlan made{MakeSteadyPlan(input), {}};
  PlanInput bare = input;
  bare.reserve_bytes = 0;
  if (!made.plan.ok() && input.reserve_bytes > 0) {
    if (Result<Plan> plan = MakeSteadyPlan(bare); plan.ok()) made.plan = std::move(plan);
  }
  if (made.plan.ok()) made.bound = LowerBound(bare);
  return made;
}

}  // namespace misa::policy
