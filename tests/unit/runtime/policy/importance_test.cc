#include "runtime/policy/importance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace misa::policy {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Heat = ImportanceTracker::Heat;

GradientStatistics OfNorm(double scaled_squared_norm) { return {0, scaled_squared_norm * 4, 4}; }

TEST(GradientStatistics, VarianceAndScaledNorm) {
  // 1, 2, 3, 6
  const GradientStatistics statistics{12, 50, 4};
  EXPECT_DOUBLE_EQ(Variance(statistics), 12.5 - 9);
  EXPECT_DOUBLE_EQ(ScaledSquaredNorm(statistics), 12.5);
  EXPECT_EQ(Variance({}), 0);
  EXPECT_EQ(ScaledSquaredNorm({}), 0);
  EXPECT_EQ(Variance({3, 2.9999999, 3}), 0) << "rounding does not make it negative";
}

TEST(ImportanceTracker, SmoothsFromTheFirstObservationOn) {
  ImportanceTracker tracker(2, {.alpha = 0.25, .signal = Signal::kSquaredNorm, .window = 1});
  EXPECT_EQ(tracker.Observe(0, OfNorm(8)), "");
  EXPECT_DOUBLE_EQ(tracker.importance(0), 8);
  EXPECT_EQ(tracker.Observe(0, OfNorm(4)), "");
  EXPECT_DOUBLE_EQ(tracker.importance(0), 7);
  EXPECT_EQ(tracker.Observe(0, {}), "");
  EXPECT_DOUBLE_EQ(tracker.importance(0), 7) << "no gradient says nothing";
  EXPECT_DOUBLE_EQ(tracker.importance(1), 0);
}

TEST(ImportanceTracker, TakesTheVarianceByDefault) {
  ImportanceTracker tracker(1, {});
  EXPECT_EQ(tracker.Observe(0, {12, 50, 4}), "");
  EXPECT_DOUBLE_EQ(tracker.importance(0), 3.5);
}

TEST(ImportanceTracker, RefusesWhatIsNotFinite) {
  ImportanceTracker tracker(1, {});
  tracker.Observe(0, {12, 50, 4});
  const double nan = std::nan("");
  const double infinity = std::numeric_limits<double>::infinity();
  for (const GradientStatistics& bad : {GradientStatistics{nan, 1, 4}, GradientStatistics{1, nan, 4},
                                        GradientStatistics{infinity, 1, 4}, GradientStatistics{1, infinity, 4},
                                        GradientStatistics{1, -1, 4}}) {
    EXPECT_THAT(tracker.Observe(0, bad), HasSubstr("not finite"));
  }
  EXPECT_THAT(tracker.Observe(0, {1e200, 1, 4}), "") << "a variance below 0 is 0";
  EXPECT_THAT(tracker.Observe(1, {1, 1, 4}), HasSubstr("no module 1"));
  EXPECT_TRUE(std::isfinite(tracker.importance(0)));
}

TEST(ImportanceTracker, EachTaskHasItsOwnAndTheWholeIsTheirWeightedMean) {
  ImportanceTracker tracker(2, {.alpha = 0.5, .signal = Signal::kSquaredNorm, .window = 1});
  EXPECT_EQ(tracker.BeginStep("a", 3), "");
  tracker.Observe(0, OfNorm(8));
  EXPECT_EQ(tracker.importance(0), 8) << "alone it is the whole";
  EXPECT_EQ(tracker.BeginStep("b", 1), "");
  tracker.Observe(1, OfNorm(4));
  EXPECT_DOUBLE_EQ(tracker.importance(0), 6);
  EXPECT_DOUBLE_EQ(tracker.importance(1), 1);
  EXPECT_THAT(tracker.Ranks(), ElementsAre(1, 0));
  EXPECT_EQ(tracker.BeginStep("a", 1), "");
  tracker.Observe(0, OfNorm(4));
  EXPECT_DOUBLE_EQ(tracker.importance(0), 3) << "the mean of 8 and 4, and half the weight";
  EXPECT_THAT(tracker.shares(), ElementsAre(0, 0.5, 0.5));
  tracker.Resize(3);
  EXPECT_EQ(tracker.Observe(2, OfNorm(2)), "");
  EXPECT_DOUBLE_EQ(tracker.importance(2), 1);
  EXPECT_THAT(tracker.BeginStep("a", std::nan("")), HasSubstr("weight"));
  EXPECT_EQ(tracker.tasks()[0].steps, 1u) << "it belongs to none then";
}

TEST(ImportanceTracker, RanksWithTies) {
  ImportanceTracker tracker(5, {.signal = Signal::kSquaredNorm});
  const double values[] = {3, 1, 3, 9, 2};
  for (size_t i = 0; i < 5; ++i) {
    tracker.Observe(i, OfNorm(values[i]));
  }
  EXPECT_THAT(tracker.Ranks(), ElementsAre(0.625, 0, 0.625, 1, 0.25));
  EXPECT_THAT(ImportanceTracker(1, {}).Ranks(), ElementsAre(0.5));
  EXPECT_THAT(ImportanceTracker(0, {}).Ranks(), ElementsAre());
}

