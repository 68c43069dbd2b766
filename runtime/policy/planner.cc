#include "runtime/policy/planner.h"

#include <algorithm>

#include "runtime/policy/residency.h"
#include "runtime/policy/schedule.h"
#include "runtime/policy/step_model.h"

namespace misa::policy {
namespace {

// How much room transfers are given is a bargain: more lets loads run further ahead, and sends more facets away. What it
// is worth depends on the step, so all of these are simulated and the best is taken.
constexpr double kTransferRooms[] = {0, 0.5, 1, 2, 4};
// Differences in the step's time under this share are noise beside what a profile is off by; bytes decide then.
constexpr double kEqualTime = 1e-3;
// Victims this near to the farthest one may be clean instead.
constexpr double kTieWindow = 0.1;

bool Better(const Plan& a, const Plan& b) {
  const double margin = kEqualTime * std::min(a.step_seconds, b.step_seconds);
  if (a.step_seconds < b.step_seconds - margin || b.step_seconds < a.step_seconds - margin) {
    return a.step_seconds < b.step_seconds;
  }
  return a.loaded_bytes + a.unloaded_bytes < b.loaded_bytes + b.unloaded_bytes;
}

}  // namespace

Result<Plan> MakePlan(const PlanInput& input) {
  Result<Plan> result;
  Result<StepModel> model = BuildStepModel(input);
  if (!model.ok()) {
    result.error = model.error;
    return result;
  }
  // Bytes down matter as much as bytes up where both fill the link, and less where the way down is faster.
  const Weights even;
  const Weights by_time{1, model.value.link.load / (model.value.link.load + model.value.link.unload)};
  bool found = false;
  std::vector<std::vector<uint8_t>> tried;
  for (const double transfer_room : kTransferRooms) {
    const Intervals intervals = WidenUses(model.value, transfer_room);
    for (const std::vector<uint8_t>& kept :
         {ChooseFarthest(model.value, intervals, kTieWindow), ChoosePriced(model.value, intervals, even),
          ChoosePriced(model.value, intervals, by_time)}) {
      if (std::find(tried.begin(), tried.end(), kept) != tried.end()) {
        continue;
      }
      tried.push_back(kept);
      Result<Schedule> schedule = MakeSchedule(model.value, kept, {});
      if (!schedule.ok()) {
        result.error = schedule.error;
        continue;
      }
      if (!found || Better(schedule.value.plan, result.value)) {
        result.value = std::move(schedule.value.plan);
        found = true;
      }
    }
  }
  if (found) {
    result.error.clear();
  }
  return result;
}

}  // namespace misa::policy
