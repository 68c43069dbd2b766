#include "runtime/guard/dependencies.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "runtime/policy/sampler.h"

namespace misa::guard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr auto kNeeds = Dependency::kNeeds;
constexpr auto kApart = Dependency::kApart;

TEST(Dependencies, ClosesWhatIsNeededAndWhatIsApart) {
  ResolvedDependencies resolved;
  ASSERT_EQ(Resolve({"a", "b", "c", "d", "e"}, {{"a", kNeeds, "b"}, {"b", kNeeds, "c"}, {"c", kApart, "d"}}, &resolved),
            "");
  EXPECT_THAT(resolved.needs, ElementsAre(ElementsAre(1, 2), ElementsAre(2), IsEmpty(), IsEmpty(), IsEmpty()));
  EXPECT_THAT(resolved.apart[3], ElementsAre(0, 1, 2)) << "what needs c is apart from d as well";
  EXPECT_THAT(resolved.apart[0], ElementsAre(3));
  EXPECT_THAT(resolved.apart[4], IsEmpty());
}

TEST(Dependencies, ModulesThatNeedEachOtherAreOneUnit) {
  ResolvedDependencies resolved;
  ASSERT_EQ(Resolve({"a", "b", "c"}, {{"a", kNeeds, "b"}, {"b", kNeeds, "c"}, {"c", kNeeds, "a"}}, &resolved), "");
  EXPECT_THAT(resolved.needs, ElementsAre(ElementsAre(1, 2), ElementsAre(0, 2), ElementsAre(0, 1)));
}

TEST(Dependencies, RefusesWhatCannotBeAndKeepsTheOldOnes) {
  const std::vector<std::string> modules = {"a", "b", "c", "d"};
  ResolvedDependencies resolved;
  ASSERT_EQ(Resolve(modules, {{"a", kNeeds, "b"}}, &resolved), "");
  const auto before = resolved.needs;
  const auto refused = [&](const std::vector<Dependency>& dependencies) {
    const std::string sentence = Resolve(modules, dependencies, &resolved);
    EXPECT_EQ(resolved.needs, before);
    EXPECT_THAT(sentence, HasSubstr("no dependency was changed."));
    return sentence;
  };
  EXPECT_THAT(refused({{"a", kNeeds, "x"}}), HasSubstr("names the module \"x\", and there is none"));
  EXPECT_THAT(refused({{"y", kApart, "a"}}), HasSubstr("\"y\""));
  EXPECT_THAT(refused({{"a", kNeeds, "a"}}), HasSubstr("need itself"));
  EXPECT_THAT(refused({{"a", kApart, "a"}}), HasSubstr("apart from itself"));
  EXPECT_THAT(refused({{"a", kNeeds, "b"}, {"b", kApart, "a"}}), HasSubstr("contradict"));
  EXPECT_THAT(refused({{"a", kNeeds, "b"}, {"b", kNeeds, "c"}, {"c", kApart, "a"}}), HasSubstr("\"a\""))
      << "a cycle with an exclusion in it";
  EXPECT_THAT(refused({{"a", kNeeds, "b"}, {"a", kNeeds, "c"}, {"b", kApart, "c"}}), HasSubstr("needs both"));
  EXPECT_THAT(
      refused({{"a", kNeeds, "b"}, {"b", kNeeds, "a"}, {"b", kNeeds, "c"}, {"a", kNeeds, "d"}, {"c", kApart, "d"}}),
      HasSubstr("contradict"));
  EXPECT_THAT(refused(std::vector<Dependency>(kMostDependencies + 1, {"a", kNeeds, "b"})),
              HasSubstr("the most is 4096"));
}

std::vector<policy::SamplerModule> Modules(size_t count) {
  std::vector<policy::SamplerModule> modules;
  for (size_t i = 0; i < count; ++i) modules.push_back({"m" + std::to_string(i), 100});
  return modules;
}

