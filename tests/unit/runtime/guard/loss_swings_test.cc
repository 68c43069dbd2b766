#include "runtime/guard/loss_swings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "runtime/policy/importance.h"
#include "runtime/sim/random.h"

namespace misa::guard {
namespace {

using ::testing::HasSubstr;
using Heat = policy::ImportanceTracker::Heat;

constexpr double kPi = 3.14159265358979323846;

template <typename Loss>
std::vector<double> Losses(Loss loss, int steps = 96) {
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) losses.push_back(loss(step));
  return losses;
}

TEST(FindSwing, FindsThePeriodUnderATrendAndNoise) {
  for (const int period : {5, 8, 13, 20, 31}) {
    for (uint64_t seed = 1; seed <= 10; ++seed) {
      sim::Random random(seed);
      const Swing swing =
          FindSwing(Losses([&](int step) {
                      return 6 - 0.01 * step + 0.3 * std::sin(2 * kPi * step / period) + random.Between(-0.2, 0.2);
                    }),
                    {});
      EXPECT_TRUE(swing.periodic) << "period " << period << " seed " << seed;
      EXPECT_NEAR(swing.period_steps, period, 1) << "seed " << seed;
    }
  }
}

TEST(FindSwing, OneBadStepIsNoSwing) {
  EXPECT_FALSE(FindSwing(Losses([](int step) { return step == 40 ? 9.0 : 3.0; }), {}).periodic);
  EXPECT_FALSE(FindSwing(Losses([](int step) { return step == 40 || step == 60 ? 9.0 : 3.0; }), {}).periodic)
      << "nor are two";
  sim::Random random(3);
  EXPECT_FALSE(
      FindSwing(Losses([&](int step) { return (step == 40 ? 9.0 : 3.0) + random.Between(-0.1, 0.1); }), {}).periodic);
}

TEST(FindSwing, NoiseAndFallsAreNone) {
  int walks = 0;
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    sim::Random random(seed);
    EXPECT_FALSE(FindSwing(Losses([&](int) { return 3 + random.Between(-1.0, 1.0); }), {}).periodic) << "seed " << seed;
    double walk = 5;
    walks += FindSwing(Losses([&](int) { return walk *= 1 + random.Between(-0.01, 0.01); }), {}).periodic;
  }
  EXPECT_LE(walks, 2) << "a walk may come by three equal hills";
  for (const double steps : {5.0, 20.0, 80.0}) {
    EXPECT_FALSE(FindSwing(Losses([&](int step) { return 3 + 5 * std::exp(-step / steps); }), {}).periodic) << steps;
  }
  EXPECT_FALSE(FindSwing(Losses([](int) { return 4.0; }), {}).periodic);
  EXPECT_FALSE(FindSwing(Losses([](int step) { return 4 + 0.001 * std::sin(step); }), {}).periodic)
      << "too small to matter";
  EXPECT_FALSE(FindSwing({}, {}).periodic);
}

TEST(SwingGuard, RaisesByLevelsAndUndoesAllWhenTheSwingsHaveEnded) {
  SwingGuard guard({}, {.most_levels = 2, .calm_steps = 150});
  const Thresholds base{0.1, 0.85};
  int at = 0;
  int raised = 0;
  for (; at < 400; ++at) raised += guard.Observe(3 + std::sin(2 * kPi * at / 12)) == SwingGuard::Change::kRaised;
  EXPECT_EQ(raised, 2) << "each level is given a window of its own to work";
  EXPECT_EQ(guard.level(), 2u);
  EXPECT_NEAR(guard.swing().period_steps, 12, 1);
  EXPECT_DOUBLE_EQ(guard.Apply(base).alpha, 0.1 * 1.5 * 1.5);
  EXPECT_DOUBLE_EQ(guard.Apply(base).hot, 0.95);
  int undone = 0;
  for (int step = 0; step < 400; ++step) undone += guard.Observe(3) == SwingGuard::Change::kUndone;
  EXPECT_EQ(undone, 1);
  EXPECT_EQ(guard.Apply(base), base);
}

TEST(SwingGuard, ARelapseTakesTwiceAsLongToBeOver) {
  SwingGuard guard({}, {.most_levels = 1, .calm_steps = 100});
  const auto swing_until_raised = [&] {
    for (int at = 0; guard.level() == 0 && at < 1000; ++at) guard.Observe(3 + std::sin(2 * kPi * at / 10));
    EXPECT_EQ(guard.level(), 1u);
  };
  const auto calm_until_undone = [&] {
    int steps = 0;
    while (guard.level() > 0 && steps < 5000) guard.Observe(3), ++steps;
    return steps;
  };
  swing_until_raised();
  const int first = calm_until_undone();
  swing_until_raised();
  EXPECT_EQ(calm_until_undone(), first + 100);
}

TEST(SwingGuard, NeverLowersWhatIsHighAlready) {
  SwingGuard guard({}, {.most_levels = 1});
  for (int at = 0; at < 200; ++at) guard.Observe(3 + std::sin(2 * kPi * at / 10));
  ASSERT_EQ(guard.level(), 1u);
  EXPECT_EQ(guard.Apply({1.0, 0.99}), (Thresholds{1.0, 0.99}));
  guard.Observe(std::nan(""));
  EXPECT_EQ(guard.level(), 1u);
}

