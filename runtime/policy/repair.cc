#include "runtime/policy/repair.h"

#include <unordered_map>

namespace misa::policy {

std::vector<Action> CatchUp(const Plan& plan, size_t first, size_t end, uint32_t position,
                            const std::function<uint64_t(uint32_t facet, uint32_t position)>& next_use) {
  std::unordered_map<uint32_t, size_t> last;
  for (size_t i = first; i < end; ++i) {
    last[plan.actions[i].facet] = i;
  }
  // Where the plan next unloads the facets that it would load now.
  std::unordered_map<uint32_t, uint32_t> leaves;
  for (size_t i = end; i < plan.actions.size(); ++i) {
    const Action& action = plan.actions[i];
    if (action.kind == Action::kUnload && last.count(action.facet) != 0) {
      leaves.try_emplace(action.facet, action.position);
    }
  }
  std::vector<Action> left;
  for (size_t i = first; i < end; ++i) {
    const Action& action = plan.actions[i];
    if (last[action.facet] != i) {
      continue;
    }
    if (action.kind == Action::kLoad) {
      const auto leaving = leaves.find(action.facet);
      if (leaving != leaves.end() && leaving->second < next_use(action.facet, position)) {
        continue;
      }
    }
    left.push_back(action);
  }
  return left;
}

}  // namespace misa::policy
