#include "runtime/guard/loss_stability.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "runtime/policy/sampler.h"
#include "runtime/sim/random.h"

namespace misa::guard {
namespace {

using ::testing::HasSubstr;

// The step after which it is stable; 0: never.
template <typename Loss>
int StableAfter(Loss loss, int steps, StabilityOptions options = {}) {
  LossStability stability(options);
  for (int step = 1; step <= steps; ++step) {
    EXPECT_EQ(stability.Observe(loss(step)), "");
    if (stability.stable()) return step;
  }
  return 0;
}

TEST(LossStability, AFlatLossIsStableOnceTheWindowIsFullAndHasHeld) {
  EXPECT_EQ(StableAfter([](int) { return 2.5; }, 200), 50 + 10 - 1);
  EXPECT_EQ(StableAfter([](int) { return 0.0; }, 200), 59) << "a loss of nothing is no division by it";
  EXPECT_EQ(StableAfter([](int) { return -3.0; }, 200, {.window = 4, .tolerance = 0.1, .hold = 1}), 4);
}

TEST(LossStability, AFallingLossIsNot) {
  EXPECT_EQ(StableAfter([](int step) { return 1000.0 - 10 * step; }, 95), 0);
  EXPECT_EQ(StableAfter([](int step) { return 8 * std::pow(0.98, step); }, 60), 0);
}

TEST(LossStability, ALossThatComesToRestIsStable) {
  // 8.4 down to 5: within 5 % of the way only when little of it is left.
  const auto language = [](int step) { return 5 + 3.4 * std::exp(-step / 60.0); };
  const int after = StableAfter(language, 1000);
  EXPECT_GT(after, 100);
  EXPECT_LT(after, 250);
  const int to_zero = StableAfter([](int step) { return 10 * std::exp(-step / 40.0); }, 1000);
  EXPECT_GT(to_zero, 100) << "relative to itself it would fall for ever";
}

TEST(LossStability, NoiseIsNoTrend) {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    sim::Random random(seed);
    EXPECT_NE(StableAfter([&](int) { return 3 + random.Between(-0.5, 0.5); }, 400), 0) << "seed " << seed;
  }
}

TEST(LossStability, ALossThatIsNoNumberIsRefusedAndBreaksTheRow) {
  LossStability stability({.window = 4, .tolerance = 0.05, .hold = 3});
  for (int i = 0; i < 5; ++i) stability.Observe(1);
  EXPECT_FALSE(stability.stable());
  for (const double bad :
       {std::nan(""), std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()}) {
    EXPECT_THAT(stability.Observe(bad), HasSubstr("not a finite number"));
  }
  EXPECT_EQ(stability.observed(), 5u);
  stability.Observe(1);
  EXPECT_FALSE(stability.stable()) << "two in a row had agreed before, and count no more";
  stability.Observe(1);
  stability.Observe(1);
  EXPECT_TRUE(stability.stable());
  stability.Observe(1e300);
  EXPECT_TRUE(stability.stable()) << "it stays";
}

TEST(LossStability, HugeLossesAreNotStable) {
  const double huge = 1e308;
  EXPECT_EQ(StableAfter([&](int step) { return step % 2 == 0 ? huge : -huge; }, 200), 0);
}

TEST(LossStability, GoesOnExactlyWhereItWasSaved) {
  const auto loss = [](int step) { return 2 + std::exp(-step / 30.0); };
  LossStability straight;
  LossStability first;
  for (int step = 0; step < 70; ++step) {
    straight.Observe(loss(step));
    first.Observe(loss(step));
  }
  LossStability resumed;
  ASSERT_EQ(resumed.Restore(first.Save()), "");
  for (int step = 70; step < 300; ++step) {
    straight.Observe(loss(step));
    resumed.Observe(loss(step));
    ASSERT_EQ(straight.Save(), resumed.Save()) << "step " << step;
  }
  EXPECT_TRUE(resumed.stable());
  const std::vector<double> before = resumed.Save();
  EXPECT_THAT(resumed.Restore({1, 2, 3}), HasSubstr("damaged"));
  std::vector<double> bad = before;
  bad[1] = std::nan("");
  EXPECT_THAT(resumed.Restore(bad), HasSubstr("damaged"));
  EXPECT_THAT(LossStability({.window = 10}).Restore(before), HasSubstr("another window"));
  EXPECT_EQ(resumed.Save(), before);
}

TEST(LossStability, RefusesImpossibleOptions) {
  EXPECT_EQ(CheckStability({}), "");
  EXPECT_THAT(CheckStability({.window = 3}), HasSubstr("from 4 to 100000"));
  EXPECT_THAT(CheckStability({.tolerance = 0}), HasSubstr("above 0"));
  EXPECT_THAT(CheckStability({.tolerance = std::nan("")}), HasSubstr("above 0"));
  EXPECT_THAT(CheckStability({.hold = 0}), HasSubstr("hold is 0"));
}

// A small training: each module is one number with its own way to go, and the gradient is what is left of it. One
// module begins far away; its first gradients are huge, and say nothing of what it is worth once it has arrived.
class SimulatedTraining {
 public:
  static constexpr uint32_t kModules = 8;
  static constexpr uint64_t kParameters = 100;

  SimulatedTraining() {
    for (uint32_t i = 0; i < kModules; ++i) left_.push_back(i == 0 ? 100 : 3);
  }
  double Loss() const {
    double loss = 0;
    for (const double left : left_) loss += 0.5 * left * left;
    return loss;
  }
  policy::GradientStatistics Gradient(uint32_t module) const {
    const double count = kParameters;
    return {count * left_[module], count * left_[module] * left_[module], kParameters};
  }
  void Train(uint32_t module) { left_[module] *= 0.9; }

 private:
  std::vector<double> left_;
};

double LossAfterSampling(bool guarded) {
  std::vector<policy::SamplerModule> modules;
  for (uint32_t i = 0; i < SimulatedTraining::kModules; ++i) {
    modules.push_back({"m" + std::to_string(i), SimulatedTraining::kParameters});
  }
  SimulatedTraining training;
  policy::ModuleSampler sampler({.delta = 0.126, .eta = 1, .alpha = 0.1, .inner_steps = 10, .seed = 5}, modules);
  LossStability stability;
  for (int step = 0; step < 400; ++step) {
    stability.Observe(training.Loss());
    if (guarded && !stability.stable()) {
      for (uint32_t i = 0; i < SimulatedTraining::kModules; ++i) training.Train(i);
      continue;
    }
    const std::vector<uint32_t> active = sampler.active();
    for (const uint32_t module : active) {
      sampler.Observe(module, training.Gradient(module));
      training.Train(module);
    }
    sampler.EndStep();
  }
  return training.Loss();
}

TEST(LossStability, SamplingFromTheFirstStepStarvesModulesAndAfterAStableLossDoesNot) {
  const double without = LossAfterSampling(false);
  const double with = LossAfterSampling(true);
  EXPECT_GT(without, 5) << "the far module is drawn again and again, the others are left where they were";
  EXPECT_LT(with, 0.01);
}

}  // namespace
}  // namespace misa::guard
