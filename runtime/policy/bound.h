// The bounds of a model that has been checked; LowerBound is the same from a PlanInput.
#pragma once

#include "runtime/policy/planner.h"
#include "runtime/policy/step_model.h"

namespace misa::policy {

Bound BoundOf(const StepModel& model);

}  // namespace misa::policy
