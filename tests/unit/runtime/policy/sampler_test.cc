#include "runtime/policy/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>

#include "runtime/policy/portable_math.h"

namespace misa::policy {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<SamplerModule> Equal(size_t count, uint64_t parameters = 100) {
  std::vector<SamplerModule> modules;
  for (size_t i = 0; i < count; ++i) {
    modules.push_back({"m" + std::to_string(i), parameters});
  }
  return modules;
}

// Statistics whose scaled squared norm is the value.
GradientStatistics OfNorm(double value) { return {0, value * 10, 10}; }

// One step in which each active module shows a value of its own.
bool Step(ModuleSampler* sampler, uint64_t time) {
  for (const uint32_t module : std::vector<uint32_t>(sampler->active())) {
    EXPECT_EQ(sampler->Observe(module, OfNorm(0.1 * module + 0.01 * static_cast<double>(time % 7))), "");
  }
  return sampler->EndStep();
}

TEST(PortableExp, IsTheExponential) {
  for (double x = 0; x > -744; x -= 0.37) {
    const double expected = std::exp(x);
    EXPECT_NEAR(PortableExp(x), expected, 4e-16 * expected + 5e-324) << x;
  }
  EXPECT_EQ(PortableExp(0), 1);
  EXPECT_EQ(PortableExp(-1e6), 0);
  EXPECT_EQ(PortableExp(-std::numeric_limits<double>::infinity()), 0);
}

TEST(CheckSampler, RefusesOptionsOutOfRange) {
  const std::vector<SamplerModule> modules = Equal(4);
  EXPECT_EQ(CheckSampler({.delta = 0.25}, modules), "");
  EXPECT_EQ(CheckSampler({.delta = 1}, modules), "");
  for (const double delta : {0.0, -0.1, 1.1, std::nan("")}) {
    EXPECT_THAT(CheckSampler({.delta = delta}, modules), HasSubstr("delta"));
  }
  for (const double eta : {-1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THAT(CheckSampler({.delta = 0.5, .eta = eta}, modules), HasSubstr("eta"));
  }
  for (const double alpha : {0.0, 1.5, std::nan("")}) {
    EXPECT_THAT(CheckSampler({.delta = 0.5, .alpha = alpha}, modules), HasSubstr("alpha"));
  }
  EXPECT_THAT(CheckSampler({.delta = 0.5, .inner_steps = 0}, modules), HasSubstr("inner_steps"));
  EXPECT_THAT(CheckSampler({.delta = 0.5}, {}), HasSubstr("no modules"));
  EXPECT_THAT(CheckSampler({.delta = 0.5}, {{"a", 1}, {"b", 0}}), HasSubstr("\"b\" has no parameters"));
  EXPECT_THAT(CheckSampler({.delta = 0.5}, {{"a", uint64_t{1} << 53}, {"b", 1}}), HasSubstr("2^53"));
}

TEST(CheckSampler, NamesTheSmallestModuleOfADeltaTooSmall) {
  const std::vector<SamplerModule> modules = {{"large", 600}, {"small", 100}, {"middle", 300}};
  const std::string error = CheckSampler({.delta = 0.05}, modules);
  EXPECT_THAT(error, HasSubstr("\"small\""));
  EXPECT_THAT(error, HasSubstr("share of 0.1 "));
  EXPECT_THAT(error, HasSubstr("smallest delta that works is 0.1."));
  EXPECT_EQ(CheckSampler({.delta = 0.1}, modules), "");
}

TEST(CheckSampler, TheDeltaItNamesWorks) {
  for (uint64_t count = 1; count < 2000; count += 7) {
    const std::vector<SamplerModule> modules = {{"a", count}, {"b", 3 * count + 1}};
    const std::string error = CheckSampler({.delta = 1e-9}, modules);
    const size_t at = error.rfind("works is ") + 9;
    const double delta = std::stod(error.substr(at));
    EXPECT_EQ(CheckSampler({.delta = delta}, modules), "") << count << ": " << error;
    EXPECT_LE(delta, 1.001 * static_cast<double>(count) / static_cast<double>(4 * count + 1));
  }
}

TEST(ModuleSampler, DrawsUpToTheShare) {
  ModuleSampler sampler({.delta = 0.3, .seed = 5}, Equal(10));
  EXPECT_EQ(sampler.active().size(), 3u);
  EXPECT_TRUE(std::is_sorted(sampler.active().begin(), sampler.active().end()));
  ModuleSampler all({.delta = 1}, Equal(4));
  EXPECT_THAT(all.active(), ElementsAre(0, 1, 2, 3));
}

TEST(ModuleSampler, NeverTrainsNothing) {
  // The large module alone is above delta; as a first draw it is put aside.
  for (uint64_t seed = 0; seed < 200; ++seed) {
    ModuleSampler sampler({.delta = 0.1, .seed = seed}, {{"large", 900}, {"a", 50}, {"b", 50}});
    EXPECT_FALSE(sampler.active().empty());
    EXPECT_NE(sampler.active().front(), 0u);
  }
}

TEST(ModuleSampler, StopsAtTheFirstModuleThatDoesNotFit) {
  // After one small module the large one ends the draw, though another small one would fit: as in the paper.
  size_t single = 0;
  constexpr int kSeeds = 2000;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    ModuleSampler sampler({.delta = 0.2, .seed = seed}, {{"large", 800}, {"a", 100}, {"b", 100}});
    single += sampler.active().size() == 1 ? 1 : 0;
  }
  // First draw large (1/3): put aside, then both small ones. Else (2/3) the second draw is the large one half the time.
  EXPECT_NEAR(static_cast<double>(single) / kSeeds, 1.0 / 3, 0.04);
}

TEST(ModuleSampler, TheFirstRoundIsUniform) {
  constexpr int kSeeds = 10000;
  constexpr size_t kModules = 10;
  std::vector<double> counts(kModules, 0);
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    counts[ModuleSampler({.delta = 0.1, .eta = 500, .seed = seed}, Equal(kModules)).active()[0]] += 1;
  }
  double chi_squared = 0;
  for (const double count : counts) {
    const double expected = kSeeds / static_cast<double>(kModules);
    chi_squared += (count - expected) * (count - expected) / expected;
  }
  EXPECT_LT(chi_squared, 27.9) << "9 degrees of freedom, 1 in 1000";
}

