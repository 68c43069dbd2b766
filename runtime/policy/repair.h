// Local repair of a plan when the observed order departs from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "runtime/policy/planner.h"

namespace misa::policy {

// Uses were left out, so that the actions from index `first` to `end` of `plan` come due at once, at `position` (of the
// plan's cycle; its uses are yet to come). What is left of them: of several actions on one facet the last, and no load
// of a facet that the plan unloads again before it is used. `next_use` gives the first use of a facet at or after a
// position. The rest of the plan then holds as it is: what is on the device at the latest after its next action on each
// facet is what the plan had there.
std::vector<Action> CatchUp(const Plan& plan, size_t first, size_t end, uint32_t position,
                            const std::function<uint64_t(uint32_t facet, uint32_t position)>& next_use);

}  // namespace misa::policy
