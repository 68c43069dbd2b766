#include "client/core/executor.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <random>
#include <thread>

#include "tests/unit/client/core/executor_rig.h"

namespace misa::testing {
namespace {

using policy::Action;
using policy::kCreate;
using policy::kRead;
using policy::kWrite;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr uint64_t kChunk = 4096;

// The budget that a sentence recommends; 0 where it names none.
uint64_t SmallestNamed(const std::string& sentence) {
  const std::string words = "smallest budget that works here is ";
  const size_t at = sentence.find(words);
  return at == std::string::npos ? 0 : std::stoull(sentence.substr(at + words.size()));
}

// Two steps that read these facets, so that a plan can be offered. Leaves a step begun.
void LearnTrace(Rig& rig, const std::vector<uint32_t>& reads) {
  rig.executor->ResetTrace();
  rig.Step(reads);
  rig.Step(reads);
  const policy::Use first{reads[0], kRead};
  ASSERT_EQ(rig.executor->Use(&first, 1, true), "");
  rig.executor->EndUse(&first, 1);
}

// A plan that does this in every step. The facets must be there once for the trace to be learned.
void FollowPlan(Rig& rig, const std::vector<uint32_t>& reads, std::vector<Action> actions) {
  LearnTrace(rig, reads);
  ASSERT_EQ(rig.Offer(std::move(actions)), "");
  rig.Step({reads.begin() + 1, reads.end()});
}

TEST(Executor, ContentLeavesAndComesBackToTheSameAddress) {
  Rig rig;
  const uint32_t a = rig.Add(3);
  const char* address = rig.facet(a).address;
  ASSERT_EQ(rig.Create(a, 7), "");
  rig.SendAway();
  EXPECT_EQ(rig.state(a), FacetState::kAway);
  EXPECT_FALSE(rig.owner.attached(a));
  EXPECT_FALSE(rig.Readable(a));  // a stray access is a fault, never another facet's bytes
  EXPECT_EQ(rig.Check(a, 7), "");
  EXPECT_TRUE(rig.Readable(a));
  EXPECT_EQ(rig.state(a), FacetState::kDevice);
  EXPECT_TRUE(rig.owner.attached(a));
  EXPECT_EQ(rig.facet(a).address, address);
  const ExecutorCounters totals = rig.executor->totals();
  EXPECT_EQ(totals.unloads, 1u);
  EXPECT_EQ(totals.unloaded_bytes, 3 * kChunk);
  EXPECT_EQ(totals.loads_demand, 1u);
  EXPECT_EQ(totals.loaded_bytes_demand, 3 * kChunk);
}

TEST(Executor, WhatWasOnlyReadIsDroppedWithoutACopy) {
  Rig rig;
  const uint32_t a = rig.Add(1);
  ASSERT_EQ(rig.Create(a, 1), "");
  rig.SendAway();
  ASSERT_EQ(rig.Check(a, 1), "");
  rig.SendAway();
  EXPECT_EQ(rig.link->submitted(kUnload), 1u);
  EXPECT_EQ(rig.executor->totals().drops, 1u);
  EXPECT_EQ(rig.Check(a, 1), "");
}

TEST(Executor, UsingWhatWasNeverMadeIsASentence) {
  Rig rig;
  const uint32_t a = rig.Add(1);
  EXPECT_THAT(rig.Check(a, 1), HasSubstr("facet0 has no content"));
  EXPECT_EQ(rig.facet(a).pins.load(), 0);
}

TEST(Executor, AUseCancelsAnUnload) {
  Rig rig;
  const uint32_t a = rig.Add(2);
  ASSERT_EQ(rig.Create(a, 5), "");
  rig.link->Hold(kUnload);
  rig.executor->UnloadAll();
  ASSERT_TRUE(rig.link->WaitHeld(kUnload, 1));
  EXPECT_EQ(rig.state(a), FacetState::kUnloading);
  EXPECT_EQ(rig.Check(a, 5), "");
  EXPECT_EQ(rig.state(a), FacetState::kDevice);
  rig.link->Release(kUnload);
  ASSERT_TRUE(rig.executor->Drain());
  // Its blocks landed and nobody wrote meanwhile: the copy counts.
  EXPECT_EQ(rig.state(a), FacetState::kDevice);
  rig.SendAway();
  EXPECT_EQ(rig.link->submitted(kUnload), 1u);
  EXPECT_EQ(rig.Check(a, 5), "");
}

TEST(Executor, AWriteDuringAnUnloadMakesItDirtyAgain) {
  Rig rig;
  const uint32_t a = rig.Add(2);
  ASSERT_EQ(rig.Create(a, 5), "");
  rig.link->Hold(kUnload);
  rig.executor->UnloadAll();
  ASSERT_TRUE(rig.link->WaitHeld(kUnload, 1));
  ASSERT_EQ(rig.Write(a, 6), "");
  // Sent away again while the first copy is still on its way: the second must follow it.
  rig.executor->UnloadAll();
  EXPECT_EQ(rig.state(a), FacetState::kUnloading);
  rig.link->Release(kUnload);
  ASSERT_TRUE(rig.executor->Drain());
  EXPECT_EQ(rig.state(a), FacetState::kAway);
  EXPECT_EQ(rig.link->submitted(kUnload), 2u);
  EXPECT_EQ(rig.Check(a, 6), "");
}

TEST(Executor, ADiscardDuringAnUnloadLeavesRoomForNewContent) {
  Rig rig;
  const uint32_t a = rig.Add(2);
  ASSERT_EQ(rig.Create(a, 5), "");
  rig.link->Hold(kUnload);
  rig.executor->UnloadAll();
  ASSERT_TRUE(rig.link->WaitHeld(kUnload, 1));
  rig.Discard(a);
  EXPECT_EQ(rig.state(a), FacetState::kEmpty);
  EXPECT_FALSE(rig.Readable(a));
  ASSERT_EQ(rig.Create(a, 6), "");
  rig.executor->UnloadAll();
  rig.link->Release(kUnload);
  ASSERT_TRUE(rig.executor->Drain());
  EXPECT_EQ(rig.state(a), FacetState::kAway);
  EXPECT_EQ(rig.Check(a, 6), "");
}

TEST(Executor, AFailedUnloadOfDeadContentSaysNothingAboutItsSuccessor) {
  Rig rig;
  const uint32_t a = rig.Add(2);
  ASSERT_EQ(rig.Create(a, 5), "");
  rig.link->Hold(kUnload);
  rig.link->FailNth(kUnload, 1, ENOSPC);
  rig.executor->UnloadAll();
  ASSERT_TRUE(rig.link->WaitHeld(kUnload, 1));
  rig.Discard(a);
  ASSERT_EQ(rig.Create(a, 6), "");
  rig.link->Release(kUnload);
  ASSERT_TRUE(rig.executor->Drain());
  EXPECT_THAT(rig.executor->TakeProblem(), IsEmpty());
  rig.SendAway();
  EXPECT_EQ(rig.Check(a, 6), "");
}

TEST(Executor, ADiscardDuringALoadWaitsForItsBytesBeforeNewContent) {
  Rig rig;
  const uint32_t a = rig.Add(1);
  const uint32_t b = rig.Add(2);
  ASSERT_EQ(rig.Create(a, 1), "");
  ASSERT_EQ(rig.Create(b, 2), "");
  ASSERT_NO_FATAL_FAILURE(FollowPlan(rig, {a, b}, {{0, Action::kLoad, b}}));
  rig.SendAway();
  rig.link->Hold(kLoad);
  std::thread other([&] { EXPECT_EQ(rig.Check(a, 1), ""); });  // begins the step: b's load is due
  const bool held = rig.link->WaitHeld(kLoad, 2);
  EXPECT_TRUE(held);
  if (held) {
    EXPECT_EQ(rig.state(b), FacetState::kLoading);
    rig.Discard(b);
    EXPECT_EQ(rig.state(b), FacetState::kEmpty);
  }
  std::thread creator([&] { EXPECT_EQ(rig.Create(b, 3), ""); });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(rig.state(b), FacetState::kEmpty);  // the dead bytes still arrive
  rig.link->Release(kLoad);
  other.join();
  creator.join();
  EXPECT_EQ(rig.Check(b, 3), "");
  rig.SendAway();
  EXPECT_EQ(rig.Check(b, 3), "");
}

TEST(Executor, ALoadThatFailsLeavesTheContentAndALaterUseGetsIt) {
  Rig rig;
  const uint32_t a = rig.Add(2);
  ASSERT_EQ(rig.Create(a, 9), "");
  rig.SendAway();
  rig.link->FailNth(kLoad, 1, EIO);
  const std::string error = rig.Check(a, 9);
  EXPECT_THAT(error, HasSubstr("facet0"));
  EXPECT_THAT(error, HasSubstr("Input/output error"));
  EXPECT_EQ(rig.state(a), FacetState::kAway);
  EXPECT_EQ(rig.facet(a).pins.load(), 0);
  EXPECT_EQ(rig.executor->space().spare_bytes() + rig.executor->space().empty_bytes(), rig.executor->space().bytes());
  EXPECT_THAT(rig.executor->TakeProblem(), HasSubstr("facet0"));
  EXPECT_THAT(rig.executor->TakeProblem(), IsEmpty());
  EXPECT_EQ(rig.Check(a, 9), "");
}

TEST(Executor, AnUnloadThatFailsKeepsTheContent) {
  Rig rig;
  const uint32_t a = rig.Add(2);
  ASSERT_EQ(rig.Create(a, 9), "");
  rig.link->FailNth(kUnload, 1, ENOSPC);
  rig.SendAway();
  EXPECT_EQ(rig.state(a), FacetState::kReady);
  const std::string problem = rig.executor->TakeProblem();
  EXPECT_THAT(problem, HasSubstr("facet0"));
  EXPECT_THAT(problem, HasSubstr("No space left on device"));
  EXPECT_EQ(rig.Check(a, 9), "");
  rig.SendAway();
  EXPECT_EQ(rig.state(a), FacetState::kAway);
  EXPECT_EQ(rig.Check(a, 9), "");
}

TEST(Executor, AnUnloadThatFailsAfterAUseCancelledItLeavesTheFacetDirty) {
  Rig rig;
  const uint32_t a = rig.Add(2);
  ASSERT_EQ(rig.Create(a, 9), "");
  rig.link->Hold(kUnload);
  rig.link->FailNth(kUnload, 1, EIO);
  rig.executor->UnloadAll();
  ASSERT_TRUE(rig.link->WaitHeld(kUnload, 1));
  ASSERT_EQ(rig.Check(a, 9), "");
  rig.link->Release(kUnload);
  ASSERT_TRUE(rig.executor->Drain());
  rig.SendAway();
  EXPECT_EQ(rig.link->submitted(kUnload), 2u);
  EXPECT_EQ(rig.Check(a, 9), "");
}

TEST(Executor, WhereNothingCanLeaveBecauseTheDiskIsFullTheSentenceSaysSo) {
  Rig rig({.budget_bytes = 2 * kChunk});
  const uint32_t a = rig.Add(2);
  const uint32_t b = rig.Add(1);
  ASSERT_EQ(rig.Create(a, 1), "");
  rig.link->FailSometimes(1, ENOSPC);
  EXPECT_THAT(rig.Create(b, 2), HasSubstr("No space left on device"));
  EXPECT_EQ(rig.state(b), FacetState::kEmpty);
  rig.link->FailSometimes(0, 0);
  EXPECT_EQ(rig.Check(a, 1), "");
}

// ------------------------------------------------------------------------------------------------------------- plans

TEST(Executor, APlanPrefetchesAndUnloads) {
  Rig rig;
  const uint32_t a = rig.Add(1);
  const uint32_t b = rig.Add(2);
  const uint32_t c = rig.Add(1);
  for (const uint32_t id : {a, b, c}) ASSERT_EQ(rig.Create(id, id), "");
  ASSERT_NO_FATAL_FAILURE(FollowPlan(rig, {a, b, c}, {{0, Action::kLoad, b}, {1, Action::kUnload, b}}));
  for (int step = 0; step < 3; ++step) {
    ASSERT_EQ(rig.Check(a, a), "");
    ASSERT_TRUE(Rig::Until([&] { return rig.state(b) == FacetState::kReady || rig.state(b) == FacetState::kDevice; }));
    ASSERT_EQ(rig.Check(b, b), "");
    ASSERT_EQ(rig.Check(c, c), "");
    ASSERT_TRUE(Rig::Until([&] { return rig.state(b) == FacetState::kAway; }));
    rig.executor->EndStep();
  }
  const ExecutorCounters totals = rig.executor->totals();
  EXPECT_EQ(totals.loads_demand, 0u);
  EXPECT_EQ(totals.loads_prefetch, 2u);
  EXPECT_EQ(totals.prefetch_hits, 2u);
}

TEST(Executor, APrefetchThatFailsDoesNotStopTheUse) {
  Rig rig;
  const uint32_t a = rig.Add(1);
  const uint32_t b = rig.Add(2);
  ASSERT_EQ(rig.Create(a, 1), "");
  ASSERT_EQ(rig.Create(b, 2), "");
  ASSERT_NO_FATAL_FAILURE(FollowPlan(rig, {a, b}, {{0, Action::kLoad, b}, {1, Action::kUnload, b}}));
  rig.SendAway();
  ASSERT_EQ(rig.Check(a, 1), "");  // begins the step; loads a, then b
  ASSERT_TRUE(Rig::Until([&] { return rig.state(b) == FacetState::kReady; }));
  ASSERT_EQ(rig.Check(b, 2), "");
  rig.executor->EndStep();
  rig.link->FailNth(kLoad, 1, EIO);  // of the next step: a is there, so this is the prefetch of b
  ASSERT_EQ(rig.Check(a, 1), "");
  ASSERT_TRUE(Rig::Until([&] { return !rig.executor->TakeProblem().empty(); }));
  // Nobody had waited for those bytes; whoever does tries for himself.
  EXPECT_EQ(rig.Check(b, 2), "");
}

TEST(Executor, TheErrorOfAPrefetchDiesWithTheContent) {
  Rig rig;
  const uint32_t a = rig.Add(1);
  const uint32_t b = rig.Add(2);
  ASSERT_EQ(rig.Create(a, 1), "");
  ASSERT_EQ(rig.Create(b, 2), "");
  ASSERT_NO_FATAL_FAILURE(FollowPlan(rig, {a, b}, {{0, Action::kLoad, b}, {1, Action::kUnload, b}}));
  rig.SendAway();
  rig.link->FailNth(kLoad, 2, EIO);
  ASSERT_EQ(rig.Check(a, 1), "");
  ASSERT_TRUE(Rig::Until([&] { return !rig.executor->TakeProblem().empty(); }));
  rig.Discard(b);
  ASSERT_EQ(rig.Create(b, 3), "");
  rig.SendAway();
  EXPECT_EQ(rig.Check(b, 3), "");
}

TEST(Executor, APlanThatNamesAnUnknownFacetIsRefused) {
  Rig rig;
  const uint32_t a = rig.Add(1);
  ASSERT_EQ(rig.Create(a, 1), "");
  ASSERT_NO_FATAL_FAILURE(LearnTrace(rig, {a}));
  EXPECT_THAT(rig.Offer({{0, Action::kLoad, 1}}), HasSubstr("does not have"));
  EXPECT_EQ(rig.Offer({{0, Action::kLoad, 0}}), "");
}

TEST(Executor, APlanForAnotherTraceIsRefusedAndTheOldOneStays) {
  Rig rig;
  const uint32_t a = rig.Add(1);
  ASSERT_EQ(rig.Create(a, 1), "");
  ASSERT_NO_FATAL_FAILURE(LearnTrace(rig, {a}));
  ASSERT_EQ(rig.Offer({}, 4), "");
  rig.executor->EndStep();
  ASSERT_EQ(rig.Check(a, 1), "");
  const auto plan = std::make_shared<policy::Plan>();
  EXPECT_THAT(rig.executor->OfferPlan(plan, 5, 12345), HasSubstr("another trace"));
  rig.executor->EndStep();
  ASSERT_EQ(rig.Check(a, 1), "");
  EXPECT_EQ(rig.steps.back().plan_version, 4u);
}

TEST(Executor, DemandOnlyFollowsNoPlan) {
  Rig rig({.executor = {.demand_only = true}});
  const uint32_t a = rig.Add(1);
  const uint32_t b = rig.Add(2);
  ASSERT_EQ(rig.Create(a, 1), "");
  ASSERT_EQ(rig.Create(b, 2), "");
  ASSERT_NO_FATAL_FAILURE(FollowPlan(rig, {a, b}, {{0, Action::kLoad, b}, {1, Action::kUnload, b}}));
  for (int step = 0; step < 3; ++step) {
    ASSERT_EQ(rig.Check(a, 1), "");
    ASSERT_EQ(rig.Check(b, 2), "");
    rig.executor->EndStep();
  }
  rig.SendAway();
  ASSERT_EQ(rig.Check(a, 1), "");
  ASSERT_EQ(rig.Check(b, 2), "");
  EXPECT_EQ(rig.executor->totals().loads_prefetch, 0u);
  EXPECT_EQ(rig.executor->totals().loads_demand, 2u);
}

// Even where the trace is known: the one used longest ago goes, which in a loop over too much is always the next one.
TEST(Executor, DemandOnlyLetsTheLeastRecentlyUsedGo) {
  Rig rig({.space_bytes = 2 * kChunk, .executor = {.demand_only = true}});
  std::vector<uint32_t> facets;
  for (uint64_t i = 0; i < 3; ++i) {
    facets.push_back(rig.Add(1));
    ASSERT_EQ(rig.Create(facets[i], i), "");
  }
  for (int step = 0; step < 3; ++step) {
    for (uint64_t i = 0; i < 3; ++i) ASSERT_EQ(rig.Check(facets[i], i), "");
    rig.executor->EndStep();
  }
  EXPECT_EQ(rig.executor->totals().loads_demand, 9u);
}

TEST(Executor, UnderStressNothingStaysThatIsNotInUse) {
  Rig rig({.executor = {.stress = true}});
  std::vector<uint32_t> facets;
  for (uint64_t i = 0; i < 5; ++i) {
    facets.push_back(rig.Add(1 + i % 3));
    ASSERT_EQ(rig.Create(facets[i], i), "");
  }
  const policy::Use held{facets[0], kRead};
  ASSERT_EQ(rig.executor->Use(&held, 1, true), "");
  rig.owner.BeginTouch(facets[0]);
  for (int round = 0; round < 3; ++round) {
    for (uint64_t i = 1; i < 5; ++i) {
      ASSERT_EQ(rig.Check(facets[i], i), "");
      for (uint64_t j = 1; j < 5; ++j) {
        if (j == i) continue;
        const FacetState state = rig.state(facets[j]);
        EXPECT_TRUE(state == FacetState::kAway || state == FacetState::kUnloading) << i << " " << j;
      }
      EXPECT_EQ(rig.state(facets[0]), FacetState::kDevice);
    }
  }
  EXPECT_TRUE(rig.Holds(facets[0], 0));
  rig.owner.EndTouch(facets[0]);
  rig.executor->EndUse(&held, 1);
}

// ------------------------------------------------------------------------------------------------------------- steps

TEST(Executor, AStepEndsWithTheNextUseEvenOfTheSameFacet) {
  Rig rig;
  const uint32_t a = rig.Add(1);
  ASSERT_EQ(rig.Create(a, 1), "");
  rig.executor->ResetTrace();
  rig.Step({a});
  rig.Step({a});
  rig.Step({a});
  ASSERT_EQ(rig.steps.size(), 2u);
  EXPECT_EQ(rig.steps[0].trace->entries.size(), 1u);
  EXPECT_EQ(rig.steps[0].trace_digest, rig.steps[1].trace_digest);
  EXPECT_EQ(rig.steps[1].step, 2u);
}

TEST(Executor, MoreAccessToTheSameFacetsIsTheSamePosition) {
  Rig rig;
  const uint32_t a = rig.Add(1);
  const uint32_t b = rig.Add(1);
  ASSERT_EQ(rig.Create(a, 1), "");
  ASSERT_EQ(rig.Create(b, 1), "");
  rig.executor->ResetTrace();
  const policy::Use both[] = {{a, kRead}, {b, kRead}};
  const policy::Use write{b, kRead | kWrite};
  ASSERT_EQ(rig.executor->Use(both, 2, true), "");
  ASSERT_EQ(rig.executor->Use(&write, 1, true), "");
  rig.executor->EndUse(&write, 1);
  rig.executor->EndUse(both, 2);
  rig.executor->EndStep();
  ASSERT_EQ(rig.Check(a, 1), "");
  ASSERT_EQ(rig.steps.size(), 1u);
  ASSERT_EQ(rig.steps[0].trace->entries.size(), 1u);
  EXPECT_EQ(rig.steps[0].trace->entries[0].uses, (std::vector<policy::Use>{{a, kRead}, {b, kRead | kWrite}}));
}

TEST(Executor, NestedUsesLeaveTheTraceAlone) {
  Rig rig;
  const uint32_t a = rig.Add(1);
  const uint32_t b = rig.Add(1);
  ASSERT_EQ(rig.Create(a, 1), "");
  ASSERT_EQ(rig.Create(b, 1), "");
  rig.executor->ResetTrace();
  ASSERT_EQ(rig.Check(a, 1), "");
  const policy::Use nested{b, kRead};
  ASSERT_EQ(rig.executor->Use(&nested, 1, false), "");
  rig.executor->EndUse(&nested, 1);
  rig.executor->EndStep();
  ASSERT_EQ(rig.Check(a, 1), "");
  ASSERT_EQ(rig.steps.size(), 1u);
  EXPECT_EQ(rig.steps[0].trace->entries.size(), 1u);
}

TEST(Executor, AStepReportsWhatMovedInIt) {
  Rig rig;
  const uint32_t a = rig.Add(1);
  const uint32_t b = rig.Add(2);
  ASSERT_EQ(rig.Create(a, 1), "");
  ASSERT_EQ(rig.Create(b, 2), "");
  rig.executor->ResetTrace();
  rig.Step({a, b});
  rig.SendAway();
  rig.Step({a, b});
  ASSERT_EQ(rig.Check(a, 1), "");
  ASSERT_EQ(rig.steps.size(), 2u);
  // What is sent away between two steps counts to the one that ended: the next one has not begun.
  EXPECT_EQ(rig.steps[0].counters.unloads, 2u);
  EXPECT_EQ(rig.steps[0].counters.loads_demand, 0u);
  EXPECT_EQ(rig.steps[1].counters.unloads, 0u);
  EXPECT_EQ(rig.steps[1].counters.loads_demand, 2u);
  EXPECT_EQ(rig.steps[1].counters.loaded_bytes_demand, 3 * kChunk);
}

// ------------------------------------------------------------------------------------------------------------ budget

TEST(Executor, NeverHoldsMoreThanItsBudget) {
  constexpr uint64_t kBudget = 6 * kChunk;
  Rig rig({.budget_bytes = kBudget});
  std::vector<uint32_t> facets;
  for (uint64_t i = 0; i < 8; ++i) {
    facets.push_back(rig.Add(1 + i % 3));
    ASSERT_EQ(rig.Create(facets[i], i), "");
  }
  for (int round = 0; round < 4; ++round) {
    for (uint64_t i = 0; i < 8; ++i) ASSERT_EQ(rig.Check(facets[i], i), "");
  }
  EXPECT_LE(rig.meter.peak_bytes(), kBudget);
  EXPECT_GE(rig.meter.peak_bytes(), kBudget - 2 * kChunk);
}

TEST(Executor, OtherTensorsGetTheirRoom) {
  constexpr uint64_t kBudget = 6 * kChunk;
  Rig rig({.budget_bytes = kBudget});
  std::vector<uint32_t> facets;
  for (uint64_t i = 0; i < 6; ++i) {
    facets.push_back(rig.Add(1));
    ASSERT_EQ(rig.Create(facets[i], i), "");
  }
  EXPECT_EQ(rig.executor->MakeRoom(4 * kChunk - 100), "");
  EXPECT_EQ(rig.meter.other_bytes(), 4 * kChunk - 100);
  EXPECT_LE(rig.meter.total_bytes(), kBudget);
  for (uint64_t i = 0; i < 6; ++i) ASSERT_EQ(rig.Check(facets[i], i), "");
  const std::string refused = rig.executor->MakeRoom(3 * kChunk);
  EXPECT_THAT(refused, HasSubstr("too small for a tensor"));
  EXPECT_EQ(SmallestNamed(refused), 7 * kChunk - 100);
  rig.meter.SubtractOther(4 * kChunk - 100);
  EXPECT_EQ(rig.executor->MakeRoom(3 * kChunk), "");
  for (uint64_t i = 0; i < 6; ++i) ASSERT_EQ(rig.Check(facets[i], i), "");
  EXPECT_LE(rig.meter.peak_bytes(), kBudget);
}

TEST(Executor, ASmallerBudgetIsFitted) {
  Rig rig({.budget_bytes = 8 * kChunk});
  std::vector<uint32_t> facets;
  for (uint64_t i = 0; i < 4; ++i) {
    facets.push_back(rig.Add(2));
    ASSERT_EQ(rig.Create(facets[i], i), "");
  }
  const policy::Use held{facets[1], kRead};
  ASSERT_EQ(rig.executor->Use(&held, 1, true), "");
  rig.owner.BeginTouch(facets[1]);
  rig.meter.SetBudget(2 * kChunk);
  EXPECT_EQ(rig.executor->FitBudget(), "");
  EXPECT_LE(rig.meter.total_bytes(), 2 * kChunk);
  rig.meter.SetBudget(kChunk);
  EXPECT_EQ(SmallestNamed(rig.executor->FitBudget()), 2 * kChunk);
  EXPECT_TRUE(rig.Holds(facets[1], 1));
  rig.owner.EndTouch(facets[1]);
  rig.executor->EndUse(&held, 1);
  EXPECT_EQ(rig.executor->FitBudget(), "");
  rig.meter.SetBudget(2 * kChunk);
  for (uint64_t i = 0; i < 4; ++i) EXPECT_EQ(rig.Check(facets[i], i), "");
}

// Whichever facet of the group is the one that finds no room, the sentence names what the whole group needs.
TEST(Executor, ABudgetTooSmallForAGroupNamesTheSmallestThatWorks) {
  for (const auto& sizes : std::vector<std::vector<uint64_t>>{{1, 2, 4}, {4, 2, 1}, {5, 5}, {3, 1, 1, 1, 1}}) {
    uint64_t sum = 0;
    uint64_t largest = 0;
    for (uint64_t size : sizes) {
      sum += size;
      largest = std::max(largest, size);
    }
    for (uint64_t chunks = largest - 1; chunks < sum; ++chunks) {
      constexpr uint64_t kOther = 1000;
      Rig rig({.budget_bytes = sum * kChunk + kOther});
      std::vector<policy::Use> uses;
      for (uint64_t i = 0; i < sizes.size(); ++i) {
        uses.push_back({rig.Add(sizes[i]), kRead});
        ASSERT_EQ(rig.Create(uses[i].facet, i), "");
      }
      const uint32_t bystander = rig.Add(1);
      ASSERT_EQ(rig.Create(bystander, 99), "");
      ASSERT_EQ(rig.executor->MakeRoom(kOther), "");
      rig.SendAway();
      rig.meter.SetBudget(chunks * kChunk + kOther);
      ASSERT_EQ(rig.executor->FitBudget(), "");
      const std::string error = rig.executor->Use(uses.data(), uses.size(), true);
      EXPECT_EQ(SmallestNamed(error), sum * kChunk + kOther) << error;
      for (const auto& use : uses) EXPECT_EQ(rig.facet(use.facet).pins.load(), 0);
      // What failed leaves nothing behind that another use would trip over.
      if (chunks > 0) {
        EXPECT_EQ(rig.Check(bystander, 99), "");
        EXPECT_LE(rig.meter.peak_bytes(), sum * kChunk + kOther);
      }
      rig.meter.SetBudget(SmallestNamed(error));
      ASSERT_EQ(rig.executor->Use(uses.data(), uses.size(), true), "");
      for (uint64_t i = 0; i < uses.size(); ++i) EXPECT_TRUE(rig.Holds(uses[i].facet, i));
      rig.executor->EndUse(uses.data(), uses.size());
    }
  }
}

TEST(Executor, AGroupThatFailsLeavesNoDemandBehind) {
  Rig rig;
  const uint32_t a = rig.Add(1);
  const uint32_t b = rig.Add(1);
  ASSERT_EQ(rig.Create(a, 1), "");
  ASSERT_EQ(rig.Create(b, 2), "");
  rig.SendAway();
  rig.meter.SetBudget(0);
  ASSERT_EQ(rig.executor->FitBudget(), "");
  const policy::Use uses[] = {{a, kRead}, {b, kRead}};
  EXPECT_NE(rig.executor->Use(uses, 2, true), "");
  for (const policy::Use& use : uses) {
    EXPECT_FALSE(rig.facet(use.facet).queued);
    EXPECT_FALSE(rig.facet(use.facet).demanded);
  }
  rig.meter.SetBudget(DeviceMeter::kUnlimited);
  EXPECT_EQ(rig.Check(a, 1), "");
  EXPECT_EQ(rig.state(b), FacetState::kAway);
}

// The leased chunks may be fewer than the budget: it is they that are too few then.
TEST(Executor, WhereTheChunksAreTooFewTheSentenceSaysSo) {
  Rig rig({.space_bytes = 4 * kChunk, .budget_bytes = 100 * kChunk});
  const uint32_t a = rig.Add(3);
  const uint32_t b = rig.Add(3);
  ASSERT_EQ(rig.Create(a, 1), "");
  const policy::Use held{a, kRead};
  ASSERT_EQ(rig.executor->Use(&held, 1, true), "");
  const std::string error = rig.Create(b, 2);
  EXPECT_THAT(error, HasSubstr("leased memory of 16KiB is too small for facet1"));
  EXPECT_THAT(error, HasSubstr("needs 24KiB"));
  rig.executor->EndUse(&held, 1);
  EXPECT_EQ(rig.Create(b, 2), "");
  EXPECT_EQ(rig.Check(a, 1), "");
  EXPECT_EQ(rig.Check(b, 2), "");
}

TEST(Executor, WhatIsPinnedStaysUnderPressure) {
  Rig rig({.budget_bytes = 4 * kChunk});
  std::vector<uint32_t> facets;
  for (uint64_t i = 0; i < 5; ++i) {
    facets.push_back(rig.Add(1));
    ASSERT_EQ(rig.Create(facets[i], i), "");
  }
  const policy::Use held{facets[2], kRead};
  ASSERT_EQ(rig.executor->Use(&held, 1, true), "");
  rig.owner.BeginTouch(facets[2]);
  for (int round = 0; round < 20; ++round) {
    for (uint64_t i = 0; i < 5; ++i) ASSERT_EQ(rig.Check(facets[i], i), "");
    ASSERT_TRUE(rig.Holds(facets[2], 2));
    rig.executor->UnloadAll();
    ASSERT_TRUE(rig.Holds(facets[2], 2));
  }
  rig.owner.EndTouch(facets[2]);
  rig.executor->EndUse(&held, 1);
}

// ---------------------------------------------------------------------------------------------------------- failures

TEST(Executor, ALinkThatNeverAnswersEndsWithASentence) {
  Rig rig({.budget_bytes = 2 * kChunk, .executor = {.wait_seconds = 0.2}});
  const uint32_t a = rig.Add(1);
  const uint32_t b = rig.Add(2);
  const uint32_t c = rig.Add(2);
  ASSERT_EQ(rig.Create(a, 1), "");
  rig.SendAway();
  ASSERT_EQ(rig.Create(b, 2), "");
  rig.link->Hold(kLoad);
  rig.link->Hold(kUnload);
  EXPECT_THAT(rig.Create(c, 3), HasSubstr("facet2 was waited for"));
  EXPECT_THAT(rig.executor->MakeRoom(kChunk), HasSubstr("room for a tensor"));
  EXPECT_FALSE(rig.executor->Drain());
  EXPECT_THAT(rig.Check(a, 1), HasSubstr("facet0 was waited for"));
  EXPECT_EQ(rig.Check(b, 2), "");  // its unload never ended: it is still there
  // And the end of the executor does not wait for ever either.
}

TEST(Executor, AStuckLoadEndsWithASentenceAndWorksOnceTheLinkDoes) {
  Rig rig({.executor = {.wait_seconds = 0.2}});
  const uint32_t a = rig.Add(1);
  ASSERT_EQ(rig.Create(a, 1), "");
  rig.SendAway();
  rig.link->Hold(kLoad);
  EXPECT_THAT(rig.Check(a, 1), HasSubstr("the disk does not answer"));
  EXPECT_EQ(rig.state(a), FacetState::kLoading);
  rig.link->Release(kLoad);
  EXPECT_EQ(rig.Check(a, 1), "");
}

// The executor's memfd stops being one: neither fallocate nor mmap works on it.
class BrokenMemory {
 public:
  explicit BrokenMemory(int memfd) : memfd_(memfd), kept_(dup(memfd)) {
    const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    dup2(null, memfd_);
    close(null);
  }
  ~BrokenMemory() {
    dup2(kept_, memfd_);
    close(kept_);
  }