// Brings a sampler to known importances by training everything for one round, then counts single draws.
TEST(ModuleSampler, DrawsAsTheSoftmaxSays) {
  const std::vector<double> values = {0.0, 0.5, 1.0, 1.5, 2.0};
  const double eta = 0.8;
  // alpha 1 and one inner step: G is the last value. Modules are observed when drawn; until all were, rounds go on.
  ModuleSampler sampler({.delta = 0.2, .eta = eta, .alpha = 1, .inner_steps = 1, .seed = 7}, Equal(5));
  const auto step = [&] {
    const uint32_t module = sampler.active()[0];
    EXPECT_EQ(sampler.Observe(module, OfNorm(values[module])), "");
    EXPECT_TRUE(sampler.EndStep());
  };
  for (int i = 0; i < 10000 && sampler.importance() != values; ++i) {
    step();
  }
  ASSERT_EQ(sampler.importance(), values);
  constexpr int kDraws = 50000;
  std::vector<double> counts(5, 0);
  for (int i = 0; i < kDraws; ++i) {
    step();
    counts[sampler.active()[0]] += 1;
  }
  double total = 0;
  for (const double value : values) {
    total += std::exp(eta * value);
  }
  double chi_squared = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double expected = kDraws * std::exp(eta * values[i]) / total;
    chi_squared += (counts[i] - expected) * (counts[i] - expected) / expected;
  }
  EXPECT_LT(chi_squared, 18.5) << "4 degrees of freedom, 1 in 1000";
}

TEST(ModuleSampler, DrawsWithoutReplacement) {
  // Second draws: P(b second | a first) = w_b / (1 - w_a). Checked by the share of each pair over seeds, equal weights.
  constexpr int kSeeds = 6000;
  std::vector<double> counts(6, 0);
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    const std::vector<uint32_t> active =
        ModuleSampler({.delta = 0.5, .seed = seed}, Equal(4)).active();
    ASSERT_EQ(active.size(), 2u);
    ASSERT_NE(active[0], active[1]);
    counts[active[0] == 0 ? active[1] - 1 : active[0] == 1 ? active[1] + 1 : 5] += 1;
  }
  double chi_squared = 0;
  for (const double count : counts) {
    chi_squared += (count - kSeeds / 6.0) * (count - kSeeds / 6.0) / (kSeeds / 6.0);
  }
  EXPECT_LT(chi_squared, 20.5) << "5 degrees of freedom, 1 in 1000";
}

TEST(ModuleSampler, StaysFiniteWithExtremeImportance) {
  ModuleSampler sampler({.delta = 0.5, .eta = 1e300, .alpha = 1, .inner_steps = 1, .seed = 3}, Equal(8));
  const std::vector<uint32_t> first = sampler.active();
  for (int i = 0; i < 50; ++i) {
    for (const uint32_t module : std::vector<uint32_t>(sampler.active())) {
      EXPECT_EQ(sampler.Observe(module, OfNorm(1e300 / (1 + module))), "");
    }
    sampler.EndStep();
    EXPECT_EQ(sampler.active(), first) << "beside them the weights of all others are 0";
  }
}

