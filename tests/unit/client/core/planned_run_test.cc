// The planner's plan for a recorded step, executed: what it promises happens.
#include <gtest/gtest.h>

#include <map>

#include "runtime/policy/planner.h"
#include "tests/unit/client/core/executor_rig.h"

namespace misa::testing {
namespace {

using policy::kCreate;
using policy::kRead;
using policy::kWrite;

constexpr uint64_t kChunk = 64 << 10;
constexpr uint32_t kLayers = 8;
// A prefetch leaves this much of the budget to tensors that come unasked.
constexpr uint64_t kSlack = 4 << 20;

class Training {
 public:
  explicit Training(uint64_t budget_chunks)
      : budget(budget_chunks * kChunk),
        rig({.chunk_bytes = kChunk,
             .space_bytes = 2 * budget_chunks * kChunk,
             .disk_bytes = kLayers * 4 * kChunk * 2,
             .budget_bytes = budget_chunks * kChunk + kSlack}) {
    for (uint32_t i = 0; i < kLayers; ++i) {
      weights.push_back(rig.Add(1, FacetKind::kWeights));
      gradients.push_back(rig.Add(1, FacetKind::kGradients));
      optimizer.push_back(rig.Add(2, FacetKind::kOptimizer));
    }
  }

  // Real compute takes time in which facets leave and arrive; here it waits for what the plan has under way instead.
  void LetArrive(const std::vector<policy::Use>& uses) {
    if (!planned) return;
    EXPECT_TRUE(rig.executor->Drain());
    for (const auto& use : uses) {
      if (use.access & kCreate) continue;
      Rig::Until(
          [&] {
            const FacetState state = rig.state(use.facet);
            return state == FacetState::kReady || state == FacetState::kDevice;
          },
          2);
    }
  }

  void Position(const std::vector<policy::Use>& uses, uint64_t pattern) {
    LetArrive(uses);
    ASSERT_EQ(rig.executor->Use(uses.data(), uses.size(), true), "");
    for (const auto& use : uses) {
      rig.owner.BeginTouch(use.facet);
      if (!(use.access & kCreate)) {
        ASSERT_TRUE(rig.Holds(use.facet, contents[use.facet])) << use.facet;
      }
      if (use.access & kWrite) rig.Fill(use.facet, contents[use.facet] = pattern * 1000 + use.facet);
      rig.owner.EndTouch(use.facet);
    }
    rig.executor->EndUse(uses.data(), uses.size());
  }

  void Step(uint64_t number) {
    for (uint32_t i = 0; i < kLayers; ++i) ASSERT_NO_FATAL_FAILURE(Position({{weights[i], kRead}}, number));
    for (uint32_t i = kLayers; i-- > 0;) {
      ASSERT_NO_FATAL_FAILURE(Position({{weights[i], kRead}, {gradients[i], kCreate | kWrite}}, number));
    }
    for (uint32_t i = 0; i < kLayers; ++i) {
      ASSERT_NO_FATAL_FAILURE(
          Position({{weights[i], kRead | kWrite}, {gradients[i], kRead}, {optimizer[i], kRead | kWrite}}, number));
      rig.Discard(gradients[i]);
    }
    rig.executor->EndStep();
  }

  // An evaluation: forward alone.
  void Forward(uint64_t number) {
    for (uint32_t i = 0; i < kLayers; ++i) ASSERT_NO_FATAL_FAILURE(Position({{weights[i], kRead}}, number));
    rig.executor->EndStep();
  }

  std::string Plan(uint32_t most_cycle_periods = 1, double chunks_per_second = 4) {
    policy::PlanInput input;
    input.most_cycle_periods = most_cycle_periods;
    input.fewest_bytes = most_cycle_periods > 1;
    for (size_t i = 0; i < rig.executor->facet_count(); ++i) {
      input.facet_bytes.push_back(rig.facet(static_cast<uint32_t>(i)).bytes);
    }
    input.trace = *rig.steps.back().trace;
    // The clock of this machine must not decide what the plan is: compute hides every load.
    for (auto& entry : input.trace.entries) {
      entry.compute_seconds = 1;
      entry.other_bytes = 0;
    }
    input.budget_bytes = budget;
    const double rate = chunks_per_second * kChunk;
    input.link = {rate, rate, rate, rate};
    auto plan = policy::MakePlan(input);
    if (!plan.ok()) return plan.error;
    EXPECT_GT(plan.value.loaded_bytes, 0u);
    loaded_bytes = plan.value.loaded_bytes;
    periods = plan.value.periods;
    planned = true;
    return rig.executor->OfferPlan(std::make_shared<policy::Plan>(plan.value), 1, rig.steps.back().trace_digest);
  }

