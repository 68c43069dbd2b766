// Recomputation and int8 copies: taken up where they shorten the step, stated in the plan, and right when executed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/policy/planner.h"
#include "tests/unit/runtime/policy/plan_replay.h"
#include "tests/unit/runtime/policy/workloads.h"

namespace misa::policy {
namespace {

using ::testing::HasSubstr;

size_t Count(const Plan& plan, Action::Kind kind) {
  return static_cast<size_t>(std::count_if(plan.actions.begin(), plan.actions.end(),
                                           [&](const Action& action) { return action.kind == kind; }));
}

// Forward and backward over frozen weights, and a link that takes far longer than the compute.
PlanInput Frozen(double rate) {
  PlanInput input;
  for (uint32_t i = 0; i < 16; ++i) {
    input.facet_bytes.push_back(100);
  }
  for (uint32_t i = 0; i < 32; ++i) {
    input.trace.entries.push_back({{{i < 16 ? i : 31 - i, kRead}}, 1, 0});
  }
  input.budget_bytes = 800;
  input.link = {rate, rate, rate, rate};
  return input;
}

void OfferAll(PlanInput* input, Offer::Kind kind, double seconds, uint64_t bytes) {
  for (uint32_t facet = 0; facet < input->facet_bytes.size(); ++facet) {
    input->offers.push_back({facet, kind, seconds, bytes});
  }
}

Plan Make(const PlanInput& input) {
  const Result<Plan> plan = MakePlan(input);
  EXPECT_TRUE(plan.ok()) << plan.error;
  return plan.value;
}

void ExpectRuns(const PlanInput& input, const Plan& plan) {
  const ReplayResult replay = Replay(input, plan, 1, 6);
  EXPECT_EQ(replay.breach, "");
  EXPECT_EQ(replay.demand_loads, 0u);
  EXPECT_NEAR(replay.seconds, plan.step_seconds, 0.01 * plan.step_seconds);
}

TEST(Offers, CheapRecomputationTakesThePlaceOfASlowLink) {
  PlanInput input = Frozen(20);  // 5 seconds a load
  const Plan swapped = Make(input);
  OfferAll(&input, Offer::kRecompute, 0.5, 0);
  const Plan plan = Make(input);
  EXPECT_LT(plan.step_seconds, 0.7 * swapped.step_seconds);
  EXPECT_LT(plan.loaded_bytes, swapped.loaded_bytes);
  EXPECT_GT(Count(plan, Action::kRecompute), 0u);
  EXPECT_EQ(Count(plan, Action::kRecompute), Count(plan, Action::kDrop));
  EXPECT_DOUBLE_EQ(plan.offer_seconds, 0.5 * static_cast<double>(Count(plan, Action::kRecompute)));
  ExpectRuns(input, plan);
}

TEST(Offers, OnlyAsMuchIsRecomputedAsTheLinkCannotBring) {
  PlanInput input = Frozen(40);
  OfferAll(&input, Offer::kRecompute, 1.5, 0);
  const Plan plan = Make(input);
  // All 16 absences made anew would take 24 s more, none would leave the compute waiting for 16 loads.
  EXPECT_GT(Count(plan, Action::kRecompute), 0u);
  EXPECT_GT(Count(plan, Action::kLoad), 0u);
  ExpectRuns(input, plan);
}

TEST(Offers, AreLeftWhereTheLinkIsFastOrTheComputeDear) {
  PlanInput input = Frozen(1000);
  OfferAll(&input, Offer::kRecompute, 0.1, 0);
  OfferAll(&input, Offer::kInt8, 0.1, 30);
  Plan plan = Make(input);
  EXPECT_EQ(plan.offer_seconds, 0);
  EXPECT_EQ(Count(plan, Action::kRecompute) + Count(plan, Action::kQuantize), 0u);
  input = Frozen(20);
  OfferAll(&input, Offer::kRecompute, 50, 0);
  plan = Make(input);
  EXPECT_EQ(Count(plan, Action::kRecompute), 0u);
}

TEST(Offers, AnInt8CopyStaysWhereWholeFacetsDoNotFit) {
  PlanInput input = Frozen(20);
  const Plan swapped = Make(input);
  OfferAll(&input, Offer::kInt8, 0.2, 26);
  const Plan plan = Make(input);
  EXPECT_LT(plan.step_seconds, 0.7 * swapped.step_seconds);
  EXPECT_GT(Count(plan, Action::kQuantize), 0u);
  EXPECT_EQ(Count(plan, Action::kQuantize), Count(plan, Action::kDequantize));
  ExpectRuns(input, plan);
}

TEST(Offers, DirtyContentIsCopiedDownBeforeItIsQuantized) {
  PlanInput input = Frozen(20);
  for (uint32_t i = 16; i < 32; ++i) {
    input.trace.entries[i].uses[0].access = kRead | kWrite;
  }
  OfferAll(&input, Offer::kInt8, 0.2, 26);
  const Plan plan = Make(input);
  EXPECT_GT(Count(plan, Action::kQuantize), 0u);
  EXPECT_GT(plan.unloaded_bytes, 0u);
  ExpectRuns(input, plan);
}

TEST(Offers, WhatIsRecomputedFromDirtyContentIsDirty) {
  // Written, made anew, and swapped later: what the tier below holds would be old.
  for (uint64_t seed = 0; seed < 300; ++seed) {
    PlanInput input = RandomTrace(seed);
    input.link.load /= 10;
    input.link.unload /= 10;
    input.link.duplex_load /= 10;
    input.link.duplex_unload /= 10;
    for (uint32_t facet = 0; facet < input.facet_bytes.size(); ++facet) {
      input.offers.push_back({facet, Offer::kRecompute, 0.5, 0});
      if (input.facet_bytes[facet] > 3) {
        input.offers.push_back({facet, Offer::kInt8, 0.3, input.facet_bytes[facet] / 3});
      }
    }
    const Result<Plan> plan = MakePlan(input);
    ASSERT_TRUE(plan.ok()) << "seed " << seed << ": " << plan.error;
    const ReplayResult replay = Replay(input, plan.value, 1, 6);
    ASSERT_EQ(replay.breach, "") << "seed " << seed;
    input.offers.clear();
    ASSERT_LE(plan.value.step_seconds, MakePlan(input).value.step_seconds) << "seed " << seed;
  }
}

TEST(Offers, RefusesWhatIsNoOffer) {
  const auto refusal = [](const Offer& offer) {
    PlanInput input = Frozen(20);
    input.offers = {offer};
    const Result<Plan> plan = MakePlan(input);
    EXPECT_TRUE(plan.value.actions.empty());
    return plan.error;
  };
  EXPECT_THAT(refusal({99, Offer::kRecompute, 1, 0}), HasSubstr("none of the 16 facets"));
  EXPECT_THAT(refusal({1, Offer::kRecompute, -1, 0}), HasSubstr("finite and at least 0"));
  EXPECT_THAT(refusal({1, Offer::kRecompute, std::nan(""), 0}), HasSubstr("finite"));
  EXPECT_THAT(refusal({1, Offer::kInt8, 1, 0}), HasSubstr("at least 1, and less than all"));
  EXPECT_THAT(refusal({1, Offer::kInt8, 1, 100}), HasSubstr("less than all"));
  EXPECT_THAT(refusal({1, static_cast<Offer::Kind>(7), 1, 10}), HasSubstr("unknown kind 7"));
}

}  // namespace
}  // namespace misa::policy