TEST(ModuleSampler, FoldsTheMeanOfARoundIntoG) {
  ModuleSampler sampler({.delta = 1, .alpha = 0.5, .inner_steps = 2}, Equal(2));
  EXPECT_EQ(sampler.Observe(0, OfNorm(100)), "");
  EXPECT_EQ(sampler.Observe(0, OfNorm(2)), "") << "the last one of a step counts";
  EXPECT_FALSE(sampler.EndStep());
  EXPECT_EQ(sampler.step_in_round(), 1u);
  EXPECT_EQ(sampler.Observe(0, OfNorm(4)), "");
  EXPECT_TRUE(sampler.EndStep());
  EXPECT_EQ(sampler.round(), 1u);
  EXPECT_EQ(sampler.step_in_round(), 0u);
  EXPECT_DOUBLE_EQ(sampler.importance()[0], 0.5 * 3);
  EXPECT_DOUBLE_EQ(sampler.importance()[1], 0) << "never observed: nothing is known";
  sampler.Observe(0, OfNorm(1));
  sampler.EndStep();
  sampler.EndStep();
  EXPECT_DOUBLE_EQ(sampler.importance()[0], 0.5 * 1.5 + 0.5 * 1) << "mean over the steps observed";
}

TEST(ModuleSampler, RefusesStatisticsItCannotUse) {
  ModuleSampler sampler({.delta = 0.25}, Equal(4));
  const uint32_t active = sampler.active()[0];
  const uint32_t other = (active + 1) % 4;
  const uint64_t digest = sampler.Digest();
  EXPECT_THAT(sampler.Observe(other, OfNorm(1)), HasSubstr("\"m" + std::to_string(other) + "\" is not trained"));
  EXPECT_THAT(sampler.Observe(9, OfNorm(1)), HasSubstr("9 is not trained"));
  EXPECT_THAT(sampler.Observe(active, {0, std::nan(""), 1}), HasSubstr("not finite"));
  EXPECT_THAT(sampler.Observe(active, {std::numeric_limits<double>::infinity(), 1, 1}), HasSubstr("not finite"));
  EXPECT_EQ(sampler.Digest(), digest);
}

TEST(ModuleSampler, EqualInputsGiveEqualDraws) {
  ModuleSampler a({.delta = 0.3, .eta = 2, .inner_steps = 3, .seed = 11}, Equal(20));
  ModuleSampler b({.delta = 0.3, .eta = 2, .inner_steps = 3, .seed = 11}, Equal(20));
  ModuleSampler c({.delta = 0.3, .eta = 2, .inner_steps = 3, .seed = 12}, Equal(20));
  bool differs = false;
  for (uint64_t time = 0; time < 60; ++time) {
    ASSERT_EQ(a.active(), b.active());
    ASSERT_EQ(a.Digest(), b.Digest());
    differs = differs || a.active() != c.active();
    Step(&a, time);
    Step(&b, time);
    Step(&c, time);
  }
  EXPECT_TRUE(differs);
}

TEST(ModuleSampler, DrawsTheSameOnEveryMachine) {
  // Fixed values: a change of generator, softmax or order of draws shows here, on every machine alike.
  ModuleSampler sampler({.delta = 0.2, .eta = 3, .alpha = 0.5, .inner_steps = 1, .seed = 42}, Equal(20));
  std::vector<uint32_t> drawn;
  for (uint64_t time = 0; time < 4; ++time) {
    drawn.insert(drawn.end(), sampler.active().begin(), sampler.active().end());
    Step(&sampler, time);
  }
  EXPECT_THAT(drawn, ElementsAre(1, 6, 9, 19, 2, 3, 7, 19, 3, 6, 7, 19, 6, 7, 11, 19));
}

TEST(ModuleSampler, AStepMayCountAsSeveral) {
  const SamplerOptions options{.delta = 0.5, .inner_steps = 10};
  const std::vector<SamplerModule> modules = {{"a", 10}, {"b", 10}};
  ModuleSampler sampler(options, modules);
  EXPECT_FALSE(sampler.EndStep(4));
  EXPECT_EQ(sampler.step_in_round(), 4u);
  EXPECT_FALSE(sampler.EndStep(0)) << "at least one";
  EXPECT_EQ(sampler.step_in_round(), 5u);
  EXPECT_TRUE(sampler.EndStep(std::numeric_limits<uint32_t>::max())) << "the rest of the round at most";
  EXPECT_EQ(sampler.round(), 1u);
  EXPECT_EQ(sampler.step_in_round(), 0u);
}

