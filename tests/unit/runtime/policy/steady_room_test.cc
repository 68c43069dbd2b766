#include "runtime/policy/steady_room.h"

#include <gtest/gtest.h>

#include <vector>

namespace misa::policy {
namespace {

// 16 positions of one facet each; the other tensors need room at every second one only.
PlanInput Alternating() {
  PlanInput input;
  input.facet_bytes.assign(16, 100);
  input.budget_bytes = 1000;
  input.link = {1e6, 1e6, 5e5, 5e5};
  for (uint32_t p = 0; p < 16; ++p) {
    input.trace.entries.push_back({{{p, kRead}}, 1.0, p % 2 == 0 ? 400u : 0u});
  }
  return input;
}

TEST(KeepRoomSteady, RaisesADipToItsNeighbours) {
  const PlanInput steady = KeepRoomSteady(Alternating(), 1);
  for (const TraceEntry& entry : steady.trace.entries) EXPECT_EQ(entry.other_bytes, 400u);
}

TEST(KeepRoomSteady, LooksAroundThePeriod) {
  PlanInput input = Alternating();
  for (TraceEntry& entry : input.trace.entries) entry.other_bytes = 0;
  input.trace.entries[0].other_bytes = 300;
  const PlanInput steady = KeepRoomSteady(input, 2);
  for (size_t p = 0; p < 16; ++p) {
    EXPECT_EQ(steady.trace.entries[p].other_bytes, p <= 2 || p >= 14 ? 300u : 0u) << p;
  }
}

TEST(KeepRoomSteady, LeavesRoomForWhatAPositionUses) {
  PlanInput input = Alternating();
  input.facet_bytes[1] = 900;
  input.reserve_bytes = 50;
  const PlanInput steady = KeepRoomSteady(input, 1);
  EXPECT_EQ(steady.trace.entries[1].other_bytes, 50u);
  EXPECT_EQ(steady.trace.entries[3].other_bytes, 400u);
}

TEST(KeepRoomSteady, ChangesNothingWithoutAWindowAndNothingThatIsImpossible) {
  EXPECT_EQ(KeepRoomSteady(Alternating(), 0).trace.entries[1].other_bytes, 0u);
  PlanInput input = Alternating();
  input.budget_bytes = 0;
  EXPECT_EQ(KeepRoomSteady(input, 1).trace.entries[1].other_bytes, 0u);
  input.trace.entries.clear();
  EXPECT_TRUE(KeepRoomSteady(input, 1).trace.entries.empty());
}

TEST(MakeSteadyPlan, LoadsNothingIntoRoomThatIsNeededAgainAtOnce) {
  const PlanInput input = Alternating();
  const Result<Plan> plan = MakeSteadyPlan(input);
  ASSERT_TRUE(plan.ok()) << plan.error;
  // 600 bytes are steadily free: ten of sixteen facets are away at any time, and come once a period.
  EXPECT_GE(plan.value.loaded_bytes, 1000u);
  EXPECT_LT(plan.value.stall_seconds, 0.2);
}

TEST(MakeSteadyPlan, TakesThePlainPlanWhereSteadyRoomWouldStall) {
  PlanInput input = Alternating();
  // The link is just fast enough for what a plan that uses every dip has to move.
  input.link = {12, 1e9, 12, 1e9};
  const Result<Plan> steady = MakeSteadyPlan(input);
  const Result<Plan> plain = MakePlan(input);
  ASSERT_TRUE(steady.ok() && plain.ok());
  EXPECT_LE(steady.value.step_seconds, plain.value.step_seconds * 1.01);
}

TEST(MakeSteadyPlan, RefusesWhatMakePlanRefuses) {
  PlanInput input = Alternating();
  input.budget_bytes = 300;
  const Result<Plan> plan = MakeSteadyPlan(input);
  EXPECT_FALSE(plan.ok());
  EXPECT_EQ(plan.error, MakePlan(input).error);
}

}  // namespace
}  // namespace misa::policy
