// Training steps at full size: what their plans cost beside the bound. The limits are what was reached, with a little
// room.
#include <gtest/gtest.h>

#include <algorithm>

#include "runtime/policy/planner.h"
#include "tests/unit/runtime/policy/plan_replay.h"
#include "tests/unit/runtime/policy/workloads.h"

namespace misa::policy {
namespace {

struct Limits {
  double step_ratio = 1;    // to the bound
  double load_ratio = 1;
  double unload_ratio = 1;
};

void ExpectWithin(const PlanInput& input, const Limits& limits) {
  const Result<Plan> plan = MakePlan(input);
  const Result<Bound> bound = LowerBound(input);
  ASSERT_TRUE(plan.ok()) << plan.error;
  ASSERT_TRUE(bound.ok()) << bound.error;
  EXPECT_LE(plan.value.step_seconds, bound.value.step_seconds * limits.step_ratio);
  EXPECT_LE(static_cast<double>(plan.value.loaded_bytes),
            static_cast<double>(bound.value.load_bytes) * limits.load_ratio);
  EXPECT_LE(static_cast<double>(plan.value.unloaded_bytes),
            static_cast<double>(bound.value.unload_bytes) * limits.unload_ratio);
  EXPECT_GE(plan.value.loaded_bytes, bound.value.load_bytes);
  EXPECT_GE(plan.value.unloaded_bytes, bound.value.unload_bytes);
  // The executor gets what the plan promised.
  const ReplayResult replay = Replay(input, plan.value, 1);
  EXPECT_EQ(replay.breach, "");
  EXPECT_EQ(replay.demand_loads, 0u);
  EXPECT_NEAR(replay.seconds, plan.value.step_seconds, 0.005 * plan.value.step_seconds);
  // A link that is slower or faster than the profile breaks nothing; a quarter more speed costs nothing.
  for (const double speed : {0.3, 0.8, 1.25, 10.0}) {
    EXPECT_EQ(Replay(input, plan.value, speed).breach, "") << speed;
  }
  EXPECT_LE(Replay(input, plan.value, 1.25).seconds, plan.value.step_seconds * 1.005);
}

TrainingStep WithBudget(uint64_t bytes) {
  TrainingStep step;
  step.budget_bytes = bytes;
  return step;
}

TEST(PlannerWorkload, DeferredWithoutStall) {
  ExpectWithin(Deferred(WithBudget(1'200'000'000)), {1.0005, 1.08, 1.08});
}

TEST(PlannerWorkload, DeferredInATightBudget) {
  ExpectWithin(Deferred(WithBudget(900'000'000)), {1.0005, 1.07, 1.07});
}

TEST(PlannerWorkload, InBackwardWithoutStall) {
  ExpectWithin(InBackward(WithBudget(1'200'000'000)), {1.0005, 1.07, 1.08});
}

TEST(PlannerWorkload, InBackwardInATightBudget) {
  ExpectWithin(InBackward(WithBudget(900'000'000)), {1.0005, 1.08, 1.07});
}

// The optimizer's pass has to move nearly everything within its own short time; the bound does not know the duplex rate
// of a single pass.
TEST(PlannerWorkload, Eager) {
  ExpectWithin(Eager(WithBudget(1'200'000'000)), {1.045, 1.22, 1.25});
}

TEST(PlannerWorkload, EagerInATightBudget) {
  ExpectWithin(Eager(WithBudget(900'000'000)), {1.05, 1.25, 1.22});
}

TEST(PlannerWorkload, AThousandModules) {
  TrainingStep step;
  step.matrices = 1000;
  step.weight_bytes = step.weight_bytes * 24 / 1000;
  ExpectWithin(Deferred(step), {1.002, 1.01, 1.01});
  ExpectWithin(InBackward(step), {1.002, 1.01, 1.01});
  ExpectWithin(Eager(step), {1.035, 1.01, 1.01});
}

TEST(PlannerWorkload, TheBudgetOfOnePosition) {
  const PlanInput input = Deferred(WithBudget(0));
  ExpectWithin(Deferred(WithBudget(SmallestBudget(input))), {1.35, 1.1, 1.1});
}

TEST(PlannerWorkload, OtherTensorsThatComeAtOnce) {
  // Everything fits until one position takes nearly the whole budget for its other tensors.
  PlanInput input = Deferred(WithBudget(4'400'000'000));
  const size_t turn = input.trace.entries.size() / 2;
  input.trace.entries[turn].other_bytes = 3'900'000'000;
  ExpectWithin(input, {1.1, 1.1, 1.1});
}

}  // namespace
}  // namespace misa::policy
