// What MakePlan and LowerBound refuse, and in which words.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/policy/planner.h"

namespace misa::policy {
namespace {

using ::testing::HasSubstr;

PlanInput Good() {
  PlanInput input;
  input.facet_bytes = {100, 50, 70};
  input.trace.entries = {{{{0, kRead}, {1, kRead}}, 1, 10}, {{{2, kRead | kWrite}}, 2, 20}, {{{0, kRead}}, 0, 30}};
  input.budget_bytes = 200;
  input.reserve_bytes = 5;
  input.link = {10, 20, 8, 9};
  return input;
}

void ExpectRefused(const PlanInput& input, const std::string& part) {
  const Result<Plan> plan = MakePlan(input);
  EXPECT_THAT(plan.error, HasSubstr(part));
  EXPECT_TRUE(plan.value.actions.empty());
  EXPECT_EQ(LowerBound(input).error, plan.error);
  EXPECT_EQ(plan.error.back(), '.');
}

TEST(PlannerInput, AcceptsAGoodOne) {
  EXPECT_EQ(MakePlan(Good()).error, "");
  EXPECT_EQ(LowerBound(Good()).error, "");
}

TEST(PlannerInput, SmallestBudgetIsWhatTheFullestPositionNeeds) {
  EXPECT_EQ(SmallestBudget(Good()), 100u + 50 + 10 + 5);
  PlanInput input = Good();
  input.trace.entries[0].uses.push_back({0, kWrite});
  EXPECT_EQ(SmallestBudget(input), 165u) << "a facet used twice at one position is there once";
  input.trace.entries[2].other_bytes = std::numeric_limits<uint64_t>::max() - 1;
  EXPECT_EQ(SmallestBudget(input), std::numeric_limits<uint64_t>::max());
}

TEST(PlannerInput, PlansWithTheSmallestBudgetAndRefusesOneByteLess) {
  PlanInput input = Good();
  input.budget_bytes = 165;
  EXPECT_EQ(MakePlan(input).error, "");
  input.budget_bytes = 164;
  ExpectRefused(input,
                "Position 0 needs 165 bytes at once (150 of facets, 10 of other tensors, 5 of reserve) and the budget is "
                "164; the smallest budget that works is 165 bytes.");
}

TEST(PlannerInput, PinnedFacetsStayAndAreNotPlanned) {
  PlanInput input = Good();
  input.budget_bytes = 190;
  const Result<Plan> free = MakePlan(input);
  ASSERT_EQ(free.error, "");
  const auto moves = [](const Plan& plan, uint32_t facet) {
    return std::any_of(plan.actions.begin(), plan.actions.end(), [&](const Action& a) { return a.facet == facet; });
  };
  ASSERT_TRUE(moves(free.value, 0) || moves(free.value, 1)) << "something has to go: 220 and other tensors do not fit";
  input.pinned = {1, 1};
  const Result<Plan> pinned = MakePlan(input);
  ASSERT_EQ(pinned.error, "");
  EXPECT_FALSE(moves(pinned.value, 1));
  EXPECT_TRUE(moves(pinned.value, 0));
  input.pinned = {0, 1, 2};
  input.budget_bytes = 300;
  const Result<Plan> all = MakePlan(input);
  ASSERT_EQ(all.error, "");
  EXPECT_TRUE(all.value.actions.empty());
}

TEST(PlannerInput, RefusesPinsThatCannotBe) {
  PlanInput input = Good();
  input.pinned = {3};
  EXPECT_THAT(MakePlan(input).error, HasSubstr("Facet 3 is to stay on the device"));
  input.pinned = {0, 1, 2};
  EXPECT_THAT(MakePlan(input).error, HasSubstr("take 220 bytes and the budget is 200"));
}

TEST(PlannerInput, RefusesTimesThatAreNone) {
  for (const double seconds : {std::nan(""), std::numeric_limits<double>::infinity(), -1.0}) {
    PlanInput input = Good();
    input.trace.entries[1].compute_seconds = seconds;
    ExpectRefused(input, "Position 1 has a compute time of");
  }
}

TEST(PlannerInput, RefusesRatesThatAreNone) {
  for (const double rate : {std::nan(""), std::numeric_limits<double>::infinity(), -1.0, 0.0}) {
    PlanInput input = Good();
    input.link.load = rate;
    ExpectRefused(input, "The link's load rate must be a finite number");
    input = Good();
    input.link.unload = rate;
    ExpectRefused(input, "The link's unload rate");
    input = Good();
    input.link.duplex_load = rate;
    ExpectRefused(input, "The link's duplex load rate");
    input = Good();
    input.link.duplex_unload = rate;
    ExpectRefused(input, "The link's duplex unload rate");
  }
}

TEST(PlannerInput, RefusesFacetsThatAreNone) {
  PlanInput input = Good();
  input.facet_bytes[1] = 0;
  ExpectRefused(input, "Facet 1 has a size of 0 bytes");
  input = Good();
  input.trace.entries[2].uses[0].facet = 3;
  ExpectRefused(input, "Position 2 uses facet 3, and there are 3 facets.");
  input = Good();
  input.facet_bytes[0] = std::numeric_limits<uint64_t>::max();
  ExpectRefused(input, "2^60");
}

TEST(PlannerInput, RefusesAccessesThatAreNone) {
  for (const uint8_t access : {0, 16, 255}) {
    PlanInput input = Good();
    input.trace.entries[0].uses[1].access = access;
    ExpectRefused(input, "Position 0 uses facet 1 with the unknown access " + std::to_string(access));
  }
}

TEST(PlannerInput, RefusesAnEmptyTrace) {
  PlanInput input = Good();
  input.trace.entries.clear();
  ExpectRefused(input, "no positions");
  EXPECT_EQ(SmallestBudget(input), 5u);
}

TEST(PlannerInput, PlansAStepThatUsesNothing) {
  PlanInput input = Good();
  for (TraceEntry& entry : input.trace.entries) {
    entry.uses.clear();
  }
  const Result<Plan> plan = MakePlan(input);
  ASSERT_TRUE(plan.ok()) << plan.error;
  EXPECT_TRUE(plan.value.actions.empty());
  EXPECT_DOUBLE_EQ(plan.value.step_seconds, 3);
}

TEST(PlannerInput, PlansNothingWhereAllFits) {
  PlanInput input = Good();
  input.budget_bytes = std::numeric_limits<uint64_t>::max();
  const Result<Plan> plan = MakePlan(input);
  ASSERT_TRUE(plan.ok()) << plan.error;
  EXPECT_TRUE(plan.value.actions.empty());
  EXPECT_EQ(plan.value.stall_seconds, 0);
  EXPECT_EQ(LowerBound(input).value.load_bytes, 0u);
}

TEST(PlannerInput, IsDeterministic) {
  const Result<Plan> a = MakePlan(Good());
  const Result<Plan> b = MakePlan(Good());
  EXPECT_EQ(a.value.actions, b.value.actions);
  EXPECT_EQ(a.value.step_seconds, b.value.step_seconds);
}

}  // namespace
}  // namespace misa::policy