TEST(ModuleSampler, StateOfOtherDependenciesIsRefused) {
  const std::vector<SamplerModule> modules = {{"a", 10}, {"b", 10}, {"c", 10}};
  const SamplerOptions options{.delta = 0.7};
  SamplerOptions tied = options;
  tied.dependencies = {{"a", guard::Dependency::kNeeds, "b"}};
  ASSERT_EQ(CheckSampler(tied, modules), "");
  ModuleSampler without(options, modules);
  ModuleSampler with(tied, modules);
  EXPECT_THAT(with.Restore(without.Serialize()), HasSubstr("other modules"));
  EXPECT_EQ(with.Restore(ModuleSampler(tied, modules).Serialize()), "");
  tied.dependencies = {{"a", guard::Dependency::kNeeds, "d"}};
  EXPECT_THAT(CheckSampler(tied, modules), HasSubstr("the module \"d\", and there is none"));
}

TEST(ModuleSampler, ResumesExactlyAnywhereInARound) {
  const SamplerOptions options{.delta = 0.3, .eta = 2, .inner_steps = 5, .seed = 11};
  for (uint64_t at = 0; at < 12; ++at) {
    ModuleSampler whole(options, Equal(20));
    for (uint64_t time = 0; time < at; ++time) {
      Step(&whole, time);
    }
    // In the middle of a step, too.
    whole.Observe(whole.active()[0], OfNorm(3));
    SamplerOptions other_seed = options;
    other_seed.seed = 99;
    ModuleSampler resumed(other_seed, Equal(20));
    ASSERT_EQ(resumed.Restore(whole.Serialize()), "");
    ASSERT_EQ(resumed.Digest(), whole.Digest());
    whole.EndStep();
    resumed.EndStep();
    for (uint64_t time = at; time < at + 40; ++time) {
      ASSERT_EQ(resumed.active(), whole.active());
      ASSERT_EQ(resumed.Serialize(), whole.Serialize());
      Step(&whole, time);
      Step(&resumed, time);
    }
  }
}

// Two tasks take turns; each finds other modules important.
bool TaskStep(ModuleSampler* sampler, uint64_t time) {
  const bool odd = time % 2 == 1;
  for (const uint32_t module : std::vector<uint32_t>(sampler->active())) {
    EXPECT_EQ(sampler->Observe(module, OfNorm(odd ? 0.1 * module : 2 - 0.1 * module)), "");
  }
  uint32_t task = 0;
  EXPECT_EQ(sampler->EnterTask(odd ? "odd" : "even", odd ? 3 : 1, &task), "");
  return sampler->EndStep(1, task);
}

TEST(ModuleSampler, EachTaskHasItsOwnImportanceAndDrawsTakeTheWeightedMean) {
  ModuleSampler sampler({.delta = 1, .alpha = 1, .inner_steps = 2}, Equal(2));
  uint32_t a = 0, b = 0;
  ASSERT_EQ(sampler.EnterTask("a", 3, &a), "");
  ASSERT_EQ(sampler.EnterTask("b", 1, &b), "");
  const auto step = [&](uint32_t task, double first, double second) {
    EXPECT_EQ(sampler.Observe(0, OfNorm(first)), "");
    EXPECT_EQ(sampler.Observe(1, OfNorm(second)), "");
    return sampler.EndStep(1, task);
  };
  step(a, 8, 0);
  EXPECT_TRUE(step(b, 0, 4));
  EXPECT_THAT(sampler.importance(), ElementsAre(6, 1));
  // A round of one task alone leaves what the other has found.
  step(a, 4, 4);
  step(a, 4, 4);
  EXPECT_THAT(sampler.importance(), ElementsAre(3, 4));
  // Another weight counts from the next draw on.
  ASSERT_EQ(sampler.EnterTask("a", 1, &a), "");
  step(a, 4, 4);
  step(a, 4, 4);
  EXPECT_THAT(sampler.importance(), ElementsAre(2, 4));
}