// A small training of four pairs, each pulled together: 10 (a - b)^2 + (a + b - 2)^2. Each round finds the best values
// of what it trains. Returns the rounds until all pairs are there.
int RoundsUntilTrained(const std::vector<Dependency>& dependencies) {
  const policy::SamplerOptions options{
      .delta = 0.25, .eta = 0, .inner_steps = 1, .seed = 9, .dependencies = dependencies};
  const std::vector<policy::SamplerModule> modules = Modules(8);
  EXPECT_EQ(policy::CheckSampler(options, modules), "");
  policy::ModuleSampler sampler(options, modules);
  std::vector<double> x(8, 0);
  for (int round = 0; round < 2000; ++round) {
    double loss = 0;
    for (size_t i = 0; i < 8; i += 2) {
      const double apart = x[i] - x[i + 1];
      const double off = x[i] + x[i + 1] - 2;
      loss += 10 * apart * apart + off * off;
    }
    if (loss < 1e-3) return round;
    std::vector<bool> trained(8, false);
    for (const uint32_t module : sampler.active()) trained[module] = true;
    for (size_t i = 0; i < 8; i += 2) {
      if (trained[i] && trained[i + 1]) {
        x[i] = x[i + 1] = 1;
      } else if (trained[i] || trained[i + 1]) {
        const size_t one = trained[i] ? i : i + 1;
        const size_t other = trained[i] ? i + 1 : i;
        x[one] = (9 * x[other] + 2) / 11;
      }
    }
    sampler.EndStep();
  }
  return 2000;
}

TEST(Dependencies, PairsDrawnTogetherTrainWhatPairsDrawnApartDragOut) {
  const int without = RoundsUntilTrained({});
  std::vector<Dependency> together;
  for (int i = 0; i < 8; i += 2) {
    together.push_back({"m" + std::to_string(i), kNeeds, "m" + std::to_string(i + 1)});
    together.push_back({"m" + std::to_string(i + 1), kNeeds, "m" + std::to_string(i)});
  }
  const int with = RoundsUntilTrained(together);
  EXPECT_GT(without, 30);
  EXPECT_LT(with, without / 2);
}

TEST(Dependencies, DrawsHonourThemInEveryRound) {
  const policy::SamplerOptions options{
      .delta = 0.4,
      .eta = 0,
      .inner_steps = 1,
      .seed = 2,
      .dependencies = {{"m0", kNeeds, "m5"}, {"m1", kNeeds, "m0"}, {"m2", kApart, "m3"}, {"m4", kApart, "m5"}}};
  ASSERT_EQ(policy::CheckSampler(options, Modules(10)), "");
  policy::ModuleSampler sampler(options, Modules(10));
  std::vector<int> drawn(10, 0);
  for (int round = 0; round < 3000; ++round) {
    std::vector<bool> active(10, false);
    for (const uint32_t module : sampler.active()) {
      active[module] = true;
      ++drawn[module];
    }
    ASSERT_LE(sampler.active().size(), 4u) << "never past delta";
    ASSERT_TRUE(!active[0] || active[5]);
    ASSERT_TRUE(!active[1] || (active[0] && active[5]));
    ASSERT_FALSE(active[2] && active[3]);
    ASSERT_FALSE(active[4] && (active[5] || active[0] || active[1]));
    sampler.EndStep();
  }
  for (size_t i = 0; i < 10; ++i) EXPECT_GT(drawn[i], 300) << "module " << i;
}

TEST(Dependencies, AShareTooSmallForTheSmallestUnitIsRefused) {
  policy::SamplerOptions options{.delta = 0.5, .dependencies = {{"m0", kNeeds, "m1"}, {"m1", kNeeds, "m0"}}};
  EXPECT_THAT(policy::CheckSampler(options, Modules(2)), HasSubstr("\"m0\" with what it needs, has a share of 1"));
  options.delta = 1;
  EXPECT_EQ(policy::CheckSampler(options, Modules(2)), "");
}

}  // namespace
}  // namespace misa::guard
