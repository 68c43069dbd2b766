// Room that the other tensors give up for a moment only is better left to them.
#pragma once

#include <cstdint>

#include "runtime/policy/planner.h"

namespace misa::policy {

// The input with the other tensors' bytes at each position raised to their most within `window` positions before and after
// (around the period), as far as the facets used at the position leave room. A plan for it never loads into memory that is
// needed again at once: the trainer would have to give freed blocks back to the system for it, and zeroing them anew costs
// the compute more than the early load gains. Changes nothing where budget, sizes or facets are impossible: MakePlan says so.
PlanInput KeepRoomSteady(PlanInput input, uint32_t window);

// The window that MakeSteadyPlan takes: an eighth of the period, within limits.
uint32_t SteadyWindow(const PlanInput& input);

// The plan for steady room, or the plain one where that is predicted to take longer (by more than a hundredth) or where
// steady room allows none.
Result<Plan> MakeSteadyPlan(const PlanInput& input);

}  // namespace misa::policy
