#include "runtime/policy/yardsticks.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <utility>

#include "runtime/policy/optimum.h"
#include "runtime/policy/step_model.h"

namespace misa::policy {
namespace {

constexpr std::pair<CachePolicy, std::string_view> kNames[] = {
    {CachePolicy::kLru, "lru"},         {CachePolicy::kLruThreshold, "lru-threshold"},
    {CachePolicy::kBelady, "belady"},   {CachePolicy::kPlanner, "planner"},
    {CachePolicy::kOptimum, "optimum"},
};
constexpr double kAmpleLink = 1000;

std::string Check(const CacheQuestion& question) {
  if (question.most_periods == 0) {
    return "There must be at least 1 period to go through.";
  }
  if (question.policy != CachePolicy::kLruThreshold) {
    return "";
  }
  if (!(question.cold >= 0 && question.cold <= question.hot && question.hot <= 1)) {
    return "The thresholds must be 0 <= cold <= hot <= 1, and are cold " + std::to_string(question.cold) + ", hot " +
           std::to_string(question.hot) + ".";
  }
  if (!question.ranks.empty() && question.ranks.size() != question.facet_bytes.size()) {
    return "There are " + std::to_string(question.ranks.size()) + " importance ranks for " +
           std::to_string(question.facet_bytes.size()) + " facets; every facet needs one.";
  }
  for (const double rank : question.ranks) {
    if (!(rank >= 0 && rank <= 1)) {
      return "An importance rank must be in [0, 1], and one is " + std::to_string(rank) + ".";
    }
  }
  return "";
}

// What is on the device, and what that costs; whoever drives it decides what goes.
class Device {
 public:
  explicit Device(const StepModel& model)
      : model_(model), here_(model.bytes.size(), 0), dirty_(model.bytes.size(), 0) {}

  bool IsHere(uint32_t facet) const { return here_[facet] != 0; }
  int64_t held() const { return held_; }
  const std::vector<uint8_t>& here() const { return here_; }
  const std::vector<uint8_t>& dirty() const { return dirty_; }

  void Load(uint32_t facet, CachePeriod* period) {
    Enter(facet);
    ++period->misses;
    period->loaded_bytes += static_cast<uint64_t>(model_.bytes[facet]);
  }
  void Enter(uint32_t facet) {
    here_[facet] = 1;
    dirty_[facet] = 0;
    held_ += model_.bytes[facet];
  }
  void Evict(uint32_t facet, CachePeriod* period) {
    period->unloaded_bytes += dirty_[facet] != 0 ? static_cast<uint64_t>(model_.bytes[facet]) : 0;
    Drop(facet);
  }
  void EndUse(const FacetUse& use) {
    dirty_[use.facet] |= use.dirties() ? 1 : 0;
    if (use.discards()) {
      Drop(use.facet);
    }
  }

 private:
  void Drop(uint32_t facet) {
    here_[facet] = 0;
    dirty_[facet] = 0;
    held_ -= model_.bytes[facet];
  }

  const StepModel& model_;
  std::vector<uint8_t> here_;
  std::vector<uint8_t> dirty_;
  int64_t held_ = 0;
};

// Loads on demand; the facet of the smallest (class, key) goes.
class OnDemand {
 public:
  OnDemand(const StepModel& model, const CacheQuestion& question)
      : model_(model), question_(question), device_(model), key_(model.bytes.size()) {}

  CachePeriod Run() {
    CachePeriod period;
    for (size_t p = 0; p < model_.positions(); ++p, ++now_) {
      for (uint32_t u = model_.first_use[p]; u < model_.first_use[p + 1]; ++u) {
        const FacetUse& use = model_.uses[u];
        if (device_.IsHere(use.facet)) {
          order_.erase(key_[use.facet]);
        } else if (use.needs_content) {
          device_.Load(use.facet, &period);
        } else {
          device_.Enter(use.facet);
        }
      }
      while (device_.held() > model_.capacity[p]) {
        const uint32_t victim = std::get<2>(*order_.begin());
        order_.erase(order_.begin());
        device_.Evict(victim, &period);
      }
      for (uint32_t u = model_.first_use[p]; u < model_.first_use[p + 1]; ++u) {
        const FacetUse& use = model_.uses[u];
        device_.EndUse(use);
        if (!use.discards()) {
          key_[use.facet] = Key(use);
          order_.insert(key_[use.facet]);
        }
      }
    }
    return period;
  }

  // Equal states go on alike.
  std::vector<int64_t> State() const {
    std::vector<int64_t> state;
    for (const auto& [rank, key, facet] : order_) {
      // Belady's order is that of next uses; what the next use is from here on is the same in every period.
      state.push_back(static_cast<int64_t>(facet) * 2 + device_.dirty()[facet]);
    }
    return state;
  }

