// Plans of thousands of seeded small traces, followed by a loose executor: nothing that must not happen does.
#include <gtest/gtest.h>

#include <algorithm>

#include "runtime/policy/planner.h"
#include "tests/unit/runtime/policy/plan_replay.h"
#include "tests/unit/runtime/policy/workloads.h"

namespace misa::policy {
namespace {

constexpr uint64_t kTraces = 3000;

TEST(PlannerRandom, PlansAreSafeAtAnySpeedOfTheLink) {
  for (uint64_t seed = 0; seed < kTraces; ++seed) {
    const PlanInput input = RandomTrace(seed);
    const Result<Plan> plan = MakePlan(input);
    ASSERT_TRUE(plan.ok()) << "seed " << seed << ": " << plan.error;
    for (const double speed : {0.2, 0.7, 1.0, 3.0, 1e9}) {
      const ReplayResult replay = Replay(input, plan.value, speed);
      ASSERT_EQ(replay.breach, "") << "seed " << seed << " speed " << speed;
    }
  }
}

TEST(PlannerRandom, OnTheLinkPlannedForNothingIsLoadedOnDemand) {
  for (uint64_t seed = 0; seed < kTraces; ++seed) {
    const PlanInput input = RandomTrace(seed);
    const Result<Plan> plan = MakePlan(input);
    ASSERT_TRUE(plan.ok()) << "seed " << seed << ": " << plan.error;
    const ReplayResult replay = Replay(input, plan.value, 1, 8);
    ASSERT_EQ(replay.demand_loads, 0u) << "seed " << seed;
    ASSERT_EQ(replay.demand_evictions, 0u) << "seed " << seed;
    ASSERT_EQ(replay.loaded_bytes, plan.value.loaded_bytes) << "seed " << seed;
  }
}

TEST(PlannerRandom, ActionsAreInTheOrderInWhichTheyBecomeDue) {
  uint64_t actions = 0;
  for (uint64_t seed = 0; seed < kTraces; ++seed) {
    const Result<Plan> plan = MakePlan(RandomTrace(seed));
    uint32_t last = 0;
    for (const Action& action : plan.value.actions) {
      const uint32_t due = action.position + (action.kind == Action::kUnload ? 1 : 0);
      ASSERT_GE(due, last) << "seed " << seed;
      last = due;
    }
    actions += plan.value.actions.size();
  }
  EXPECT_GT(actions, kTraces) << "the traces have something to plan";
}

// The checks above would see a wrong plan: without one of its loads there is one to make on demand.
TEST(PlannerRandom, TheExecutorNoticesAMissingLoad) {
  int noticed = 0;
  int planned = 0;
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const PlanInput input = RandomTrace(seed);
    Plan plan = MakePlan(input).value;
    const auto load = std::find_if(plan.actions.begin(), plan.actions.end(),
                                   [](const Action& action) { return action.kind == Action::kLoad; });
    if (load == plan.actions.end()) {
      continue;
    }
    plan.actions.erase(load);
    const ReplayResult replay = Replay(input, plan, 1);
    EXPECT_EQ(replay.breach, "") << "seed " << seed << ": a poor plan costs time, not safety";
    ++planned;
    noticed += replay.demand_loads > 0 ? 1 : 0;
  }
  EXPECT_GT(planned, 50);
  EXPECT_GT(noticed * 10, planned * 8);
}

TEST(PlannerRandom, NoPlanBeatsTheBound) {
  for (uint64_t seed = 0; seed < kTraces; ++seed) {
    const PlanInput input = RandomTrace(seed);
    const Result<Plan> plan = MakePlan(input);
    const Result<Bound> bound = LowerBound(input);
    ASSERT_TRUE(plan.ok() && bound.ok()) << "seed " << seed;
    ASSERT_GE(plan.value.loaded_bytes, bound.value.load_bytes) << "seed " << seed;
    ASSERT_GE(plan.value.unloaded_bytes, bound.value.unload_bytes) << "seed " << seed;
    ASSERT_GE(plan.value.step_seconds, bound.value.step_seconds * (1 - 1e-9)) << "seed " << seed;
  }
}

}  // namespace
}  // namespace misa::policy
