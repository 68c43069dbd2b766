#include "runtime/policy/batch_input.h"

#include <limits>

namespace misa::policy {

guard::BatchInput BatchInputOf(const PlanInput& plan, uint64_t peak_bytes, uint64_t rows) {
  guard::BatchInput input;
  input.budget_bytes = plan.budget_bytes;
  input.reserve_bytes = plan.reserve_bytes;
  input.peak_bytes = peak_bytes;
  input.rows = rows;
  std::vector<size_t> seen(plan.facet_bytes.size(), std::numeric_limits<size_t>::max());
  for (size_t p = 0; p < plan.trace.entries.size(); ++p) {
    guard::BatchPosition position{0, plan.trace.entries[p].other_bytes};
    for (const Use& use : plan.trace.entries[p].uses) {
      if (seen[use.facet] == p) continue;
      seen[use.facet] = p;
      position.managed_bytes += plan.facet_bytes[use.facet];
    }
    input.positions.push_back(position);
  }
  return input;
}

}  // namespace misa::policy
