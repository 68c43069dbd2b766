#include "runtime/policy/planner.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/policy/bound.h"
#include "runtime/policy/offers.h"
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

// How much room transfers are given is a bargain: more lets loads run further ahead, and sends more facets away. What
// it is worth depends on the step, so the ways are simulated and the best is taken. Those that win most often come
// first, and of equals the earlier one, which leaves more room to a link that is slower than its profile, is taken.
constexpr Way kWays[] = {
    {Method::kPriced, 1},       {Method::kFarthest, 1},     {Method::kPriced, 2},       {Method::kFarthest, 2},
    {Method::kPriced, 4},       {Method::kFarthest, 4},     {Method::kPriced, 0.5},     {Method::kFarthest, 0.5},
    {Method::kPricedByTime, 1}, {Method::kPricedByTime, 2}, {Method::kPricedByTime, 4}, {Method::kPricedByTime, 0.5},
    {Method::kPriced, 0},       {Method::kFarthest, 0},     {Method::kPricedByTime, 0},
};
// Ways times uses, so that a step of a thousand modules is planned in ten milliseconds; the first two ways are always
// tried.
constexpr size_t kMostWork = 8000;
constexpr size_t kLeastWays = 2;
// Lengths of cycles that are tried, and how many uses a cycle may have.
constexpr uint32_t kCycles[] = {2, 3, 5, 8, 13, 19, 26, 39, 52, 64};
constexpr size_t kMostCycleUses = 2000;
constexpr size_t kLeastCycleWays = 2;
// Of each number of offers tried.
constexpr size_t kLeastOfferWays = 2;
constexpr size_t kOfferWork = 500;
// Differences in the step's time under this share are noise beside what a profile is off by; bytes decide then.
constexpr double kEqualTime = 2e-4;
// So near to the bound no other way is worth its simulation; and where the fewest bytes are asked for.
constexpr double kNearBound = 1.01;
constexpr double kNearestBound = 1.001;
constexpr size_t kManyUses = 4000;
// Victims this near to the farthest one may be clean instead.
constexpr double kTieWindow = 0.1;

bool Better(const Plan& a, const Plan& b) {
  const double margin = kEqualTime * std::min(a.step_seconds, b.step_seconds);
  if (a.step_seconds < b.step_seconds - margin || b.step_seconds < a.step_seconds - margin) {
    return a.step_seconds < b.step_seconds;
  }
  return a.loaded_bytes + a.unloaded_bytes < b.loaded_bytes + b.unloaded_bytes;
}

bool GoodEnough(const Plan& plan, const Bound& bound, double near_bound) {
  return plan.step_seconds <= bound.step_seconds * (1 + kEqualTime) &&
         static_cast<double>(plan.loaded_bytes + plan.unloaded_bytes) <=
             near_bound * static_cast<double>(bound.load_bytes + bound.unload_bytes);
}

std::vector<uint8_t> Choose(const StepModel& model, const Way& way, const Bound& bound, double near_bound,
                            uint32_t periods) {
  const auto priced = [&](const Intervals& intervals, const Weights& weights) {
    const double least =
        weights.load * static_cast<double>(bound.load_bytes) + weights.unload * static_cast<double>(bound.unload_bytes);
    // A small step takes no time to improve.
    const double enough = model.uses.size() > kManyUses ? near_bound : std::min(near_bound, kNearestBound);
    return ChoosePriced(model, intervals, weights, periods * enough * least);
  };
  const Intervals intervals = WidenUses(model, way.transfer_room);
  switch (way.method) {
    case Method::kFarthest:
      return ChooseFarthest(model, intervals, kTieWindow);
    case Method::kPriced:
      return priced(intervals, {1, 1});
    case Method::kPricedByTime:
      break;
  }
  // A byte down costs less than one up where the way down is faster.
  return priced(intervals, {1, model.link.load / model.link.unload});
}

// A plan of `periods` periods simulated as one long period, with the means of a period.
Plan OnePeriodOf(Plan plan, uint32_t periods) {
  plan.periods = periods;
  plan.step_seconds /= periods;
  plan.stall_seconds /= periods;
  // Rounded up: a plan never seems to be below its bound.
  plan.loaded_bytes = (plan.loaded_bytes + periods - 1) / periods;
  plan.unloaded_bytes = (plan.unloaded_bytes + periods - 1) / periods;
  return plan;
}

PlanInput Repeat(const PlanInput& input, uint32_t periods) {
  PlanInput longer = input;
  const size_t count = input.trace.entries.size();
  longer.trace.entries.reserve(count * periods);
  for (uint32_t k = 1; k < periods; ++k) {
    for (size_t p = 0; p < count; ++p) {
      longer.trace.entries.push_back(input.trace.entries[p]);
    }
  }
  return longer;
}

// Tries ways on one model until one is good enough or the work is spent.
class Search {
 public:
  // `bound` is of one period, however many the model has.
  Search(const Bound& bound, double near_bound, std::optional<Plan>* best)
      : bound_(bound), near_bound_(near_bound), best_(best) {}

  // False where no way could be simulated; `error` says why then.
  void Try(const StepModel& model, uint32_t periods, size_t least_ways, std::string* error,
           size_t most_work = kMostWork) {
    std::vector<std::vector<uint8_t>> tried;
    for (const Way& way : kWays) {
      if (tried.size() >= least_ways && tried.size() * model.uses.size() >= most_work) {
        return;
      }
      std::vector<uint8_t> kept = Choose(model, way, bound_, near_bound_, periods);
      if (std::find(tried.begin(), tried.end(), kept) != tried.end()) {
        continue;
      }
      tried.push_back(std::move(kept));
      Result<Schedule> schedule = MakeSchedule(model, tried.back(), {});
      if (!schedule.ok()) {
        *error = schedule.error;
        continue;
      }
      Plan plan = OnePeriodOf(std::move(schedule.value.plan), periods);
      if (!*best_ || Better(plan, **best_)) {
        *best_ = std::move(plan);
        if (done()) {
          return;
        }
      }
    }
  }
  bool done() const { return *best_ && GoodEnough(**best_, bound_, near_bound_); }

