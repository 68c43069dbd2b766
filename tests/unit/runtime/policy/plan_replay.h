// An executor of plans, as loose as a trainer's: it follows a plan over several periods on a link of its own speed and
// checks at every moment what must never happen.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/policy/planner.h"

namespace misa::policy {

struct ReplayResult {
  std::string breach;  // empty: nothing happened that must not
  // Of the last period:
  double seconds = 0;
  double stall_seconds = 0;
  uint64_t loaded_bytes = 0;
  uint64_t unloaded_bytes = 0;
  uint64_t demand_loads = 0;      // that no action of the plan had started
  uint64_t demand_evictions = 0;
};

// Loads start in the plan's order, each when its position has begun and there is room; unloads when their position's use
// has ended. What is missing at its use and not on its way is loaded on demand, the facet of farthest next use making
// room. The link is `speed` times the plan's.
ReplayResult Replay(const PlanInput& input, const Plan& plan, double speed, int periods = 4);

}  // namespace misa::policy