  const uint64_t budget;
  Rig rig;
  std::vector<uint32_t> weights, gradients, optimizer;
  std::map<uint32_t, uint64_t> contents;
  uint64_t loaded_bytes = 0;
  uint32_t periods = 0;
  bool planned = false;
};

class PlannedRun : public ::testing::TestWithParam<uint64_t> {};

TEST_P(PlannedRun, HasNoDemandLoadsFromTheThirdPeriodOn) {
  Training training(GetParam());
  for (uint32_t i = 0; i < kLayers; ++i) {
    for (const uint32_t id : {training.weights[i], training.optimizer[i]}) {
      ASSERT_EQ(training.rig.Create(id, id), "");
      training.contents[id] = id;
    }
  }
  training.rig.executor->ResetTrace();
  constexpr size_t kSteps = 16;
  for (uint64_t step = 0; step < kSteps; ++step) {
    ASSERT_NO_FATAL_FAILURE(training.Step(step));
    if (step == 2) {
      ASSERT_EQ(training.Plan(), "");
    }
  }
  ASSERT_EQ(training.rig.Check(training.weights[0], training.contents[training.weights[0]]), "");
  ASSERT_EQ(training.rig.steps.size(), kSteps);
  // The plan is offered in step 3, in force from step 4 on; that step finds what the old one left behind.
  uint64_t loaded = 0;
  for (size_t i = 5; i < kSteps; ++i) {
    const StepSummary& summary = training.rig.steps[i];
    EXPECT_EQ(summary.plan_version, 1u);
    EXPECT_EQ(summary.counters.loads_demand, 0u) << "step " << i;
    EXPECT_GT(summary.counters.loads_prefetch, 0u) << "step " << i;
    EXPECT_EQ(summary.counters.departures, 0u) << "step " << i;
    EXPECT_EQ(summary.trace_digest, training.rig.steps[4].trace_digest);
    loaded += summary.counters.loaded_bytes_prefetch;
  }
  // No more than planned, a period; one that begins early counts to the step before.
  EXPECT_LE(loaded, (kSteps - 5 + 1) * training.loaded_bytes);
  EXPECT_LE(training.rig.meter.peak_bytes(), training.budget + kSlack);
}

// Eight layers in forward order of which six fit: a plan of one period loads three of them in each, the least where the
// same ones go in every period; in a cycle others take their turns.
TEST(PlannedCycle, OfPeriodsLoadsLessThanAnyOneOfThem) {
  Training training(6);
  for (const uint32_t id : training.weights) {
    ASSERT_EQ(training.rig.Create(id, id), "");
    training.contents[id] = id;
  }
  training.rig.executor->ResetTrace();
  uint64_t one_period = 0;
  constexpr size_t kSteps = 40;
  for (uint64_t step = 0; step < kSteps; ++step) {
    ASSERT_NO_FATAL_FAILURE(training.Forward(step));
    if (step == 2) {
      ASSERT_EQ(training.Plan(1, 4000), "");
      one_period = training.loaded_bytes;
      ASSERT_EQ(training.Plan(8, 4000), "");
      ASSERT_GT(training.periods, 1u);
      ASSERT_LT(training.loaded_bytes, one_period);
      // On so fast a link each load starts at its own use, so there is nothing to let arrive.
      training.planned = false;
    }
  }
  ASSERT_EQ(training.rig.Check(training.weights[0], training.contents[training.weights[0]]), "");
  // The first cycle finds what the steps before left behind.
  uint64_t loaded = 0;
  const size_t first = 5 + 2 * training.periods;
  for (size_t i = first; i < training.rig.steps.size(); ++i) {
    const StepSummary& summary = training.rig.steps[i];
    EXPECT_EQ(summary.counters.departures, 0u) << "step " << i;
    EXPECT_EQ(summary.plan_version, 1u);
    loaded += summary.counters.loaded_bytes_prefetch + summary.counters.loaded_bytes_demand;
  }
  // No more than planned, a period; a cycle that is cut off counts as a whole.
  EXPECT_LE(loaded, (kSteps - first + training.periods) * training.loaded_bytes);
  EXPECT_LT(loaded, (kSteps - first) * one_period);
}

TEST(PlannedSection, AnEvaluationBetweenStepsHasNoDemandLoadsFromItsThirdRoundOn) {
  Training training(12);
  Rig& rig = training.rig;
  for (uint32_t i = 0; i < kLayers; ++i) {
    for (const uint32_t id : {training.weights[i], training.optimizer[i]}) {
      ASSERT_EQ(rig.Create(id, id), "");
      training.contents[id] = id;
    }
  }
  rig.executor->ResetTrace();
  uint64_t number = 0;
  const auto steps = [&](uint64_t count) {
    for (uint64_t i = 0; i < count; ++i) {
      ASSERT_NO_FATAL_FAILURE(training.Step(number));
      if (number++ == 2) {
        ASSERT_EQ(training.Plan(), "");
      }
    }
  };
  ASSERT_NO_FATAL_FAILURE(steps(7));

  policy::PlanInput input;
  for (size_t i = 0; i < rig.executor->facet_count(); ++i) {
    input.facet_bytes.push_back(rig.facet(static_cast<uint32_t>(i)).bytes);
  }
  for (const uint32_t id : training.weights) input.trace.entries.push_back({{{id, kRead}}, 1, 0});
  input.budget_bytes = 6 * kChunk;  // of eight weights
  const double rate = 4.0 * kChunk;
  input.link = {rate, rate, rate, rate};
  const auto plan = policy::MakePlan(input);
  ASSERT_TRUE(plan.ok()) << plan.error;
  ASSERT_GT(plan.value.loaded_bytes, 0u);
  rig.executor->SetSection(2, std::make_shared<policy::Trace>(input.trace), std::make_shared<policy::Plan>(plan.value));

  constexpr int kRounds = 8;
  ExecutorCounters settled;
  training.planned = false;  // coming and going, what the other plan left behind is loaded on demand
  for (int round = 0; round < kRounds; ++round) {
    if (round == 2) {
      training.planned = true;
      settled = rig.executor->totals();
    }
    for (const uint32_t id : training.weights) ASSERT_NO_FATAL_FAILURE(training.Position({{id, kRead}}, number));
  }
  const ExecutorCounters after = rig.executor->totals();
  EXPECT_EQ(after.loads_demand, settled.loads_demand);
  EXPECT_GT(after.loads_prefetch, settled.loads_prefetch);
  EXPECT_LE(after.loaded_bytes_prefetch - settled.loaded_bytes_prefetch, (kRounds - 2 + 1) * plan.value.loaded_bytes);
  training.planned = false;
  ASSERT_NO_FATAL_FAILURE(steps(1));
  training.planned = true;
  ASSERT_NO_FATAL_FAILURE(steps(5));
  ASSERT_EQ(rig.Check(training.weights[0], training.contents[training.weights[0]]), "");
  ASSERT_EQ(rig.steps.size(), 13u);
  EXPECT_EQ(rig.steps[7].counters.departures, 0u);
  EXPECT_NE(rig.steps[7].trace_digest, rig.steps[6].trace_digest);
  for (size_t i = 9; i < 13; ++i) {
    EXPECT_EQ(rig.steps[i].trace_digest, rig.steps[6].trace_digest);
    EXPECT_EQ(rig.steps[i].counters.loads_demand, 0u) << "step " << i;
    EXPECT_EQ(rig.steps[i].counters.departures, 0u) << "step " << i;
    EXPECT_EQ(rig.steps[i].plan_version, 1u);
  }
  EXPECT_LE(rig.meter.peak_bytes(), training.budget + kSlack);
}

// All there is takes 8 * 4 chunks; a position takes 4 at most.
INSTANTIATE_TEST_SUITE_P(Budgets, PlannedRun, ::testing::Values(12, 16, 20, 26));

}  // namespace
}  // namespace misa::testing
