// Plans of thousands of seeded small traces, followed by a loose executor: nothing that must not happen does.
#include <gtest/gtest.h>

#include <algorithm>

#include "runtime/policy/planner.h"
#include "tests/unit/runtime/policy/plan_replay.h"
#include "tests/unit/runtime/policy/workloads.h"

namespace misa::policy {
namespace {

constexpr uint64_t kTraces = 4000;

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