TEST(SwingGuard, RefusesImpossibleOptions) {
  EXPECT_EQ(CheckSwings({}), "");
  EXPECT_THAT(CheckSwings({.window = 5}), HasSubstr("from 12 to 1024"));
  EXPECT_THAT(CheckSwings({.correlation = 1}), HasSubstr("below 1"));
  EXPECT_THAT(CheckSwings({.least_amplitude = -1}), HasSubstr("at least 0"));
  EXPECT_EQ(CheckResponse({}), "");
  EXPECT_THAT(CheckResponse({.alpha_factor = 0.5}), HasSubstr("at least 1"));
  EXPECT_THAT(CheckResponse({.hot_step = std::nan("")}), HasSubstr("at least 0"));
  EXPECT_THAT(CheckResponse({.most_hot = 2}), HasSubstr("up to 1"));
  EXPECT_THAT(CheckResponse({.calm_steps = 0}), HasSubstr("1 calm step"));
}

// A small training with a limit cycle: both modules drift away, and the one that is cold is left out and not trained.
// Importance follows the gradients with a lag, so that a module is called back after it was missed, and the loss swings
// as they take turns. They drift until `rest_from`.
struct Swinging {
  std::vector<double> losses;
  uint32_t level = 0;  // at the end
  uint32_t most_level = 0;
};

Swinging Train(bool guarded, int steps, int rest_from) {
  constexpr size_t kModules = 2;
  const policy::ImportanceTracker::Options base{.alpha = 0.05, .signal = policy::Signal::kSquaredNorm, .window = 1};
  policy::ImportanceTracker tracker(kModules, base);
  SwingGuard guard;
  std::vector<double> away = {0.1, 0.2};
  Swinging result;
  for (int step = 0; step < steps; ++step) {
    double loss = 1;
    for (const double a : away) loss += a * a;
    result.losses.push_back(loss);
    if (guarded) {
      guard.Observe(loss);
      const Thresholds raised = guard.Apply({base.alpha, base.hot});
      policy::ImportanceTracker::Options options = base;
      options.alpha = raised.alpha;
      options.hot = raised.hot;
      EXPECT_EQ(tracker.SetOptions(options), "");
    }
    for (size_t i = 0; i < kModules; ++i) tracker.Observe(i, {10 * away[i], 10 * away[i] * away[i], 10});
    const std::vector<Heat>& heat = tracker.UpdateHeat();
    for (size_t i = 0; i < kModules; ++i) {
      away[i] += step < rest_from ? 0.3 : 0;
      if (heat[i] != Heat::kCold || step >= rest_from) away[i] *= 0.5;
    }
    result.level = guard.level();
    result.most_level = std::max(result.most_level, guard.level());
  }
  return result;
}

// Standard deviation of the last losses.
double Spread(const std::vector<double>& losses, size_t count) {
  double sum = 0, squares = 0;
  for (size_t i = losses.size() - count; i < losses.size(); ++i) {
    sum += losses[i];
    squares += losses[i] * losses[i];
  }
  const double mean = sum / static_cast<double>(count);
  return std::sqrt(std::max(0.0, squares / static_cast<double>(count) - mean * mean));
}

TEST(SwingGuard, EndsTheSwingsOfATrainingThatLeavesModulesOutTooLong) {
  const int kSteps = 1000;
  const Swinging without = Train(false, kSteps, kSteps);
  const std::vector<double> tail(without.losses.end() - 96, without.losses.end());
  EXPECT_TRUE(FindSwing(tail, {}).periodic) << "without the guard it swings for ever";
  const Swinging with = Train(true, kSteps, kSteps);
  EXPECT_GT(with.most_level, 0u);
  EXPECT_LT(Spread(with.losses, 300), 0.25 * Spread(without.losses, 300));
  const std::vector<double> guarded_tail(with.losses.end() - 96, with.losses.end());
  EXPECT_FALSE(FindSwing(guarded_tail, {}).periodic);
  const Swinging rested = Train(true, 3 * kSteps, kSteps);
  EXPECT_GT(rested.most_level, 0u);
  EXPECT_EQ(rested.level, 0u) << "once nothing drifts any more the thresholds are what they were";
}

// What the higher hot threshold does: with noisy importance, fewer modules change sides.
TEST(SwingGuard, AHigherHotThresholdKeepsModulesFromChangingSides) {
  const auto changes = [](double hot) {
    policy::ImportanceTracker tracker(20,
                                      {.alpha = 0.5, .signal = policy::Signal::kSquaredNorm, .hot = hot, .window = 1});
    sim::Random random(11);
    std::vector<Heat> before(20, Heat::kWarm);
    int count = 0;
    for (int step = 0; step < 500; ++step) {
      for (size_t i = 0; i < 20; ++i) tracker.Observe(i, {0, random.Between(0.0, 2.0), 1});
      const std::vector<Heat>& heat = tracker.UpdateHeat();
      for (size_t i = 0; i < 20; ++i) count += step > 50 && heat[i] != before[i];
      before = heat;
    }
    return count;
  };
  EXPECT_LT(changes(0.9), 0.7 * changes(0.75));
}

}  // namespace
}  // namespace misa::guard
