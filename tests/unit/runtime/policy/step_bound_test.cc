// StepBound's closed form: known steps, and beside the bound and the plan of a trace of the same step.
#include "runtime/policy/step_bound.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/policy/planner.h"
#include "tests/unit/runtime/policy/workloads.h"

namespace misa::policy {
namespace {

using ::testing::HasSubstr;

StepShape Shape(UpdatePlace update) {
  StepShape shape;
  shape.update = update;
  shape.weight_bytes = 100;
  shape.gradient_bytes = 100;
  shape.optimizer_bytes = 200;
  shape.forward_seconds = 1;
  shape.backward_seconds = 2;
  shape.link = {100, 100, 80, 80};
  return shape;
}

StepLimit Limit(const StepShape& shape, const StepKept& kept) {
  const Result<StepLimit> limit = StepBound(shape, kept);
  EXPECT_TRUE(limit.ok()) << limit.error;
  return limit.value;
}

TEST(StepBound, FrozenWeightsComeTwiceAndNeverGo) {
  const StepLimit limit = Limit(Shape(UpdatePlace::kFrozen), {40, 30, 0, 0});
  EXPECT_DOUBLE_EQ(limit.load_bytes, 60 + 70);
  EXPECT_DOUBLE_EQ(limit.unload_bytes, 0);
  EXPECT_DOUBLE_EQ(limit.step_seconds, 3);
  EXPECT_EQ(limit.limited_by, "compute");
}

TEST(StepBound, EachPlaceOfTheUpdateMovesItsOwn) {
  const StepKept kept{40, 30, 50, 0};
  StepShape shape = Shape(UpdatePlace::kInBackward);
  EXPECT_DOUBLE_EQ(Limit(shape, kept).load_bytes, 60 + 70 + 150);
  EXPECT_DOUBLE_EQ(Limit(shape, kept).unload_bytes, 150 + 70);
  shape.host_recasts = true;
  EXPECT_DOUBLE_EQ(Limit(shape, kept).unload_bytes, 150);
  shape = Shape(UpdatePlace::kDeferred);
  EXPECT_DOUBLE_EQ(Limit(shape, {40, 30, 50, 10}).load_bytes, 60 + 70 + 150 + 90);
  EXPECT_DOUBLE_EQ(Limit(shape, {40, 30, 50, 10}).unload_bytes, 150 + 90 + 70);
  shape.update = UpdatePlace::kEager;
  EXPECT_DOUBLE_EQ(Limit(shape, {40, 30, 50, 10}).load_bytes, 60 + 70 + 60 + 150 + 90);
  shape = Shape(UpdatePlace::kHost);
  shape.host_seconds = 9;
  EXPECT_DOUBLE_EQ(Limit(shape, {0, 30, 0, 0}).load_bytes, 100 + 70);
  EXPECT_DOUBLE_EQ(Limit(shape, {0, 30, 0, 0}).unload_bytes, 100);
  EXPECT_DOUBLE_EQ(Limit(shape, {0, 30, 0, 0}).step_seconds, 9);
  EXPECT_EQ(Limit(shape, {0, 30, 0, 0}).limited_by, "host");
}

TEST(StepBound, ASampledStepCopiesOnlyWhatItUpdates) {
  StepShape shape = Shape(UpdatePlace::kInBackward);
  shape.updated_share = 0.03;
  shape.optimizer_bytes = 6;
  EXPECT_DOUBLE_EQ(Limit(shape, {0, 0, 0, 0}).unload_bytes, 6 + 3);
  EXPECT_DOUBLE_EQ(Limit(shape, {40, 30, 6, 0}).unload_bytes, 0);
}

TEST(StepBound, AForwardShorterThanItsLoadsWaits) {
  StepShape shape = Shape(UpdatePlace::kFrozen);
  shape.link = {50, 50, 50, 50};
  const StepLimit limit = Limit(shape, {0, 100, 0, 0});
  EXPECT_DOUBLE_EQ(limit.step_seconds, 2 + 2) << "100 bytes at 50 a second for a forward of 1 s";
  EXPECT_EQ(limit.limited_by, "phase");
}

TEST(StepBound, PhaseSecondsIsTheSlowestPrefix) {
  EXPECT_DOUBLE_EQ(PhaseSeconds({0, 0, 30}, {1, 1, 1}, 10), 4);
  EXPECT_DOUBLE_EQ(PhaseSeconds({30, 0, 0}, {1, 1, 1}, 10), 6) << "what is missing first cannot hide";
  EXPECT_DOUBLE_EQ(PhaseSeconds({0, 0, 10}, {1, 1, 1}, 10), 3);
  EXPECT_DOUBLE_EQ(PhaseSeconds({}, {}, 10), 0);
}

TEST(StepBound, ADuplexLinkIsAsFastAsItsBetterWay) {
  EXPECT_DOUBLE_EQ(LinkSeconds(100, 100, {100, 100, 80, 80}), 1.25);
  EXPECT_DOUBLE_EQ(LinkSeconds(100, 100, {100, 100, 40, 40}), 2) << "one after the other";
  EXPECT_DOUBLE_EQ(LinkSeconds(100, 0, {100, 100, 80, 80}), 1);
  EXPECT_DOUBLE_EQ(HostAdamSeconds(1e9, 28e9), 1);
}

TEST(StepBound, KeepsWhatSavesMost) {
  StepShape shape = Shape(UpdatePlace::kDeferred);
  StepKept kept = KeepMost(shape, {60, 30});
  EXPECT_DOUBLE_EQ(kept.weights_at_start_bytes, 60);
  EXPECT_DOUBLE_EQ(kept.weights_at_turn_bytes, 30);
  EXPECT_DOUBLE_EQ(kept.gradient_bytes + kept.optimizer_bytes, 0);
  kept = KeepMost(shape, {250, 150});
  EXPECT_DOUBLE_EQ(kept.weights_at_turn_bytes, 100);
  EXPECT_DOUBLE_EQ(kept.gradient_bytes, 100);
  EXPECT_DOUBLE_EQ(kept.optimizer_bytes, 50);
  kept = KeepMost(shape, {1000, 1000});
  EXPECT_DOUBLE_EQ(Limit(shape, kept).load_bytes, 0);
  EXPECT_DOUBLE_EQ(Limit(shape, kept).unload_bytes, 0);
  kept = KeepMost(shape, {-5, -5});
  EXPECT_DOUBLE_EQ(kept.weights_at_start_bytes, 0);
}

TEST(StepBound, IsNearTheBoundOfATraceAndBelowItsPlan) {
  for (const double budget : {700e6, 900e6, 1200e6, 1800e6, 2600e6, 4000e6}) {
    TrainingStep step;
    step.least_other_bytes = 0;
    step.most_other_bytes = 300'000'000;
    step.budget_bytes = static_cast<uint64_t>(budget);
    StepShape shape;
    shape.update = UpdatePlace::kDeferred;
    shape.weight_bytes = static_cast<double>(step.weight_bytes) * step.matrices;
    shape.gradient_bytes = shape.weight_bytes;
    shape.optimizer_bytes = 2 * shape.weight_bytes;
    shape.forward_seconds = step.compute_seconds / 3;
    shape.backward_seconds = step.compute_seconds - shape.forward_seconds;
    shape.link = step.link;
    const Result<StepLimit> checked = StepBound(shape, StepRoom{budget, budget - 300e6});
    ASSERT_TRUE(checked.ok()) << checked.error;
    const StepLimit& limit = checked.value;
    const Plan plan = MakePlan(Deferred(step)).value;
    const Bound bound = LowerBound(Deferred(step)).value;
    const double one_matrix = 4 * static_cast<double>(step.weight_bytes);
    EXPECT_LE(limit.load_bytes, static_cast<double>(plan.loaded_bytes)) << budget;
    EXPECT_LE(limit.unload_bytes, static_cast<double>(plan.unloaded_bytes)) << budget;
    EXPECT_LE(limit.step_seconds, plan.step_seconds * (1 + 1e-9)) << budget;
    EXPECT_NEAR(limit.load_bytes, static_cast<double>(bound.load_bytes), 2 * one_matrix) << budget;
    EXPECT_NEAR(limit.unload_bytes, static_cast<double>(bound.unload_bytes), 2 * one_matrix) << budget;
  }
}

TEST(StepBound, AReportTakesTheLowerOfWhatWasMeasuredAndTheTracesBound) {
  const Bound bound{400, 100, 6};
  EXPECT_DOUBLE_EQ(MeasuredStepBound(3, bound, {0, 0, 0, 0}), 3) << "no rate was measured";
  EXPECT_DOUBLE_EQ(MeasuredStepBound(3, bound, {100, 0, 0, 0}), 4);
  EXPECT_DOUBLE_EQ(MeasuredStepBound(3, bound, {100, 20, 0, 0}), 5);
  EXPECT_DOUBLE_EQ(MeasuredStepBound(3, bound, {100, 20, 10, 5}), 6) << "both ways at once are slow";
  EXPECT_DOUBLE_EQ(MeasuredStepBound(9, bound, {100, 20, 10, 5}), 6) << "a slow early step";
  EXPECT_DOUBLE_EQ(MeasuredStepBound(9, {400, 100, 0}, {100, 20, 0, 0}), 9) << "no bound of a trace yet";
}

TEST(StepBound, RefusesWhatIsNoAmount) {
  for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity(), -1.0}) {
    StepShape shape = Shape(UpdatePlace::kDeferred);
    shape.weight_bytes = bad;
    EXPECT_THAT(StepBound(shape, StepKept{}).error, HasSubstr("weight bytes must be a finite number of at least 0"));
    shape = Shape(UpdatePlace::kDeferred);
    shape.link.load = bad;
    EXPECT_THAT(StepBound(shape, StepKept{}).error, HasSubstr("load rate must be a finite number"));
    EXPECT_THAT(StepBound(Shape(UpdatePlace::kDeferred), StepKept{bad, 0, 0, 0}).error, HasSubstr("kept at the start"));
    EXPECT_THAT(StepBound(Shape(UpdatePlace::kDeferred), StepRoom{10, bad}).error, HasSubstr("room for facets"));
  }
  StepShape shape = Shape(UpdatePlace::kDeferred);
  shape.updated_share = 1.5;
  EXPECT_THAT(StepBound(shape, StepKept{}).error, HasSubstr("at most 1"));
  shape = Shape(UpdatePlace::kDeferred);
  shape.link.duplex_unload = 0;
  EXPECT_THAT(StepBound(shape, StepKept{}).error, HasSubstr("duplex unload rate"));
}

}  // namespace
}  // namespace misa::policy
