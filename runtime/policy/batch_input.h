// What the batch hint needs to know of a step, from what its plan is made of.
#pragma once

#include "runtime/guard/batch_hint.h"
#include "runtime/policy/planner.h"

namespace misa::policy {

// `peak_bytes` of the last step, all in all; `rows` of the batch, 0 where they are not known.
guard::BatchInput BatchInputOf(const PlanInput& plan, uint64_t peak_bytes, uint64_t rows);

}  // namespace misa::policy
