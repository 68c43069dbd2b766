// CatchUp: what is left of a plan's actions where uses were left out.
#include "runtime/policy/repair.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>

#include "runtime/policy/trace_kinds.h"
#include "runtime/policy/yardsticks.h"

namespace misa::policy {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

Plan PlanOf(std::vector<Action> actions) {
  Plan plan;
  plan.actions = std::move(actions);
  return plan;
}

uint64_t Never(uint32_t, uint32_t) { return UINT64_MAX; }
uint64_t AtOnce(uint32_t, uint32_t position) { return position; }

TEST(CatchUp, TheLastActionOnAFacetCounts) {
  const Plan plan =
      PlanOf({{0, Action::kLoad, 1}, {1, Action::kUnload, 1}, {1, Action::kUnload, 2}, {2, Action::kLoad, 2}});
  EXPECT_THAT(CatchUp(plan, 0, 4, 3, Never), ElementsAre(Action{1, Action::kUnload, 1}, Action{2, Action::kLoad, 2}));
}

TEST(CatchUp, ALoadForAUseThatWasLeftOutIsNotMade) {
  const Plan plan = PlanOf({{0, Action::kLoad, 1}, {4, Action::kUnload, 1}, {5, Action::kLoad, 1}});
  EXPECT_THAT(CatchUp(plan, 0, 1, 3, Never), IsEmpty());
  EXPECT_THAT(CatchUp(plan, 0, 1, 3, AtOnce), ElementsAre(plan.actions[0])) << "it is used before it leaves";
}

TEST(CatchUp, OtherwiseThePlanStaysAsItIs) {
  const Plan plan =
      PlanOf({{0, Action::kLoad, 1}, {0, Action::kUnload, 2}, {1, Action::kLoad, 3}, {9, Action::kUnload, 3}});
  EXPECT_THAT(CatchUp(plan, 0, 3, 2, AtOnce), ElementsAre(plan.actions[0], plan.actions[1], plan.actions[2]));
  EXPECT_THAT(CatchUp(plan, 2, 2, 2, AtOnce), IsEmpty());
}

// A trainer that leaves out modules by chance (layer drop): loads made with and without the repair, room made by
// leaving out the facet of farthest next use.
struct Loads {
  uint64_t all = 0;
  uint64_t wasted = 0;  // gone again without a use
};

Loads Drive(const CacheQuestion& question, const Plan& plan, uint64_t seed, bool repaired) {
  const auto& entries = question.trace.entries;
  const auto count = static_cast<uint32_t>(entries.size());
  const auto next_use = [&](uint32_t facet, uint32_t position) -> uint64_t {
    for (uint32_t p = position; p < position + 2 * count; ++p) {
      if (entries[p % count].uses[0].facet == facet) {
        return p;
      }
    }
    return UINT64_MAX;
  };
  std::mt19937_64 random(seed);
  std::set<uint32_t> here;
  std::set<uint32_t> unused;
  Loads loads;
  const size_t fit = question.capacity_bytes / question.facet_bytes[0];
  const auto unload = [&](uint32_t facet) {
    here.erase(facet);
    loads.wasted += unused.erase(facet);
  };
  const auto load = [&](uint32_t facet, uint32_t position) {
    while (here.size() >= fit) {
      uint32_t farthest = *here.begin();
      for (const uint32_t other : here) {
        farthest = next_use(other, position) > next_use(farthest, position) ? other : farthest;
      }
      unload(farthest);
    }
    here.insert(facet);
    unused.insert(facet);
    ++loads.all;
  };
  for (int period = 0; period < 40; ++period) {
    size_t next = 0;
    bool skipped = false;
    std::vector<bool> left_out(question.facet_bytes.size());
    for (size_t f = 0; f < left_out.size(); ++f) {
      left_out[f] = random() % 4 == 0;
    }
    for (uint32_t p = 0; p < count; ++p) {
      const uint32_t facet = entries[p].uses[0].facet;
      if (left_out[facet]) {
        skipped = true;
        continue;
      }
      size_t end = next;
      while (end < plan.actions.size() && (plan.actions[end].kind == Action::kLoad ? plan.actions[end].position <= p
                                                                                   : plan.actions[end].position < p)) {
        ++end;
      }
      std::vector<Action> due(plan.actions.begin() + static_cast<std::ptrdiff_t>(next),
                              plan.actions.begin() + static_cast<std::ptrdiff_t>(end));
      if (repaired && skipped) {
        due = CatchUp(plan, next, end, p, next_use);
      }
      skipped = false;
      next = end;
      for (const Action& action : due) {
        if (action.kind == Action::kUnload) {
          unload(action.facet);
        } else if (here.count(action.facet) == 0) {
          load(action.facet, p);
        }
      }
      if (here.count(facet) == 0) {
        load(facet, p);
      }
      unused.erase(facet);
    }
  }
  return loads;
}

TEST(CatchUp, LayersThatAreLeftOutCostFewerLoads) {
  TraceOptions options;
  options.kind = TraceKind::kThreePass;
  options.units = 24;
  CacheQuestion question;
  const GeneratedTrace made = GenerateTrace(options).value;
  question.facet_bytes = made.facet_bytes;
  question.trace = made.trace;
  question.capacity_bytes = 10'000'000;
  question.most_cycle_periods = 1;
  const Plan plan = MakePlan(CacheInput(question)).value;
  Loads with, without;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const Loads repaired = Drive(question, plan, seed, true);
    const Loads plain = Drive(question, plan, seed, false);
    with.all += repaired.all;
    with.wasted += repaired.wasted;
    without.all += plain.all;
    without.wasted += plain.wasted;
  }
  // What was loaded ahead before a module is left out is lost either way.
  EXPECT_LT(with.all, without.all * 98 / 100);
  EXPECT_LT(with.wasted, without.wasted * 9 / 10);
}

}  // namespace
}  // namespace misa::policy