 private:
  using Order = std::tuple<int, int64_t, uint32_t>;

  Order Key(const FacetUse& use) const {
    if (question_.policy == CachePolicy::kBelady) {
      // What nothing reads again goes before all else.
      const int dead = use.next_needs_content ? 1 : 0;
      return {dead, -(now_ + use.distance), use.facet};
    }
    int heat = 1;
    if (question_.policy == CachePolicy::kLruThreshold && !question_.ranks.empty()) {
      const double rank = question_.ranks[use.facet];
      heat = rank >= question_.hot ? 2 : rank <= question_.cold ? 0 : 1;
    }
    return {heat, now_, use.facet};
  }

  const StepModel& model_;
  const CacheQuestion& question_;
  Device device_;
  std::vector<Order> key_;
  std::set<Order> order_;
  int64_t now_ = 0;
};

// Follows a plan's actions to the letter, and loads on demand what a start from an empty device lacks.
class ByPlan {
 public:
  ByPlan(const StepModel& model, const Plan& plan) : model_(model), plan_(plan), device_(model) {}

  // One period; a sentence where the plan breaks its promise.
  std::string Run(CachePeriod* period) {
    const auto count = static_cast<uint32_t>(model_.positions());
    const uint32_t base = phase_ * count;
    if (phase_ == 0) {
      TakeUnloadsOf(plan_.periods * count - 1, period);  // what the cycle's last position leaves over
      next_ = 0;
    }
    for (uint32_t p = 0; p < count; ++p) {
      TakeDue(base + p, period);
      for (uint32_t u = model_.first_use[p]; u < model_.first_use[p + 1]; ++u) {
        const FacetUse& use = model_.uses[u];
        if (device_.IsHere(use.facet)) {
          continue;
        }
        if (!use.needs_content) {
          device_.Enter(use.facet);
          continue;
        }
        if (warm_) {
          return "The plan lacks a load of facet " + std::to_string(use.facet) + " for position " +
                 std::to_string(base + p) + ".";
        }
        device_.Load(use.facet, period);
      }
      if (device_.held() > model_.capacity[p]) {
        return "The plan holds " + std::to_string(device_.held()) + " bytes at position " + std::to_string(base + p) +
               ", and there is room for " + std::to_string(model_.capacity[p]) + ".";
      }
      for (uint32_t u = model_.first_use[p]; u < model_.first_use[p + 1]; ++u) {
        device_.EndUse(model_.uses[u]);
      }
    }
    phase_ = (phase_ + 1) % plan_.periods;
    warm_ = warm_ || phase_ == 0;
    return "";
  }

  std::vector<int64_t> State() const {
    std::vector<int64_t> state = {phase_};
    for (size_t f = 0; f < device_.here().size(); ++f) {
      state.push_back(device_.here()[f] + 2 * device_.dirty()[f]);
    }
    return state;
  }

 private:
  // Unloads after earlier positions' uses and loads up to this one, in the plan's order.
  void TakeDue(uint32_t position, CachePeriod* period) {
    for (; next_ < plan_.actions.size(); ++next_) {
      const Action& action = plan_.actions[next_];
      if (action.kind == Action::kLoad ? action.position > position : action.position >= position) {
        break;
      }
      Take(action, period);
    }
  }
  void TakeUnloadsOf(uint32_t position, CachePeriod* period) {
    for (; next_ < plan_.actions.size(); ++next_) {
      if (plan_.actions[next_].position >= position && warm_) {
        Take(plan_.actions[next_], period);
      }
    }
  }
  void Take(const Action& action, CachePeriod* period) {
    if (action.kind == Action::kLoad && !device_.IsHere(action.facet)) {
      device_.Load(action.facet, period);
    } else if (action.kind == Action::kUnload && device_.IsHere(action.facet)) {
      device_.Evict(action.facet, period);
    }
  }

