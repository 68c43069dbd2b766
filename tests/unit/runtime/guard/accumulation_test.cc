#include "runtime/guard/accumulation.h"

#include <gtest/gtest.h>

#include "runtime/policy/sampler.h"

namespace misa::guard {
namespace {

TEST(CountedSteps, AreTheMicroBatchesWithinLimits) {
  EXPECT_EQ(CountedSteps(0), 1u);
  EXPECT_EQ(CountedSteps(1), 1u);
  EXPECT_EQ(CountedSteps(4), 4u);
  EXPECT_EQ(CountedSteps(64), 8u) << "a round keeps an eighth of its steps";
  EXPECT_EQ(CountedSteps(64, 100), 64u);
  EXPECT_EQ(CountedSteps(64, 0), 1u);
}

// A small training: every micro-batch moves what each module should be a little further; a module that is trained comes
// most of the way back with each optimizer step. Mean loss over `micro_batches` in all.
double MeanLoss(uint32_t accumulation, bool guarded, uint32_t micro_batches) {
  constexpr uint32_t kModules = 8;
  std::vector<policy::SamplerModule> modules;
  for (uint32_t i = 0; i < kModules; ++i) modules.push_back({"m" + std::to_string(i), 100});
  policy::ModuleSampler sampler({.delta = 0.25, .eta = 0, .inner_steps = 16, .seed = 3}, modules);
  std::vector<double> behind(kModules, 0);
  double sum = 0;
  for (uint32_t done = 0; done < micro_batches; done += accumulation) {
    for (uint32_t micro = 0; micro < accumulation; ++micro) {
      for (double& b : behind) {
        b += 0.01;
        sum += b * b;
      }
    }
    for (const uint32_t module : sampler.active()) behind[module] *= 0.1;
    sampler.EndStep(guarded ? CountedSteps(accumulation) : 1);
  }
  return sum / micro_batches;
}

TEST(CountedSteps, KeepModulesFromFallingBehindUnderAccumulation) {
  const uint32_t micro_batches = 64000;
  const double plain = MeanLoss(1, false, micro_batches);
  const double without = MeanLoss(8, false, micro_batches);
  const double with = MeanLoss(8, true, micro_batches);
  EXPECT_GT(without, 20 * plain) << "a round takes eight times the data, and what is left out falls eight times behind";
  EXPECT_LT(with, 2 * plain);
}

}  // namespace
}  // namespace misa::guard
