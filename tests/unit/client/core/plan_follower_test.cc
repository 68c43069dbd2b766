#include "client/core/plan_follower.h"

#include <gmock/gmock.h>

#include <cstdint>

namespace misa {
namespace {

using policy::Action;
using policy::kCreate;
using policy::kDiscard;
using policy::kRead;
using policy::kWrite;
using policy::Use;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Group = std::vector<Use>;

class Follower {
 public:
  void Begin(const Group& group, double seconds = 0, uint64_t other = 0) {
    follower.Begin(group.data(), group.size(), seconds, other);
  }
  std::shared_ptr<const policy::Trace> Step(const std::vector<Group>& groups) {
    for (const Group& group : groups) Begin(group);
    return follower.EndStep(0, 0);
  }
  std::string Offer(std::vector<Action> actions, uint64_t version, uint64_t digest) {
    auto plan = std::make_shared<policy::Plan>();
    plan->actions = std::move(actions);
    return follower.Offer(plan, version, digest);
  }
  std::vector<Action> Due() {
    std::vector<Action> due;
    follower.TakeDue(&due);
    return due;
  }
  std::vector<Action> Rest() {
    std::vector<Action> rest;
    follower.TakeRest(&rest);
    return rest;
  }

  PlanFollower follower;
};

Group Reads(uint32_t facet) { return {{facet, kRead}}; }

TEST(PlanFollower, RecordsPositionsTimesAndOtherBytes) {
  Follower f;
  f.Begin(Reads(1), 99, 99);  // there is no position before the first
  f.Begin({{2, kRead}, {3, kWrite}}, 0.5, 100);
  f.follower.AddAccess(2, kWrite);
  f.follower.AddAccess(7, kWrite);  // not of this position
  f.Begin(Reads(1), 0.25, 200);
  const auto trace = f.follower.EndStep(0.125, 300);
  ASSERT_EQ(trace->entries.size(), 3u);
  EXPECT_EQ(trace->entries[0].uses, Reads(1));
  EXPECT_EQ(trace->entries[1].uses, (Group{{2, kRead | kWrite}, {3, kWrite}}));
  EXPECT_EQ(trace->entries[0].compute_seconds, 0.5);
  EXPECT_EQ(trace->entries[1].compute_seconds, 0.25);
  EXPECT_EQ(trace->entries[2].compute_seconds, 0.125);
  EXPECT_EQ(trace->entries[0].other_bytes, 100u);
  EXPECT_EQ(trace->entries[1].other_bytes, 200u);
  EXPECT_EQ(trace->entries[2].other_bytes, 300u);
  EXPECT_EQ(f.follower.digest(), policy::Digest(*trace));
}

TEST(PlanFollower, EqualStepsHaveOneDigestWhateverTheirTimes) {
  Follower f;
  f.Begin(Reads(1));
  f.Begin(Reads(2), 1, 1);
  f.follower.EndStep(1, 1);
  const uint64_t first = f.follower.digest();
  f.Begin(Reads(1));
  f.Begin(Reads(2), 5, 5);
  f.follower.EndStep(7, 7);
  EXPECT_EQ(f.follower.digest(), first);
  f.Step({Reads(2), Reads(1)});
  EXPECT_NE(f.follower.digest(), first);
  f.Step({{{1, kRead}, {2, kRead}}});
  EXPECT_NE(f.follower.digest(), first);
  f.Step({Reads(1), {{2, kRead | kWrite}}});
  EXPECT_NE(f.follower.digest(), first);
  f.Step({Reads(1), Reads(2)});
  EXPECT_EQ(f.follower.digest(), first);
}

TEST(PlanFollower, ADiscardMarksTheLastUse) {
  Follower f;
  f.Begin(Reads(1));
  f.Begin(Reads(2));
  f.Begin(Reads(1));
  f.Begin(Reads(3));
  f.follower.MarkDiscard(1);
  f.follower.MarkDiscard(9);  // never used: nothing to mark
  const auto trace = f.follower.EndStep(0, 0);
  EXPECT_EQ(trace->entries[0].uses[0].access, kRead);
  EXPECT_EQ(trace->entries[2].uses[0].access, kRead | kDiscard);
  EXPECT_EQ(trace->entries[3].uses[0].access, kRead);
}

TEST(PlanFollower, ADiscardBeforeAnyUseOfTheStepMarksNothing) {
  Follower f;
  f.Step({Reads(1), Reads(2)});
  f.Begin(Reads(2));
  f.follower.MarkDiscard(1);
  f.Begin({{1, kCreate | kWrite}});
  const auto trace = f.follower.EndStep(0, 0);
  EXPECT_EQ(trace->entries[0].uses[0].access, kRead);
  EXPECT_EQ(trace->entries[1].uses[0].access, kCreate | kWrite);
}

TEST(PlanFollower, ActionsComeDueInOrder) {
  Follower f;
  f.Step({Reads(0), Reads(1), Reads(2), Reads(3)});
  const std::vector<Action> plan = {{0, Action::kLoad, 1},   {0, Action::kUnload, 0}, {1, Action::kLoad, 2},
                                    {1, Action::kUnload, 1}, {2, Action::kLoad, 3},   {3, Action::kUnload, 3}};
  ASSERT_EQ(f.Offer(plan, 1, f.follower.digest()), "");
  // Not before the next boundary.
  f.Begin(Reads(0));
  EXPECT_THAT(f.Due(), IsEmpty());
  EXPECT_EQ(f.follower.version(), 0u);
  f.Step({Reads(1), Reads(2), Reads(3)});
  EXPECT_EQ(f.follower.version(), 1u);
  EXPECT_THAT(f.Due(), IsEmpty());  // no position of this step has begun
  f.Begin(Reads(0));
  EXPECT_THAT(f.Due(), ElementsAre(plan[0]));  // a load when its position begins, an unload when the next does
  EXPECT_THAT(f.Due(), IsEmpty());
  f.Begin(Reads(1));
  EXPECT_THAT(f.Due(), ElementsAre(plan[1], plan[2]));
  f.Begin(Reads(2));
  EXPECT_THAT(f.Due(), ElementsAre(plan[3], plan[4]));
  f.Begin(Reads(3));
  EXPECT_THAT(f.Due(), IsEmpty());
  EXPECT_THAT(f.Rest(), ElementsAre(plan[5]));
  EXPECT_THAT(f.Rest(), IsEmpty());
  f.follower.EndStep(0, 0);
  // And from the start again.
  f.Begin(Reads(0));
  EXPECT_THAT(f.Due(), ElementsAre(plan[0]));
  EXPECT_EQ(f.follower.departures(), 0u);
}

TEST(PlanFollower, ASkippedPositionIsCaughtUp) {
  Follower f;
  f.Step({Reads(0), Reads(1), Reads(2), Reads(3)});
  ASSERT_EQ(f.Offer({{1, Action::kUnload, 0}, {2, Action::kLoad, 3}, {3, Action::kLoad, 0}}, 1, f.follower.digest()), "");
  f.Step({Reads(0), Reads(1), Reads(2), Reads(3)});
  f.Begin(Reads(0));
  f.Begin(Reads(2));  // 1 was left out
  EXPECT_EQ(f.follower.departures(), 1u);
  EXPECT_EQ(f.follower.cursor(), 2u);
  EXPECT_THAT(f.Due(), ElementsAre(Action{1, Action::kUnload, 0}, Action{2, Action::kLoad, 3}));
  f.Begin(Reads(3));
  EXPECT_EQ(f.follower.departures(), 1u);
  EXPECT_EQ(f.follower.cursor(), 3u);
}

TEST(PlanFollower, OfPositionsThatWereLeftOutOnlyWhatStillMattersIsDone) {
  Follower f;
  const std::vector<Group> step = {Reads(0), Reads(1), Reads(2), Reads(3)};
  f.Step(step);
  const std::vector<Action> plan = {{0, Action::kLoad, 1}, {1, Action::kUnload, 1}, {1, Action::kLoad, 2},
                                    {2, Action::kUnload, 2}, {2, Action::kLoad, 3}, {3, Action::kUnload, 3}};
  ASSERT_EQ(f.Offer(plan, 1, f.follower.digest()), "");
  f.Step(step);
  f.Begin(Reads(0));
  EXPECT_THAT(f.Due(), ElementsAre(plan[0]));
  f.Begin(Reads(3));  // 1 and 2 were left out: 2 is not loaded only to leave again
  EXPECT_THAT(f.Due(), ElementsAre(plan[1], plan[3], plan[4]));
  EXPECT_THAT(f.Rest(), ElementsAre(plan[5]));
  f.follower.EndStep(0, 0);
  // A step that ends early does not load for the rest of it.
  f.Step(step);
  f.Begin(Reads(0));
  EXPECT_THAT(f.Due(), ElementsAre(plan[0]));
  EXPECT_THAT(f.Rest(), ElementsAre(plan[1], plan[3], plan[5]));
}

TEST(PlanFollower, ACycleGoesOnFromPeriodToPeriod) {
  Follower f;
  const std::vector<Group> step = {Reads(0), Reads(1)};
  f.Step(step);
  auto plan = std::make_shared<policy::Plan>();
  plan->periods = 2;
  plan->actions = {{0, Action::kUnload, 0}, {1, Action::kLoad, 0}, {2, Action::kLoad, 1}, {3, Action::kUnload, 1}};
  ASSERT_EQ(f.follower.Offer(plan, 1, f.follower.digest()), "");
  f.Step(step);
  for (int round = 0; round < 3; ++round) {
    f.Begin(Reads(0));
    EXPECT_THAT(f.Due(), IsEmpty());
    f.Begin(Reads(1));
    EXPECT_THAT(f.Due(), ElementsAre(plan->actions[0], plan->actions[1]));
    EXPECT_THAT(f.Rest(), IsEmpty());
    f.follower.EndStep(0, 0);
    f.Begin(Reads(0));
    EXPECT_THAT(f.Due(), ElementsAre(plan->actions[2]));
    f.Begin(Reads(1));
    EXPECT_THAT(f.Due(), IsEmpty());
    EXPECT_THAT(f.Rest(), ElementsAre(plan->actions[3]));
    f.follower.EndStep(0, 0);
  }
  // A new plan begins with its first period.
  f.Step(step);
  ASSERT_EQ(f.follower.Offer(plan, 2, f.follower.digest()), "");
  f.Step(step);
  f.Begin(Reads(0));
  f.Begin(Reads(1));
  EXPECT_THAT(f.Due(), ElementsAre(plan->actions[0], plan->actions[1]));
}

TEST(PlanFollower, RefusesAPlanBeyondItsCycle) {
  Follower f;
  f.Step({Reads(0), Reads(1)});
  EXPECT_THAT(f.Offer({{2, Action::kLoad, 1}}, 1, f.follower.digest()), HasSubstr("its cycle has 2"));
  auto plan = std::make_shared<policy::Plan>();
  plan->periods = 2;
  plan->actions = {{3, Action::kLoad, 1}};
  EXPECT_EQ(f.follower.Offer(plan, 1, f.follower.digest()), "");
  plan = std::make_shared<policy::Plan>(*plan);
  plan->periods = 0;
  EXPECT_THAT(f.follower.Offer(plan, 1, f.follower.digest()), HasSubstr("its cycle has 0"));
}

TEST(PlanFollower, AnUnknownPositionLeavesTheCursorWhereItIs) {
  Follower f;
  f.Step({Reads(0), Reads(1), Reads(2)});
  f.Begin(Reads(0));
  f.Begin(Reads(50));
  f.Begin(Reads(51));
  EXPECT_EQ(f.follower.departures(), 2u);
  EXPECT_EQ(f.follower.cursor(), 0u);
  f.Begin(Reads(1));
  EXPECT_EQ(f.follower.departures(), 2u);
  EXPECT_EQ(f.follower.cursor(), 1u);
}

TEST(PlanFollower, OrderWithinAGroupAndAccessDoNotMatterForFollowing) {
  Follower f;
  f.Step({{{0, kRead}, {1, kRead}}, Reads(2)});
  f.Begin({{1, kWrite}, {0, kRead}});
  f.Begin(Reads(2));
  EXPECT_EQ(f.follower.departures(), 0u);
  EXPECT_EQ(f.follower.cursor(), 1u);
}

TEST(PlanFollower, AStepUnlikeAnyOtherLeavesNoPlanUndone) {
  Follower f;
  const std::vector<Group> training = {Reads(0), Reads(1), Reads(2)};
  f.Step(training);
  const std::vector<Action> plan = {{0, Action::kLoad, 1}, {2, Action::kUnload, 2}};
  ASSERT_EQ(f.Offer(plan, 1, f.follower.digest()), "");
  f.Step(training);
  // An evaluation in between: only the beginning of a step.
  f.Begin(Reads(0));
  EXPECT_THAT(f.Due(), ElementsAre(plan[0]));
  EXPECT_THAT(f.Rest(), ElementsAre(plan[1]));
  f.follower.EndStep(0, 0);
  f.Step(training);
  f.Begin(Reads(0));
  EXPECT_THAT(f.Due(), ElementsAre(plan[0]));
  EXPECT_EQ(f.follower.version(), 1u);
}

TEST(PlanFollower, WithoutAMatchingPositionNothingIsDue) {
  Follower f;
  f.Step({Reads(0), Reads(1)});
  ASSERT_EQ(f.Offer({{0, Action::kLoad, 1}}, 1, f.follower.digest()), "");
  f.Step({Reads(0), Reads(1)});
  f.Begin(Reads(7));
  EXPECT_THAT(f.Due(), IsEmpty());
  EXPECT_THAT(f.Rest(), IsEmpty());
}

TEST(PlanFollower, RefusesAPlanForAnotherTrace) {
  Follower f;
  EXPECT_THAT(f.Offer({}, 1, 0), HasSubstr("another trace"));  // nothing was recorded yet
  f.Step({Reads(0)});
  const uint64_t digest = f.follower.digest();
  EXPECT_THAT(f.Offer({}, 1, 0), HasSubstr("another trace"));
  EXPECT_THAT(f.Offer({}, 1, digest + 1), HasSubstr("another trace"));
  EXPECT_EQ(f.Offer({}, 2, digest), "");
  f.Step({Reads(1)});
  EXPECT_EQ(f.follower.version(), 2u);
  // The daemon's answer may come a step late.
  EXPECT_EQ(f.Offer({}, 3, digest), "");
  f.Step({Reads(1)});
  EXPECT_EQ(f.follower.version(), 3u);
  EXPECT_THAT(f.Offer({}, 4, digest), HasSubstr("another trace"));
  EXPECT_EQ(f.follower.version(), 3u);
}

TEST(PlanFollower, KnowsTheDistanceToTheNextUse) {
  Follower f;
  EXPECT_FALSE(f.follower.knows_trace());
  EXPECT_EQ(f.follower.NextUse(0), UINT32_MAX);
  f.Step({Reads(0), Reads(1), Reads(0), Reads(2)});
  EXPECT_TRUE(f.follower.knows_trace());
  EXPECT_EQ(f.follower.NextUse(0), 0u);
  EXPECT_EQ(f.follower.NextUse(2), 3u);
  EXPECT_EQ(f.follower.NextUse(9), UINT32_MAX);
  f.Begin(Reads(0));
  EXPECT_EQ(f.follower.NextUse(1), 0u);
  EXPECT_EQ(f.follower.NextUse(0), 1u);
  f.Begin(Reads(1));
  f.Begin(Reads(0));
  EXPECT_EQ(f.follower.NextUse(2), 0u);
  EXPECT_EQ(f.follower.NextUse(0), 1u);  // the next step's first
  EXPECT_EQ(f.follower.NextUse(1), 2u);
  f.Begin(Reads(2));
  EXPECT_EQ(f.follower.NextUse(0), 0u);
  EXPECT_EQ(f.follower.NextUse(2), 3u);
}

Group Both(uint32_t a, uint32_t b) { return {{a, kRead}, {b, kWrite}}; }

// Three weights forward and back with a gradient each, of which an evaluation uses the weights alone, two at a time.
class Sections : public ::testing::Test {
 protected:
  void SetUp() override {
    f.Step(training);
    ASSERT_EQ(f.Offer(plan, 1, f.follower.digest()), "");
    f.Step(training);
    digest = f.follower.digest();
    auto trace = std::make_shared<policy::Trace>();
    for (const Group& group : evaluation) trace->entries.push_back({group, 0, 0});
    auto section = std::make_shared<policy::Plan>();
    section->actions = round;
    f.follower.SetSection(2, trace, section);
  }
  void Forward() {
    for (const Group& group : evaluation) {
      f.Begin(group);
      f.Due();
    }
  }