 private:
  const Bound& bound_;
  const double near_bound_;
  std::optional<Plan>* best_;
};

// The plan with so many of the ranked offers. Those it turns out to have no use for are left out, and it is made again.
std::optional<Plan> PlanWith(const StepModel& model, std::vector<TakenOffer> ranked, size_t count) {
  while (true) {
    const StepModel step = TakeOffers(model, count, &ranked);
    const Bound bound = BoundOf(step);
    std::optional<Plan> best;
    std::string error;
    Search(bound, kNearBound, &best).Try(step, 1, kLeastOfferWays, &error, kOfferWork);
    if (!best) {
      return std::nullopt;
    }
    std::vector<TakenOffer> stated = StateOffers(model, ranked, &*best);
    if (stated.size() == ranked.size()) {
      return best;
    }
    ranked = std::move(stated);
    count = ranked.size();
  }
}

// Compute that takes up slack costs nothing, and compute beyond it all it takes: the step's time falls with the number
// of offers taken up and then rises. Looked for in steps that grow, then in ever smaller ones around the best.
void TakeUpOffers(const StepModel& model, const std::vector<Offer>& offers, Plan* best) {
  if (best->step_seconds <= model.compute_total * (1 + kEqualTime)) {
    return;  // the link costs no time that compute could save
  }
  for (const auto& [recompute, int8] : {std::pair{true, false}, std::pair{false, true}, std::pair{true, true}}) {
    const std::vector<TakenOffer> ranked = RankOffers(model, offers, recompute, int8);
    size_t most = 0;
    double least_seconds = best->step_seconds;
    const auto attempt = [&](size_t count) {
      std::optional<Plan> plan = PlanWith(model, ranked, count);
      if (!plan) {
        return;
      }
      if (plan->step_seconds < least_seconds) {
        least_seconds = plan->step_seconds;
        most = count;
      }
      if (plan->step_seconds < best->step_seconds * (1 - kEqualTime)) {
        *best = std::move(*plan);
      }
    };
    for (size_t count = 1; count < 2 * ranked.size(); count *= 2) {
      attempt(std::min(count, ranked.size()));
    }
    for (size_t step = most / 2; step > 0 && most > 0; step /= 2) {
      const size_t middle = most;
      attempt(std::min(middle + step, ranked.size()));
      attempt(middle - std::min(step, middle - 1));
    }
  }
}

}  // namespace

std::string WithoutPinned(const PlanInput& input, PlanInput* rest) {
  *rest = input;
  rest->pinned.clear();
  std::vector<bool> pinned(input.facet_bytes.size(), false);
  uint64_t bytes = 0;
  for (const uint32_t facet : input.pinned) {
    if (facet >= pinned.size()) {
      return "Facet " + std::to_string(facet) + " is to stay on the device and is not among the " +
             std::to_string(pinned.size()) + " there are.";
    }
    if (pinned[facet]) continue;
    pinned[facet] = true;
    bytes += input.facet_bytes[facet];
  }
  if (bytes > input.budget_bytes) {
    return "The facets that are to stay on the device take " + std::to_string(bytes) + " bytes and the budget is " +
           std::to_string(input.budget_bytes) + "; pin fewer modules, or raise the budget.";
  }
  rest->budget_bytes -= bytes;
  for (TraceEntry& entry : rest->trace.entries) {
    std::erase_if(entry.uses, [&](const Use& use) { return use.facet < pinned.size() && pinned[use.facet]; });
  }
  std::erase_if(rest->offers, [&](const Offer& offer) { return offer.facet < pinned.size() && pinned[offer.facet]; });
  return "";
}

Result<Plan> MakePlan(const PlanInput& input) {
  Result<Plan> result;
  if (!input.pinned.empty()) {
    PlanInput rest;
    result.error = WithoutPinned(input, &rest);
    return result.ok() ? MakePlan(rest) : result;
  }
  const Result<StepModel> checked = BuildStepModel(input);
  if (!checked.ok()) {
    result.error = checked.error;
    return result;
  }
  const StepModel& model = checked.value;
  const Bound bound = BoundOf(model);
  std::optional<Plan> best;
  Search search(bound, input.fewest_bytes ? kNearestBound : kNearBound, &best);
  search.Try(model, 1, kLeastWays, &result.error);
  // Bytes that cost no time are not worth a cycle, unless asked for.
  const bool stalls = best && best->step_seconds > bound.step_seconds * (1 + kEqualTime);
  for (const uint32_t periods : kCycles) {
    if (!stalls && !input.fewest_bytes) {
      break;
    }
    if (periods > input.most_cycle_periods || model.uses.size() * periods > kMostCycleUses || !best || search.done()) {
      break;
    }
    const Result<StepModel> cycle = BuildStepModel(Repeat(input, periods));
    if (!cycle.ok()) {
      break;  // too many positions; one period's plan is there
    }
    search.Try(cycle.value, periods, kLeastCycleWays, &result.error, input.fewest_bytes ? kMostWork : 0);
  }
  if (best) {
    if (!input.offers.empty()) {
      TakeUpOffers(model, input.offers, &*best);
    }
    result.value = std::move(*best);
    result.error.clear();
  }
  return result;
}

}  // namespace misa::policy
