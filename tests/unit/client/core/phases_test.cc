// Steps that take turns, executed: each finds on the device what its own plan counts on.
#include <gtest/gtest.h>

#include <map>

#include "runtime/policy/planner.h"
#include "runtime/sim/random.h"
#include "tests/unit/client/core/executor_rig.h"

namespace misa::testing {
namespace {

using policy::kRead;
using policy::kWrite;

constexpr uint64_t kChunk = 4096;
constexpr uint32_t kTrunk = 2;
constexpr uint32_t kHead = 3;
constexpr uint32_t kTasks = 2;
// Of the five facets that a task uses, one has to go and come back in each step.
constexpr uint64_t kFit = 4;

class TasksInTurn : public ::testing::Test {
 protected:
  void SetUp() override {
    for (uint32_t i = 0; i < kTrunk + kTasks * kHead; ++i) {
      const uint32_t id = rig.Add(1);
      ASSERT_EQ(rig.Create(id, id), "");
      contents[id] = id;
    }
    rig.executor->ResetTrace();
  }

  // Real compute takes time in which facets arrive; here it waits for what is under way instead.
  void LetArrive(uint32_t id) {
    if (!planned) return;
    EXPECT_TRUE(rig.executor->Drain());
    Rig::Until([&] { return rig.state(id) == FacetState::kReady || rig.state(id) == FacetState::kDevice; }, 0.3);
  }

  void Use(uint32_t id, bool write) {
    LetArrive(id);
    const policy::Use use{id, static_cast<uint8_t>(write ? kRead | kWrite : kRead)};
    ASSERT_EQ(rig.executor->Use(&use, 1, true), "");
    rig.owner.BeginTouch(id);
    ASSERT_TRUE(rig.Holds(id, contents[id])) << id;
    if (write) rig.Fill(id, contents[id] = ++pattern);
    rig.owner.EndTouch(id);
    rig.executor->EndUse(&use, 1);
  }

  // Forward and backward over the trunk and the task's head.
  void Step(uint32_t task) {
    std::vector<uint32_t> order;
    for (uint32_t i = 0; i < kTrunk; ++i) order.push_back(i);
    for (uint32_t i = 0; i < kHead; ++i) order.push_back(kTrunk + task * kHead + i);
    for (const uint32_t id : order) ASSERT_NO_FATAL_FAILURE(Use(id, false));
    for (auto id = order.rbegin(); id != order.rend(); ++id) ASSERT_NO_FATAL_FAILURE(Use(*id, true));
    rig.executor->EndStep();
  }

  // Of each trace that the last steps had.
  void OfferPlans(size_t steps) {
    std::map<uint64_t, std::shared_ptr<const policy::Trace>> traces;
    for (size_t i = rig.steps.size() - steps; i < rig.steps.size(); ++i) {
      traces[rig.steps[i].trace_digest] = rig.steps[i].trace;
    }
    ASSERT_EQ(traces.size(), kTasks);
    uint64_t version = 0;
    for (const auto& [digest, trace] : traces) {
      policy::PlanInput input;
      input.facet_bytes.assign(rig.executor->facet_count(), kChunk);
      input.trace = *trace;
      for (auto& entry : input.trace.entries) {
        entry.compute_seconds = 1;
        entry.other_bytes = 0;
      }
      input.budget_bytes = kFit * kChunk;
      input.link = {4 * kChunk, 4 * kChunk, 4 * kChunk, 4 * kChunk};
      const auto plan = policy::MakePlan(input);
      ASSERT_TRUE(plan.ok()) << plan.error;
      ASSERT_EQ(rig.executor->OfferPlan(std::make_shared<policy::Plan>(plan.value), ++version, digest), "");
    }
    planned = true;
  }

  uint64_t DemandLoads(size_t from) const {
    uint64_t loads = 0;
    for (size_t i = from; i < rig.steps.size(); ++i) loads += rig.steps[i].counters.loads_demand;
    return loads;
  }

  // One chunk is what a prefetch leaves to others.
  Rig rig{{.chunk_bytes = kChunk, .budget_bytes = (kFit + 1) * kChunk}};
  std::map<uint32_t, uint64_t> contents;
  uint64_t pattern = 1000;
  bool planned = false;
};

TEST_F(TasksInTurn, LoadNothingOnDemandOnceEachHasItsPlan) {
  constexpr size_t kBefore = 10, kSettling = 4, kAfter = 12;
  for (size_t i = 0; i < kBefore; ++i) ASSERT_NO_FATAL_FAILURE(Step(i % 2));
  ASSERT_NO_FATAL_FAILURE(OfferPlans(4));
  for (size_t i = 0; i < kSettling + kAfter; ++i) ASSERT_NO_FATAL_FAILURE(Step(i % 2));
  ASSERT_EQ(rig.Check(0, contents[0]), "");
  ASSERT_EQ(rig.steps.size(), kBefore + kSettling + kAfter);
  // Without plans every facet that is not there stalls the step: two of the other task's head at least, in each turn.
  const uint64_t before = [&] {
    uint64_t loads = 0;
    for (size_t i = 2; i < kBefore; ++i) loads += rig.steps[i].counters.loads_demand;
    return loads;
  }();
  EXPECT_GE(before, 2 * (kBefore - 2));
  EXPECT_EQ(DemandLoads(kBefore + kSettling), 0u);
  for (size_t i = kBefore + kSettling; i < rig.steps.size(); ++i) {
    EXPECT_EQ(rig.steps[i].counters.departures, 0u) << "step " << i;
    EXPECT_GT(rig.steps[i].counters.loads_prefetch, 0u) << "step " << i;
  }
  EXPECT_LE(rig.meter.peak_bytes(), (kFit + 1) * kChunk);
}

TEST_F(TasksInTurn, WithoutAnyOrderStillLoadLessOnDemandAndKeepEveryByte) {
  sim::Random random(3);
  std::vector<size_t> tasks;
  for (int i = 0; i < 48; ++i) tasks.push_back(random.Below(2));
  constexpr size_t kBefore = 24;
  for (size_t i = 0; i < kBefore; ++i) ASSERT_NO_FATAL_FAILURE(Step(tasks[i]));
  ASSERT_NO_FATAL_FAILURE(OfferPlans(12));
  for (size_t i = 0; i < kBefore; ++i) ASSERT_NO_FATAL_FAILURE(Step(tasks[i]));  // the same, so that they compare
  ASSERT_EQ(rig.Check(0, contents[0]), "");
  const uint64_t all = DemandLoads(2);
  const uint64_t after = DemandLoads(kBefore + 2);
  EXPECT_LT(2 * after, all - after) << "under half of what it was without plans";
  EXPECT_LE(rig.meter.peak_bytes(), (kFit + 1) * kChunk);
}

}  // namespace
}  // namespace misa::testing