  const StepModel& model_;
  const Plan& plan_;
  Device device_;
  uint32_t phase_ = 0;
  bool warm_ = false;  // a whole cycle is behind
  size_t next_ = 0;
};

// Steps `run` through periods until its state repeats, and takes the means.
template <typename Runner, typename RunPeriod>
Result<CacheAnswer> RunToRepeat(Runner* runner, uint32_t most_periods, const RunPeriod& run) {
  Result<CacheAnswer> result;
  CacheAnswer& answer = result.value;
  std::map<std::vector<int64_t>, size_t> seen;
  while (answer.periods.size() < most_periods) {
    CachePeriod period;
    result.error = run(&period);
    if (!result.ok()) {
      return result;
    }
    answer.periods.push_back(period);
    const auto [before, fresh] = seen.try_emplace(runner->State(), answer.periods.size());
    if (!fresh) {
      answer.repeats = true;
      answer.cycle_periods = static_cast<uint32_t>(answer.periods.size() - before->second);
      break;
    }
  }
  if (!answer.repeats) {
    answer.cycle_periods = static_cast<uint32_t>((answer.periods.size() + 1) / 2);
  }
  const double cycle = answer.cycle_periods;
  for (size_t k = answer.periods.size() - answer.cycle_periods; k < answer.periods.size(); ++k) {
    answer.misses_per_period += static_cast<double>(answer.periods[k].misses) / cycle;
    answer.loaded_bytes_per_period += static_cast<double>(answer.periods[k].loaded_bytes) / cycle;
    answer.unloaded_bytes_per_period += static_cast<double>(answer.periods[k].unloaded_bytes) / cycle;
  }
  return result;
}

Result<CacheAnswer> FollowPlan(const StepModel& model, const Plan& plan, uint32_t most_periods) {
  ByPlan by_plan(model, plan);
  // A cycle that begins cold and one that repeats must fit.
  return RunToRepeat(&by_plan, std::max(most_periods, 3 * plan.periods + 1),
                     [&](CachePeriod* period) { return by_plan.Run(period); });
}

Result<CacheAnswer> Optimal(const StepModel& model) {
  Result<CacheAnswer> result;
  const Result<Optimum> optimum = FindOptimum(model);
  result.error = optimum.error;
  if (!optimum.ok()) {
    return result;
  }
  CacheAnswer& answer = result.value;
  answer.periods = {{optimum.value.misses, optimum.value.loaded_bytes, optimum.value.unloaded_bytes}};
  answer.repeats = true;
  answer.cycle_periods = optimum.value.periods;
  const double cycle = answer.cycle_periods;
  answer.misses_per_period = static_cast<double>(optimum.value.misses) / cycle;
  answer.loaded_bytes_per_period = static_cast<double>(optimum.value.loaded_bytes) / cycle;
  answer.unloaded_bytes_per_period = static_cast<double>(optimum.value.unloaded_bytes) / cycle;
  return result;
}

}  // namespace

std::optional<CachePolicy> CachePolicyFromName(std::string_view name) {
  for (const auto& [policy, known] : kNames) {
    if (known == name) {
      return policy;
    }
  }
  return std::nullopt;
}

std::string_view NameOf(CachePolicy policy) {
  for (const auto& [known, name] : kNames) {
    if (known == policy) {
      return name;
    }
  }
  return "";
}

PlanInput CacheInput(const CacheQuestion& question) {
  PlanInput input;
  input.facet_bytes = question.facet_bytes;
  input.trace = question.trace;
  for (TraceEntry& entry : input.trace.entries) {
    entry.compute_seconds = 1;
  }
  input.budget_bytes = question.capacity_bytes;
  input.most_cycle_periods = question.most_cycle_periods;
  input.fewest_bytes = true;
  double total = 1;
  for (const uint64_t bytes : question.facet_bytes) {
    total += static_cast<double>(bytes);
  }
  const double rate = kAmpleLink * total;
  input.link = {rate, rate, rate, rate};
  return input;
}

Result<CacheAnswer> AskCache(const CacheQuestion& question) {
  Result<CacheAnswer> result;
  result.error = Check(question);
  if (!result.ok()) {
    return result;
  }
  const PlanInput input = CacheInput(question);
  const Result<StepModel> model = BuildStepModel(input);
  if (!model.ok()) {
    result.error = model.error;
    return result;
  }
  if (question.policy == CachePolicy::kOptimum) {
    return Optimal(model.value);
  }
  if (question.policy == CachePolicy::kPlanner) {
    const Result<Plan> plan = MakePlan(input);
    result.error = plan.error;
    return plan.ok() ? FollowPlan(model.value, plan.value, question.most_periods) : result;
  }
  OnDemand on_demand(model.value, question);
  return RunToRepeat(&on_demand, question.most_periods, [&](CachePeriod* period) {
    *period = on_demand.Run();
    return std::string();
  });
}

Result<CacheAnswer> AskCache(const CacheQuestion& question, const Plan& plan) {
  Result<CacheAnswer> result;
  result.error = Check(question);
  if (!result.ok()) {
    return result;
  }
  const Result<StepModel> model = BuildStepModel(CacheInput(question));
  result.error = model.error;
  return model.ok() ? FollowPlan(model.value, plan, question.most_periods) : result;
}

}  // namespace misa::policy