TEST(ImportanceTracker, HeatHasHysteresis) {
  ImportanceTracker tracker(3, {.alpha = 1, .signal = Signal::kSquaredNorm, .window = 1});
  EXPECT_THAT(tracker.UpdateHeat(), ElementsAre(Heat::kWarm, Heat::kWarm, Heat::kWarm));
  const auto observe = [&](double a, double b, double c) {
    tracker.Observe(0, OfNorm(a));
    tracker.Observe(1, OfNorm(b));
    tracker.Observe(2, OfNorm(c));
    return tracker.UpdateHeat();
  };
  EXPECT_THAT(observe(1, 2, 3), ElementsAre(Heat::kCold, Heat::kWarm, Heat::kHot));
  EXPECT_THAT(observe(2, 1, 3), ElementsAre(Heat::kCold, Heat::kCold, Heat::kHot)) << "0 stays cold in the middle";
  EXPECT_THAT(observe(3, 1, 2), ElementsAre(Heat::kHot, Heat::kCold, Heat::kHot)) << "2 stays hot in the middle";
}

TEST(ImportanceTracker, RefusesImpossibleOptionsAndKeepsTheOld) {
  ImportanceTracker tracker(1, {.alpha = 0.5, .signal = Signal::kSquaredNorm, .window = 1});
  EXPECT_THAT(tracker.SetOptions({.alpha = 0}), HasSubstr("alpha"));
  EXPECT_THAT(tracker.SetOptions({.alpha = std::nan("")}), HasSubstr("alpha"));
  EXPECT_THAT(tracker.SetOptions({.hot = 0.2, .cold = 0.3}), HasSubstr("cold"));
  EXPECT_THAT(tracker.SetOptions({.hot = 1.2}), HasSubstr("hot"));
  EXPECT_THAT(tracker.SetOptions({.window = 0}), HasSubstr("window"));
  EXPECT_THAT(tracker.SetOptions({.window = 10001}), HasSubstr("from 1 to 10000"));
  tracker.Observe(0, OfNorm(4));
  tracker.Observe(0, OfNorm(8));
  EXPECT_DOUBLE_EQ(tracker.importance(0), 6);
  EXPECT_EQ(tracker.SetOptions({.alpha = 1, .signal = Signal::kSquaredNorm, .window = 1}), "");
  tracker.Observe(0, OfNorm(8));
  EXPECT_DOUBLE_EQ(tracker.importance(0), 8);
}

TEST(ImportanceTracker, PoolsTheStatisticsOfItsWindow) {
  ImportanceTracker tracker(2, {.alpha = 1, .signal = Signal::kSquaredNorm, .window = 3});
  tracker.SetWindow(1, 2);
  const double values[] = {9, 3, 6, 0, 12};
  const double pooled[] = {9, 6, 6, 3, 6};    // of the last three
  const double shorter[] = {9, 6, 4.5, 3, 6};  // of the last two
  for (size_t i = 0; i < 5; ++i) {
    tracker.Observe(0, OfNorm(values[i]));
    tracker.Observe(1, OfNorm(values[i]));
    EXPECT_DOUBLE_EQ(tracker.importance(0), pooled[i]) << i;
    EXPECT_DOUBLE_EQ(tracker.importance(1), shorter[i]) << i;
  }
  tracker.Observe(0, {});
  EXPECT_DOUBLE_EQ(tracker.importance(0), 6) << "a step without a gradient takes no place in it";
}

TEST(ImportanceTracker, TheVarianceOfAWindowHasTheStepsMeansInIt) {
  ImportanceTracker tracker(1, {.alpha = 1, .window = 2});
  tracker.Observe(0, {4, 4, 4});  // four times 1
  EXPECT_DOUBLE_EQ(tracker.importance(0), 0);
  tracker.Observe(0, {-4, 4, 4});  // four times -1
  EXPECT_DOUBLE_EQ(tracker.importance(0), 1);
}

TEST(PooledStatistics, AHugeValueLeavesNothingBehind) {
  PooledStatistics pool;
  pool.Push({1e200, 1e300, 1}, 4);
  for (int i = 0; i < 100; ++i) {
    pool.Push({1, 2, 3}, 4);
    ASSERT_LE(pool.size(), 4u);
  }
  EXPECT_EQ(pool.pooled().sum, 4);
  EXPECT_EQ(pool.pooled().sum_squares, 8);
  EXPECT_EQ(pool.pooled().count, 12u);
  pool.Push({1, 2, 3}, 1);
  EXPECT_EQ(pool.pooled().count, 3u) << "a shorter window from here on";
}

TEST(ImportanceTracker, Resizes) {
  ImportanceTracker tracker(1, {});
  tracker.Observe(0, {12, 50, 4});
  tracker.Resize(3);
  EXPECT_DOUBLE_EQ(tracker.importance(0), 3.5);
  EXPECT_EQ(tracker.Observe(2, {12, 50, 4}), "");
  EXPECT_EQ(tracker.UpdateHeat().size(), 3u);
}

}  // namespace
}  // namespace misa::policy
