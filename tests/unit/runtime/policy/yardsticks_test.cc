// The yardsticks' known values, what mixed sizes and writes do to them, and the planner beside them.
#include "runtime/policy/yardsticks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "runtime/policy/planner.h"
#include "runtime/policy/trace_kinds.h"
#include "tests/unit/runtime/policy/workloads.h"

namespace misa::policy {
namespace {

using ::testing::HasSubstr;

CacheQuestion Question(const TraceOptions& options, double fit) {
  const Result<GeneratedTrace> made = GenerateTrace(options);
  EXPECT_TRUE(made.ok()) << made.error;
  CacheQuestion question;
  question.facet_bytes = made.value.facet_bytes;
  question.trace = made.value.trace;
  question.ranks = made.value.ranks;
  question.capacity_bytes = static_cast<uint64_t>(static_cast<double>(made.value.total_bytes) * fit / options.units);
  return question;
}

CacheAnswer Answer(CacheQuestion question, CachePolicy policy) {
  question.policy = policy;
  const Result<CacheAnswer> answer = AskCache(question);
  EXPECT_TRUE(answer.ok()) << NameOf(policy) << ": " << answer.error;
  return answer.value;
}

double Misses(TraceKind kind, CachePolicy policy) {
  TraceOptions options;
  options.kind = kind;
  return Answer(Question(options, 38), policy).misses_per_period;
}

// 40 equal units, 38 fit.
TEST(Yardsticks, KnownValuesOfThreePass) {
  EXPECT_DOUBLE_EQ(Misses(TraceKind::kThreePass, CachePolicy::kLru), 44);
  EXPECT_DOUBLE_EQ(Misses(TraceKind::kThreePass, CachePolicy::kBelady), 6);
  EXPECT_DOUBLE_EQ(Misses(TraceKind::kThreePass, CachePolicy::kPlanner), 6);
}

TEST(Yardsticks, KnownValuesOfZigZag) {
  EXPECT_DOUBLE_EQ(Misses(TraceKind::kZigZag, CachePolicy::kLru), 4);
  EXPECT_DOUBLE_EQ(Misses(TraceKind::kZigZag, CachePolicy::kBelady), 4);
  EXPECT_DOUBLE_EQ(Misses(TraceKind::kZigZag, CachePolicy::kPlanner), 4);
}

TEST(Yardsticks, KnownValuesOfForwardOnly) {
  EXPECT_DOUBLE_EQ(Misses(TraceKind::kForwardOnly, CachePolicy::kLru), 40);
  // Each miss leaves all but one unit of the 39 others in place: 40 / 39 of the two that do not fit.
  EXPECT_NEAR(Misses(TraceKind::kForwardOnly, CachePolicy::kBelady), 2.0 * 40 / 39, 1e-9);
  // A plan of one period cannot load less than 3: a unit stays in each period or in none. A cycle of 39 does as Belady.
  EXPECT_NEAR(Misses(TraceKind::kForwardOnly, CachePolicy::kPlanner), 2.0 * 40 / 39, 1e-9);
}

TEST(Yardsticks, AOnePeriodPlanOfForwardOnlyLoadsThree) {
  TraceOptions options;
  options.kind = TraceKind::kForwardOnly;
  CacheQuestion question = Question(options, 38);
  question.most_cycle_periods = 1;
  EXPECT_DOUBLE_EQ(Answer(question, CachePolicy::kPlanner).misses_per_period, 3);
}

TEST(Yardsticks, TheBoundIsBeladyOnUnits) {
  const auto bound = [](TraceKind kind) {
    TraceOptions options;
    options.kind = kind;
    return static_cast<double>(LowerBound(CacheInput(Question(options, 38))).value.load_bytes);
  };
  EXPECT_DOUBLE_EQ(bound(TraceKind::kThreePass), 6e6);
  EXPECT_DOUBLE_EQ(bound(TraceKind::kZigZag), 4e6);
  EXPECT_DOUBLE_EQ(bound(TraceKind::kForwardOnly), std::floor(80e6 / 39));
}

TEST(Yardsticks, TheFirstPeriodIsCold) {
  TraceOptions options;
  options.units = 3;
  for (const CachePolicy policy : {CachePolicy::kLru, CachePolicy::kBelady, CachePolicy::kPlanner}) {
    const CacheAnswer answer = Answer(Question(options, 3), policy);
    EXPECT_EQ(answer.periods[0].misses, 3u);
    EXPECT_EQ(answer.periods[1], CachePeriod{});
    EXPECT_DOUBLE_EQ(answer.misses_per_period, 0);
  }
}

TEST(Yardsticks, HotModulesStayAndColdOnesGoFirst) {
  // Facet 0 is used longest ago whenever room is short; its heat decides what that means.
  CacheQuestion question;
  question.facet_bytes = {10, 10, 10};
  question.trace.entries = {{{{0, kRead}}, 1, 0}, {{{1, kRead}}, 1, 0}, {{{2, kRead}}, 1, 0}};
  question.capacity_bytes = 20;
  question.ranks = {1, 0, 0};
  CacheAnswer answer = Answer(question, CachePolicy::kLruThreshold);
  EXPECT_DOUBLE_EQ(answer.misses_per_period, 2) << "only the cold ones take turns";
  EXPECT_DOUBLE_EQ(Answer(question, CachePolicy::kLru).misses_per_period, 3);
  question.ranks = {0.5, 0.5, 0.5};
  EXPECT_DOUBLE_EQ(Answer(question, CachePolicy::kLruThreshold).misses_per_period, 3) << "all warm: LRU";
  question.ranks = {0.74, 0.36, 0.5};
  EXPECT_DOUBLE_EQ(Answer(question, CachePolicy::kLruThreshold).misses_per_period, 3) << "between the thresholds";
  question.ranks = {0.75, 0.75, 0.75};
  EXPECT_DOUBLE_EQ(Answer(question, CachePolicy::kLruThreshold).misses_per_period, 3) << "room must be made";
}

TEST(Yardsticks, OnlyDirtyContentIsCopiedDown) {
  CacheQuestion question;
  question.facet_bytes = {10, 30};
  question.trace.entries = {{{{0, kRead | kWrite}}, 1, 0}, {{{1, kRead}}, 1, 0}};
  question.capacity_bytes = 30;
  for (const CachePolicy policy :
       {CachePolicy::kLru, CachePolicy::kBelady, CachePolicy::kPlanner, CachePolicy::kOptimum}) {
    const CacheAnswer answer = Answer(question, policy);
    EXPECT_DOUBLE_EQ(answer.loaded_bytes_per_period, 40) << NameOf(policy);
    EXPECT_DOUBLE_EQ(answer.unloaded_bytes_per_period, 10) << NameOf(policy);
  }
}

TEST(Yardsticks, ContentThatIsBornOrDeadIsNotMoved) {
  CacheQuestion question;
  question.facet_bytes = {10, 10};
  question.trace.entries = {
      {{{0, kCreate}}, 1, 0}, {{{0, kRead | kDiscard}}, 1, 0}, {{{1, kCreate}}, 1, 0}, {{{1, kRead | kDiscard}}, 1, 0}};
  question.capacity_bytes = 10;
  for (const CachePolicy policy :
       {CachePolicy::kLru, CachePolicy::kBelady, CachePolicy::kPlanner, CachePolicy::kOptimum}) {
    EXPECT_DOUBLE_EQ(Answer(question, policy).loaded_bytes_per_period, 0) << NameOf(policy);
    EXPECT_DOUBLE_EQ(Answer(question, policy).unloaded_bytes_per_period, 0) << NameOf(policy);
  }
}

TEST(Yardsticks, NothingBeatsTheOptimumNorTheOptimumTheBound) {
  int apart = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    const PlanInput input = RandomTrace(seed);
    CacheQuestion question;
    question.facet_bytes = input.facet_bytes;
    question.trace = input.trace;
    question.capacity_bytes = input.budget_bytes;
    question.policy = CachePolicy::kOptimum;
    const Result<CacheAnswer> optimum = AskCache(question);
    if (!optimum.ok()) {
      EXPECT_THAT(optimum.error, HasSubstr("states"));
      continue;
    }
    const double least = optimum.value.loaded_bytes_per_period;
    ASSERT_GE(least, static_cast<double>(LowerBound(CacheInput(question)).value.load_bytes)) << "seed " << seed;
    for (const CachePolicy policy :
         {CachePolicy::kLru, CachePolicy::kLruThreshold, CachePolicy::kBelady, CachePolicy::kPlanner}) {
      const CacheAnswer answer = Answer(question, policy);
      ASSERT_TRUE(answer.repeats) << NameOf(policy) << " seed " << seed;
      ASSERT_GE(answer.loaded_bytes_per_period, least - 1e-9) << NameOf(policy) << " seed " << seed;
      apart += answer.loaded_bytes_per_period > least + 1e-9 ? 1 : 0;
    }
  }
  EXPECT_GT(apart, 100) << "the traces tell policies apart";
}

TEST(Yardsticks, APlanThatBreaksItsPromiseIsCaught) {
  TraceOptions options;
  options.units = 8;
  CacheQuestion question = Question(options, 4);
  question.policy = CachePolicy::kPlanner;
  Plan plan = MakePlan(CacheInput(question)).value;
  ASSERT_EQ(AskCache(question, plan).error, "");
  Plan without_loads = plan;
  std::erase_if(without_loads.actions, [](const Action& action) { return action.kind == Action::kLoad; });
  EXPECT_THAT(AskCache(question, without_loads).error, HasSubstr("lacks a load of facet"));
  Plan without_unloads = plan;
  std::erase_if(without_unloads.actions, [](const Action& action) { return action.kind == Action::kUnload; });
  EXPECT_THAT(AskCache(question, without_unloads).error, HasSubstr("there is room for"));
}

TEST(Yardsticks, RefusesWhatCannotBeAsked) {
  TraceOptions options;
  options.units = 4;
  const CacheQuestion good = Question(options, 2);
  const auto refusal = [](const CacheQuestion& question) { return AskCache(question).error; };
  CacheQuestion question = good;
  question.capacity_bytes = 999'999;
  EXPECT_THAT(refusal(question), HasSubstr("the smallest budget that works is 1000000 bytes"));
  question = good;
  question.facet_bytes[1] = 0;
  EXPECT_THAT(refusal(question), HasSubstr("size of 0 bytes"));
  question = good;
  question.trace.entries.clear();
  EXPECT_THAT(refusal(question), HasSubstr("no positions"));
  question = good;
  question.most_periods = 0;
  EXPECT_THAT(refusal(question), HasSubstr("at least 1 period"));
  question = good;
  question.policy = CachePolicy::kLruThreshold;
  question.ranks[0] = std::nan("");
  EXPECT_THAT(refusal(question), HasSubstr("rank must be in [0, 1]"));
  question.ranks = {0.5};
  EXPECT_THAT(refusal(question), HasSubstr("every facet needs one"));
  question = good;
  question.policy = CachePolicy::kLruThreshold;
  question.hot = 0.1;
  EXPECT_THAT(refusal(question), HasSubstr("0 <= cold <= hot <= 1"));
}

TEST(Yardsticks, NamesGoBothWays) {
  for (const char* name : {"lru", "lru-threshold", "belady", "planner", "optimum"}) {
    EXPECT_EQ(NameOf(*CachePolicyFromName(name)), name);
  }
  EXPECT_FALSE(CachePolicyFromName("fifo"));
}

}  // namespace
}  // namespace misa::policy
