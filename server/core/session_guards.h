// What the core knows of a session for its guards (core_guards.cc).
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/guard/dependencies.h"
#include "runtime/guard/loss_stability.h"
#include "runtime/guard/loss_swings.h"

namespace misa::server {

struct SessionGuards {
  guard::LossStability stability;
  guard::SwingGuard swings;
  bool loss_known = false;
  double loss = 0;            // the last one that was finite
  bool loss_refused = false;  // the last one was not: one event for a row of them
  uint64_t rows = 0;          // of the last report that had them
  // Modules that keep their place as far as the budget allows, the last to go first.
  std::vector<uint32_t> order;
  guard::ResolvedDependencies dependencies;
};

}  // namespace misa::server