 private:
  const int memfd_;
  const int kept_;
};

TEST(Executor, MemoryThatCannotBeHadIsASentenceAndLeavesEverythingAsItWas) {
  Rig rig;
  const uint32_t a = rig.Add(2);
  const uint32_t b = rig.Add(2);
  const uint32_t c = rig.Add(1);
  ASSERT_EQ(rig.Create(a, 1), "");
  rig.SendAway();
  const uint64_t spare = rig.executor->space().spare_bytes();
  const uint64_t empty = rig.executor->space().empty_bytes();
  const uint64_t pool = rig.meter.pool_bytes();
  {
    BrokenMemory broken(rig.memfd);
    EXPECT_THAT(rig.Check(a, 1), HasSubstr("facet0"));        // spare chunks: the mapping fails
    EXPECT_THAT(rig.Create(b, 2), HasSubstr("chunks"));       // the same for a facet that is made
    EXPECT_EQ(rig.state(a), FacetState::kAway);
    EXPECT_EQ(rig.state(b), FacetState::kEmpty);
    EXPECT_EQ(rig.executor->space().spare_bytes(), spare);
    EXPECT_EQ(rig.executor->space().empty_bytes(), empty);
    EXPECT_EQ(rig.meter.pool_bytes(), pool);
  }
  ASSERT_EQ(rig.Create(b, 2), "");  // the spare ones are in use now
  {
    BrokenMemory broken(rig.memfd);
    EXPECT_THAT(rig.Check(a, 1), HasSubstr("facet0"));   // no pages for empty chunks
    EXPECT_THAT(rig.Create(c, 3), HasSubstr("memory"));
    EXPECT_EQ(rig.executor->space().empty_bytes(), empty);
    EXPECT_EQ(rig.meter.pool_bytes(), pool);
  }
  EXPECT_EQ(rig.Check(a, 1), "");
  EXPECT_EQ(rig.Create(c, 3), "");
  EXPECT_EQ(rig.Check(b, 2), "");
  EXPECT_EQ(rig.Check(c, 3), "");
}

// ----------------------------------------------------------------------------------------------------------- threads

TEST(Executor, ThreadsUseDifferentFacetsAtOnce) {
  constexpr uint64_t kBudget = 8 * kChunk;
  Rig rig({.budget_bytes = kBudget});
  constexpr uint64_t kEach = 6;
  std::vector<uint32_t> facets;
  for (uint64_t i = 0; i < 2 * kEach; ++i) {
    facets.push_back(rig.Add(1 + i % 2));
    ASSERT_EQ(rig.Create(facets[i], i), "");
  }
  rig.link->Delay(2);
  const auto work = [&](uint64_t first, uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<uint64_t> pattern(kEach);
    for (uint64_t i = 0; i < kEach; ++i) pattern[i] = first + i;
    for (int step = 0; step < 400; ++step) {
      const uint64_t i = random() % kEach;
      if (random() % 2 == 0) {
        ASSERT_EQ(rig.Check(facets[first + i], pattern[i]), "");
      } else {
        pattern[i] = random();
        ASSERT_EQ(rig.Write(facets[first + i], pattern[i]), "");
      }
    }
    for (uint64_t i = 0; i < kEach; ++i) ASSERT_EQ(rig.Check(facets[first + i], pattern[i]), "");
  };
  std::thread other(work, kEach, 2);
  work(0, 1);
  other.join();
  EXPECT_LE(rig.meter.peak_bytes(), kBudget);
}

TEST(Executor, ThreadsThatReadTheSameFacetShareIt) {
  Rig rig({.budget_bytes = 4 * kChunk});
  const uint32_t shared = rig.Add(2);
  const uint32_t own[] = {rig.Add(1), rig.Add(1), rig.Add(1)};
  ASSERT_EQ(rig.Create(shared, 77), "");
  for (uint64_t i = 0; i < 3; ++i) ASSERT_EQ(rig.Create(own[i], i), "");
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      for (int step = 0; step < 300; ++step) {
        ASSERT_EQ(rig.Check(shared, 77), "");
        ASSERT_EQ(rig.Check(own[t], t), "");
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_LE(rig.meter.peak_bytes(), 4 * kChunk);
}

// Optimizer state is registered when it first appears, while other threads already use what there is.
TEST(Executor, FacetsCanBeAddedWhileOthersAreUsed) {
  Rig rig;
  const uint32_t a = rig.Add(1);
  const uint32_t b = rig.Add(1);
  ASSERT_EQ(rig.Create(a, 1), "");
  ASSERT_EQ(rig.Create(b, 2), "");
  std::atomic<bool> stop{false};
  std::thread user([&] {
    while (!stop.load()) {
      ASSERT_EQ(rig.Check(a, 1), "");
      ASSERT_EQ(rig.Check(b, 2), "");
    }
  });
  for (int i = 0; i < 500; ++i) rig.Add(1);
  stop.store(true);
  user.join();
}

// An allocation that is refused counts for a moment. One that fits must not be refused for that.
TEST(Executor, ARefusedTensorDoesNotTakeRoomFromOneThatFits) {
  constexpr uint64_t kBudget = 4 * kChunk;
  Rig rig({.budget_bytes = kBudget});
  std::atomic<bool> stop{false};
  std::thread refused([&] {
    while (!stop.load()) ASSERT_FALSE(rig.meter.TryAddOther(kBudget + 1));
  });
  std::string error;
  for (int i = 0; i < 20000 && error.empty(); ++i) {
    error = rig.executor->MakeRoom(kChunk);
    if (error.empty()) rig.meter.SubtractOther(kChunk);
  }
  EXPECT_EQ(error, "");
  stop.store(true);
  refused.join();
}

}  // namespace
}  // namespace misa::testing
