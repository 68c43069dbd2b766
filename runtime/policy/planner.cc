#include "runtime/policy/planner.h"

#include <algorithm>
#include <optional>

#include "runtime/policy/bound.h"
#include "runtime/policy/residency.h"
#include "runtime/policy/schedule.h"
#include "runtime/policy/step_model.h"

namespace misa::policy {
namespace {

enum class Method : uint8_t { kFarthest, kPriced, kPricedByTime };

struct Way {
  Method method;
  double transfer_room;
};

// How much room transfers are given is a bargain: more lets loads run further ahead, and sends more facets away. What it
// is worth depends on the step, so the ways are simulated and the best is taken. Those that win most often come first,
// and of equals the earlier one, which leaves more room to a link that is slower than its profile, is taken.
constexpr Way kWays[] = {
    {Method::kPriced, 1},         {Method::kFarthest, 1},       {Method::kPriced, 2},       {Method::kFarthest, 2},
    {Method::kPriced, 4},         {Method::kFarthest, 4},       {Method::kPriced, 0.5},     {Method::kFarthest, 0.5},
    {Method::kPricedByTime, 1},   {Method::kPricedByTime, 2},   {Method::kPricedByTime, 4}, {Method::kPricedByTime, 0.5},
    {Method::kPriced, 0},         {Method::kFarthest, 0},       {Method::kPricedByTime, 0},
};
// Ways times uses, so that a step of thousands of modules is planned in tens of milliseconds; the first three ways are
// always tried.
constexpr size_t kMostWork = 24000;
constexpr size_t kLeastWays = 3;
// Differences in the step's time under this share are noise beside what a profile is off by; bytes decide then.
constexpr double kEqualTime = 2e-4;
// So near to the bound no other way is worth its simulation.
constexpr double kNearBound = 1.01;
// Victims this near to the farthest one may be clean instead.
constexpr double kTieWindow = 0.1;

bool Better(const Plan& a, const Plan& b) {
  const double margin = kEqualTime * std::min(a.step_seconds, b.step_seconds);
  if (a.step_seconds < b.step_seconds - margin || b.step_seconds < a.step_seconds - margin) {
    return a.step_seconds < b.step_seconds;
  }
  return a.loaded_bytes + a.unloaded_bytes < b.loaded_bytes + b.unloaded_bytes;
}

bool GoodEnough(const Plan& plan, const Bound& bound) {
  return plan.step_seconds <= bound.step_seconds * (1 + kEqualTime) &&
         static_cast<double>(plan.loaded_bytes + plan.unloaded_bytes) <=
             kNearBound * static_cast<double>(bound.load_bytes + bound.unload_bytes);
}

std::vector<uint8_t> Choose(const StepModel& model, const Way& way) {
  const Intervals intervals = WidenUses(model, way.transfer_room);
  switch (way.method) {
    case Method::kFarthest:
      return ChooseFarthest(model, intervals, kTieWindow);
    case Method::kPriced:
      return ChoosePriced(model, intervals, {1, 1});
    case Method::kPricedByTime:
      break;
  }
  // A byte down costs less than one up where the way down is faster.
  return ChoosePriced(model, intervals, {1, model.link.load / model.link.unload});
}

}  // namespace

Result<Plan> MakePlan(const PlanInput& input) {
  Result<Plan> result;
  const Result<StepModel> checked = BuildStepModel(input);
  if (!checked.ok()) {
    result.error = checked.error;
    return result;
  }
  const StepModel& model = checked.value;
  const Bound bound = BoundOf(model);
  std::optional<Plan> best;
  std::vector<std::vector<uint8_t>> tried;
  for (const Way& way : kWays) {
    if (tried.size() >= kLeastWays && tried.size() * model.uses.size() >= kMostWork) {
      break;
    }
    std::vector<uint8_t> kept = Choose(model, way);
    if (std::find(tried.begin(), tried.end(), kept) != tried.end()) {
      continue;
    }
    tried.push_back(std::move(kept));
    Result<Schedule> schedule = MakeSchedule(model, tried.back(), {});
    if (!schedule.ok()) {
      result.error = schedule.error;
      continue;
    }
    if (!best || Better(schedule.value.plan, *best)) {
      best = std::move(schedule.value.plan);
      if (GoodEnough(*best, bound)) {
        break;
      }
    }
  }
  if (best) {
    result.value = std::move(*best);
    result.error.clear();
  }
  return result;
}

}  // namespace misa::policy