TEST(ModuleSampler, TheWeightDecidesWhatIsDrawn) {
  // One module at a time, of two: a finds the first important, b the second.
  const auto share_of_first = [](double weight_of_a) {
    ModuleSampler sampler({.delta = 0.5, .eta = 4, .alpha = 1, .inner_steps = 1, .seed = 5}, Equal(2));
    int first = 0;
    constexpr int kSteps = 4000;
    for (int i = 0; i < kSteps; ++i) {
      const uint32_t module = sampler.active()[0];
      first += module == 0 ? 1 : 0;
      uint32_t task = 0;
      EXPECT_EQ(sampler.EnterTask(i % 2 == 0 ? "a" : "b", i % 2 == 0 ? weight_of_a : 1, &task), "");
      EXPECT_EQ(sampler.Observe(module, OfNorm((i % 2 == 0) == (module == 0) ? 1 : 0)), "");
      sampler.EndStep(1, task);
    }
    return static_cast<double>(first) / kSteps;
  };
  // softmax(4 * (share, 1 - share))
  EXPECT_NEAR(share_of_first(1), 0.5, 0.03);
  EXPECT_NEAR(share_of_first(3), 1 / (1 + std::exp(-2)), 0.03);
  EXPECT_NEAR(share_of_first(1.0 / 3), 1 / (1 + std::exp(2)), 0.03);
}

TEST(ModuleSampler, WithoutTasksTheStateIsWhatItWas) {
  ModuleSampler sampler({.delta = 0.3, .seed = 11}, Equal(20));
  const std::vector<uint8_t> before = sampler.Serialize();
  uint32_t task = 9;
  ASSERT_EQ(sampler.EnterTask("", 5, &task), "");
  EXPECT_EQ(task, 0u);
  EXPECT_EQ(sampler.Serialize(), before);
  EXPECT_EQ(before.size(), 8 * (12 + 1 + sampler.active().size() + 4 * 20));
}

TEST(ModuleSampler, ResumesTasksExactlyAnywhereInARound) {
  const SamplerOptions options{.delta = 0.3, .eta = 2, .alpha = 0.5, .inner_steps = 3, .seed = 11};
  for (uint64_t at = 0; at < 9; ++at) {
    ModuleSampler whole(options, Equal(20));
    for (uint64_t time = 0; time < at; ++time) TaskStep(&whole, time);
    ModuleSampler resumed(options, Equal(20));
    ASSERT_EQ(resumed.Restore(whole.Serialize()), "");
    ASSERT_EQ(resumed.importance().size(), 20u);
    for (uint64_t time = at; time < at + 30; ++time) {
      ASSERT_EQ(resumed.active(), whole.active());
      ASSERT_EQ(resumed.Serialize(), whole.Serialize());
      TaskStep(&whole, time);
      TaskStep(&resumed, time);
    }
  }
}

// A bit of each byte turned, and every shorter length.
void ExpectEveryDamageIsFound(ModuleSampler* target, const std::vector<uint8_t>& good) {
  for (size_t i = 0; i < good.size(); ++i) {
    std::vector<uint8_t> bad = good;
    bad[i] ^= 0x10;
    ASSERT_THAT(target->Restore(bad), HasSubstr("damaged")) << i;
  }
  for (size_t length = 0; length < good.size(); ++length) {
    ASSERT_THAT(target->Restore({good.begin(), good.begin() + static_cast<std::ptrdiff_t>(length)}),
                HasSubstr("damaged"));
  }
}

TEST(ModuleSampler, RefusesDamagedTasks) {
  const SamplerOptions options{.delta = 0.3, .seed = 1};
  ModuleSampler sampler(options, Equal(6));
  TaskStep(&sampler, 0);
  TaskStep(&sampler, 1);
  const std::vector<uint8_t> good = sampler.Serialize();
  ModuleSampler target(options, Equal(6));
  const uint64_t digest = target.Digest();
  ExpectEveryDamageIsFound(&target, good);
  EXPECT_EQ(target.Digest(), digest) << "nothing changed";
  EXPECT_EQ(target.Restore(good), "");
  EXPECT_EQ(target.tasks().size(), 3u);
}

TEST(ModuleSampler, RefusesDamagedAndForeignState) {
  const SamplerOptions options{.delta = 0.3, .seed = 1};
  ModuleSampler sampler(options, Equal(6));
  Step(&sampler, 0);
  const std::vector<uint8_t> good = sampler.Serialize();
  ModuleSampler target(options, Equal(6));
  const uint64_t digest = target.Digest();
  ExpectEveryDamageIsFound(&target, good);
  EXPECT_THAT(target.Restore(ModuleSampler(options, Equal(7)).Serialize()), HasSubstr("other modules"));
  EXPECT_THAT(target.Restore(ModuleSampler(options, Equal(6, 99)).Serialize()), HasSubstr("other modules"));
  EXPECT_THAT(target.Restore(ModuleSampler({.delta = 0.4, .seed = 1}, Equal(6)).Serialize()),
              HasSubstr("other options"));
  EXPECT_EQ(target.Digest(), digest) << "nothing changed";
  EXPECT_EQ(target.Restore(good), "");
}

}  // namespace
}  // namespace misa::policy
