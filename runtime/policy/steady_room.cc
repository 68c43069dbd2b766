#include "runtime/policy/steady_room.h"

#include <algorithm>
#include <vector>

namespace misa::policy {
namespace {

// A plan this much slower by prediction is not worth the saved zeroing.
constexpr double kSlower = 1.01;
// Of the period, to either side: long enough to span a few modules' steps, short enough to leave a forward pass's end, where
// activations stand highest, apart from its beginning.
constexpr size_t kShare = 8;
constexpr size_t kMostPositions = 256;

}  // namespace

uint32_t SteadyWindow(const PlanInput& input) {
  return static_cast<uint32_t>(std::min(input.trace.entries.size() / kShare, kMostPositions));
}

PlanInput KeepRoomSteady(PlanInput input, uint32_t window) {
  std::vector<TraceEntry>& entries = input.trace.entries;
  const size_t n = entries.size();
  if (n == 0 || window == 0) return input;
  std::vector<uint64_t> other(n);
  for (size_t p = 0; p < n; ++p) other[p] = entries[p].other_bytes;
  for (size_t p = 0; p < n; ++p) {
    uint64_t taken = input.reserve_bytes;
    std::vector<uint32_t> seen;
    for (const Use& use : entries[p].uses) {
      if (use.facet >= input.facet_bytes.size() || std::find(seen.begin(), seen.end(), use.facet) != seen.end()) continue;
      seen.push_back(use.facet);
      taken += std::min(input.facet_bytes[use.facet], input.budget_bytes);
    }
    if (taken >= input.budget_bytes) continue;
    const uint64_t room = input.budget_bytes - taken;
    uint64_t most = other[p];
    for (size_t k = 1; k <= std::min<size_t>(window, n / 2); ++k) {
      most = std::max({most, other[(p + k) % n], other[(p + n - k) % n]});
    }
    entries[p].other_bytes = std::max(other[p], std::min(most, room));
  }
  return input;
}

Result<Plan> MakeSteadyPlan(const PlanInput& input) {
  // The room between pinned facets is not theirs to be raised into.
  if (PlanInput rest; !input.pinned.empty() && WithoutPinned(input, &rest).empty()) return MakeSteadyPlan(rest);
  Result<Plan> plain = MakePlan(input);
  const uint32_t window = SteadyWindow(input);
  if (window == 0) return plain;
  const PlanInput kept = KeepRoomSteady(input, window);
  const auto same = [](const TraceEntry& a, const TraceEntry& b) { return a.other_bytes == b.other_bytes; };
  if (std::equal(kept.trace.entries.begin(), kept.trace.entries.end(), input.trace.entries.begin(), same)) return plain;
  Result<Plan> steady = MakePlan(kept);
  if (steady.ok() && (!plain.ok() || steady.value.step_seconds <= plain.value.step_seconds * kSlower)) return steady;
  return plain;
}

}  // namespace misa::policy