  const std::vector<Group> training = {Reads(0), Reads(1), Reads(2), Both(2, 12), Both(1, 11), Both(0, 10)};
  const std::vector<Group> evaluation = {Reads(0), Reads(1), Reads(2)};
  const std::vector<Action> plan = {{0, Action::kLoad, 1}, {3, Action::kUnload, 2}, {5, Action::kLoad, 2}};
  const std::vector<Action> round = {{0, Action::kUnload, 0}, {1, Action::kLoad, 2}, {1, Action::kUnload, 1},
                                     {2, Action::kLoad, 0},   {2, Action::kUnload, 2}, {2, Action::kLoad, 1}};
  Follower f;
  uint64_t digest = 0;
};

TEST_F(Sections, AnEvaluationIsFollowedRoundAndRound) {
  Forward();
  EXPECT_FALSE(f.follower.in_section()) << "as the training's own forward";
  f.Begin(Reads(0));
  EXPECT_TRUE(f.follower.in_section());
  // What it does not use goes; of its own the plan's last word is that 0 and 1 are here and 2 is not.
  EXPECT_THAT(f.Due(), ElementsAre(Action{0, Action::kUnload, 10}, Action{0, Action::kUnload, 11},
                                   Action{0, Action::kUnload, 12}, Action{0, Action::kUnload, 2},
                                   Action{0, Action::kLoad, 0}, Action{0, Action::kLoad, 1}));
  EXPECT_THAT(f.Due(), IsEmpty());
  EXPECT_EQ(f.follower.NextUse(2), 1u);
  EXPECT_EQ(f.follower.NextUse(0), 2u);
  EXPECT_EQ(f.follower.NextUse(12), UINT32_MAX) << "the first to go";
  for (int i = 0; i < 3; ++i) {
    f.Begin(Reads(1));
    EXPECT_THAT(f.Due(), ElementsAre(round[0], round[1]));
    f.Begin(Reads(2));
    EXPECT_THAT(f.Due(), ElementsAre(round[2], round[3]));
    f.Begin(Reads(0));
    EXPECT_THAT(f.Due(), ElementsAre(round[4], round[5]));
  }
  EXPECT_EQ(f.follower.departures(), 0u);
}

TEST_F(Sections, TheTrainingThatFollowsGoesOnWhereItLeavesTheSection) {
  for (int i = 0; i < 4; ++i) Forward();  // the last one is the training's
  f.Begin(Both(2, 12));
  EXPECT_FALSE(f.follower.in_section());
  EXPECT_EQ(f.follower.cursor(), 3u);
  // The device as the plan has it there: all of it, in the order of use.
  EXPECT_THAT(f.Due(), ElementsAre(Action{3, Action::kLoad, 2}, Action{3, Action::kLoad, 12}, Action{3, Action::kLoad, 1},
                                   Action{3, Action::kLoad, 11}, Action{3, Action::kLoad, 0}, Action{3, Action::kLoad, 10}));
  f.Begin(Both(1, 11));
  EXPECT_THAT(f.Due(), ElementsAre(plan[1]));
  f.Begin(Both(0, 10));
  EXPECT_THAT(f.Due(), ElementsAre(plan[2]));
  EXPECT_EQ(f.follower.departures(), 0u);
  const auto trace = f.follower.EndStep(0, 0);
  EXPECT_EQ(trace->entries.size(), 4u * 3 + 3);
  EXPECT_EQ(f.follower.digest(), policy::Digest(*trace));
  // It is no new way to train: the next step is expected as before.
  f.Begin(Reads(0));
  EXPECT_THAT(f.Due(), ElementsAre(plan[0]));
  f.Begin(Reads(1));
  f.Begin(Reads(2));
  f.Begin(Both(2, 12));
  EXPECT_EQ(f.follower.cursor(), 3u);
  EXPECT_EQ(f.follower.departures(), 0u);
  EXPECT_EQ(f.Offer(plan, 2, digest), "");
}

TEST_F(Sections, WhatComesInEveryStepBecomesTheStep) {
  for (int step = 0; step < 2; ++step) {
    for (int i = 0; i < 3; ++i) Forward();
    for (size_t i = 3; i < training.size(); ++i) f.Begin(training[i]);
    f.follower.EndStep(0, 0);
  }
  EXPECT_EQ(f.Offer({}, 2, f.follower.digest()), "");
  Forward();
  f.Begin(Reads(0));
  EXPECT_FALSE(f.follower.in_section());
  EXPECT_EQ(f.follower.cursor(), 3u);
}

TEST_F(Sections, AStepThatEndsInsideOneIsFollowedByAWholeOne) {
  Forward();
  Forward();
  EXPECT_TRUE(f.follower.in_section());
  EXPECT_THAT(f.Rest(), IsEmpty());
  f.follower.EndStep(0, 0);
  EXPECT_FALSE(f.follower.in_section());
  f.Begin(Reads(0));
  // Behind the plan's first action; its last word on 2 is that it is here.
  EXPECT_THAT(f.Due(), ElementsAre(Action{0, Action::kLoad, 0}, Action{0, Action::kLoad, 1}, Action{0, Action::kLoad, 2},
                                   Action{0, Action::kLoad, 12}, Action{0, Action::kLoad, 11}, Action{0, Action::kLoad, 10}));
  f.Begin(Reads(1));
  EXPECT_THAT(f.Due(), IsEmpty());
}

TEST_F(Sections, UsesThatAreInNeitherAreDepartures) {
  Forward();
  f.Begin(Reads(0));
  f.Due();
  f.Begin(Reads(77));
  EXPECT_FALSE(f.follower.in_section());
  EXPECT_EQ(f.follower.departures(), 1u);
  f.Begin(Both(2, 12));
  EXPECT_EQ(f.follower.cursor(), 3u);
}

TEST_F(Sections, ADepartureInsideTheTrainingIsNone) {
  f.Begin(Reads(0));
  f.Begin(Reads(2));  // a layer is left out
  EXPECT_FALSE(f.follower.in_section());
  EXPECT_EQ(f.follower.departures(), 1u);
  f.Begin(Both(2, 12));
  EXPECT_EQ(f.follower.cursor(), 3u);
  // Without a plan for the steps there is nothing to come back to.
  Follower g;
  g.Step(training);
  auto trace = std::make_shared<policy::Trace>();
  for (const Group& group : evaluation) trace->entries.push_back({group, 0, 0});
  g.follower.SetSection(2, trace, std::make_shared<policy::Plan>());
  for (const Group& group : evaluation) g.Begin(group);
  g.Begin(Reads(0));
  EXPECT_FALSE(g.follower.in_section());
}

TEST_F(Sections, OneOfWhichAllFitsSendsNothingAway) {
  auto trace = std::make_shared<policy::Trace>();
  for (const Group& group : evaluation) trace->entries.push_back({group, 0, 0});
  f.follower.SetSection(2, trace, std::make_shared<policy::Plan>());
  Forward();
  f.Begin(Reads(0));
  EXPECT_TRUE(f.follower.in_section());
  EXPECT_THAT(f.Due(), ElementsAre(Action{0, Action::kLoad, 0}, Action{0, Action::kLoad, 1}, Action{0, Action::kLoad, 2}));
  // Another plan for it while it is followed.
  f.follower.SetSection(2, trace, std::make_shared<policy::Plan>());
  EXPECT_FALSE(f.follower.in_section());
  f.Begin(Reads(1));
  f.Begin(Reads(2));
  EXPECT_EQ(f.follower.cursor(), 2u);
}

// An evaluation over a whole data set has no step's end: what is recorded of it must have one.
TEST(PlanFollower, AStepWithoutAnEndIsNotRecordedForEver) {
  Follower f;
  const std::vector<Group> training = {Reads(0), Reads(1)};
  f.Step(training);
  const uint64_t digest = f.follower.digest();
  for (size_t i = 0; i < PlanFollower::kMostPositions + 1000; ++i) f.Begin(Reads(i % 2));
  f.follower.MarkDiscard(1);
  EXPECT_LE(f.follower.EndStep(0, 0)->entries.size(), PlanFollower::kMostPositions);
  // What was cut off is no period to expect.
  EXPECT_EQ(f.follower.digest(), digest);
  EXPECT_EQ(f.follower.NextUse(1), 1u);
  f.Step(training);
  EXPECT_EQ(f.follower.digest(), digest);
}

}  // namespace
}  // namespace misa
