#include "runtime/policy/arbiter.h"

#include <gmock/gmock.h>

#include <cmath>
#include <numeric>

#include "runtime/sim/random.h"
#include "tests/unit/runtime/policy/workloads.h"

namespace misa::policy {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kGiB = 1ull << 30;
constexpr uint64_t kChunk = 64 << 10;

Claim Hungry(double weight, uint64_t least = kGiB, uint64_t most = 1000 * kGiB, uint64_t held = 0) {
  return {weight, least, most, held, {}};
}

// Loses less the more it has, down to nothing at `all`: as a training step does, in steps of its modules.
Claim Trained(sim::Random* random, uint64_t available, size_t count) {
  Claim claim;
  claim.weight = random->Between(0.25, 4.0);
  const double even = static_cast<double>(available) / static_cast<double>(count);
  claim.least_bytes = static_cast<uint64_t>(even * random->Between(0.05, 0.6));
  const auto all = static_cast<uint64_t>(even * random->Between(0.7, 4.0));
  claim.most_bytes = claim.least_bytes + static_cast<uint64_t>(random->Between(0.5, 1.5) * static_cast<double>(all));
  const size_t points = random->Between(uint64_t{2}, uint64_t{8});
  double stall = random->Between(0.1, 5.0);
  for (size_t k = 0; k < points; ++k) {
    const double part = static_cast<double>(k) / static_cast<double>(points - 1);
    const auto bytes = claim.least_bytes + static_cast<uint64_t>(part * static_cast<double>(all));
    claim.influence.push_back({bytes, stall, stall + 1});
    if (k + 2 == points) stall = random->Chance(0.5) ? 0 : stall * 0.5;
    // Plateaus, and a planner that is now and then a little worse with more.
    stall *= random->Chance(0.3) ? random->Between(0.98, 1.01) : random->Between(0.3, 0.95);
  }
  return claim;
}

uint64_t Sum(const std::vector<uint64_t>& bytes) { return std::accumulate(bytes.begin(), bytes.end(), uint64_t{0}); }

TEST(Arbiter, SplitsByWeight) {
  const auto split = Arbitrate({Hungry(1), Hungry(2), Hungry(1)}, 80 * kGiB);
  ASSERT_TRUE(split.ok()) << split.error;
  EXPECT_THAT(split.value, ElementsAre(20 * kGiB, 40 * kGiB, 20 * kGiB));
}

TEST(Arbiter, AFloorAndACeilingComeFirst) {
  const auto split = Arbitrate({Hungry(1, 30 * kGiB), Hungry(1), Hungry(1, kGiB, 5 * kGiB)}, 60 * kGiB);
  ASSERT_TRUE(split.ok()) << split.error;
  EXPECT_THAT(split.value, ElementsAre(30 * kGiB, 25 * kGiB, 5 * kGiB));
  // Nobody gets more than was asked for, whatever is left.
  const auto rich = Arbitrate({Hungry(1, kGiB, 5 * kGiB), Hungry(3, kGiB, 5 * kGiB)}, 60 * kGiB);
  EXPECT_THAT(rich.value, ElementsAre(5 * kGiB, 5 * kGiB));
}

TEST(Arbiter, MemoryThatSavesNothingGoesToWhomItServes) {
  // All of its stall is gone at 10 GiB.
  Claim easy = Hungry(1);
  easy.influence = {{kGiB, 1, 2}, {10 * kGiB, 0, 1}, {100 * kGiB, 0, 1}};
  const auto split = Arbitrate({easy, Hungry(1)}, 60 * kGiB);
  ASSERT_TRUE(split.ok()) << split.error;
  EXPECT_NEAR(static_cast<double>(split.value[0]), 10.0 * kGiB, 0.1 * kGiB);
  EXPECT_NEAR(static_cast<double>(split.value[1]), 50.0 * kGiB, 0.1 * kGiB);
}

TEST(Arbiter, APlateauIsLeftOut) {
  // Between 10 and 60 GiB nothing is saved, at 60 all is: a share of 30 serves it no better than 10.
  Claim steps = Hungry(1, kGiB, 80 * kGiB);
  steps.influence = {{kGiB, 4, 5}, {10 * kGiB, 1, 2}, {59 * kGiB, 1, 2}, {60 * kGiB, 0, 1}};
  Claim other = Hungry(1, kGiB, 80 * kGiB);
  other.influence = {{kGiB, 9, 10}, {80 * kGiB, 0, 1}};
  const auto split = Arbitrate({steps, other}, 60 * kGiB);
  ASSERT_TRUE(split.ok()) << split.error;
  EXPECT_LE(split.value[0], 10 * kGiB);
  EXPECT_GE(split.value[1], 50 * kGiB);
}

TEST(Arbiter, EqualClaimsTradeNothing) {
  std::vector<Claim> claims(64, Hungry(1));
  for (Claim& claim : claims) claim.influence = {{kGiB, 3, 4}, {900 * kGiB, 0, 1}};
  const auto split = Arbitrate(claims, 640 * kGiB);
  for (const uint64_t bytes : split.value) EXPECT_NEAR(static_cast<double>(bytes), 10.0 * kGiB, 1);
}

TEST(Arbiter, SmallDifferencesMoveNothing) {
  std::vector<Claim> claims = {Hungry(1), Hungry(1)};
  claims[0].held_bytes = 30 * kGiB + kGiB / 2;
  claims[1].held_bytes = 29 * kGiB + kGiB / 2;
  EXPECT_THAT(Arbitrate(claims, 60 * kGiB).value, ElementsAre(claims[0].held_bytes, claims[1].held_bytes));
  claims[0].held_bytes = 33 * kGiB;
  claims[1].held_bytes = 27 * kGiB;
  EXPECT_THAT(Arbitrate(claims, 60 * kGiB).value, ElementsAre(30 * kGiB, 30 * kGiB));
  // Near, but together more than there is.
  claims[0].held_bytes = claims[1].held_bytes = 30 * kGiB + kGiB / 2;
  EXPECT_LE(Sum(Arbitrate(claims, 60 * kGiB).value), 60 * kGiB);
  // One that comes makes room needed.
  claims.push_back(Hungry(1));
  EXPECT_THAT(Arbitrate(claims, 60 * kGiB).value, ElementsAre(20 * kGiB, 20 * kGiB, 20 * kGiB));
}

TEST(Arbiter, RefusesWhatMakesNoSense) {
  EXPECT_THAT(Arbitrate({Hungry(0)}, kGiB).error, HasSubstr("weight"));
  EXPECT_THAT(Arbitrate({Hungry(std::nan(""))}, kGiB).error, HasSubstr("weight"));
  EXPECT_THAT(Arbitrate({Hungry(1, 2 * kGiB, kGiB)}, 9 * kGiB).error, HasSubstr("asks for at most"));
  EXPECT_THAT(Arbitrate({Hungry(1), Hungry(1)}, kGiB).error, HasSubstr("more than the"));
  Claim broken = Hungry(1);
  broken.influence = {{2 * kGiB, 1, 2}, {kGiB, 0, 1}};
  EXPECT_THAT(Arbitrate({broken}, 9 * kGiB).error, HasSubstr("influence"));
  EXPECT_TRUE(Arbitrate({}, kGiB).value.empty());
}

// The value that the arbiter works for: time lost, weighted.
double Lost(const std::vector<Claim>& claims, const std::vector<uint64_t>& bytes) {
  double lost = 0;
  for (size_t i = 0; i < claims.size(); ++i) lost += claims[i].weight * StallShare(claims[i], bytes[i]);
  return lost;
}

// Mixes of 2 to 64 sessions: weights respected within 5 %, conservation, nobody starved, and stall saved beside weights
// alone.
TEST(Arbiter, HoldsInMixesOfManySessions) {
  double lost = 0, lost_by_weight = 0;
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    sim::Random random(seed);
    const size_t count = random.Between(uint64_t{2}, uint64_t{64});
    const uint64_t available = random.Between(uint64_t{4}, uint64_t{400}) * kGiB;
    std::vector<Claim> claims;
    for (size_t i = 0; i < count; ++i) claims.push_back(Trained(&random, available, count));
    const auto shares = WeightedShares(claims, available);
    ASSERT_TRUE(shares.ok()) << seed << ": " << shares.error;
    const ArbiterOptions options{.granule_bytes = kChunk};
    // From nothing, and from budgets of before.
    for (const bool held : {false, true}) {
      if (held) {
        for (size_t i = 0; i < count; ++i) {
          claims[i].held_bytes = static_cast<uint64_t>(static_cast<double>(shares.value[i]) * random.Between(0.9, 1.1));
        }
      }
      const auto split = Arbitrate(claims, available, options);
      ASSERT_TRUE(split.ok()) << seed << ": " << split.error;
      ASSERT_LE(Sum(split.value), available) << seed;
      for (size_t i = 0; i < count; ++i) {
        ASSERT_GE(split.value[i], claims[i].least_bytes) << seed;
        ASSERT_LE(split.value[i], claims[i].most_bytes) << seed;
        // Within 5 % of its share by weight in bytes, or no worse off than with that.
        const double share = static_cast<double>(shares.value[i]);
        const bool in_bytes = static_cast<double>(split.value[i]) + kChunk >= 0.95 * share;
        const uint64_t nearly = std::max(claims[i].least_bytes, static_cast<uint64_t>(0.95 * share));
        const bool in_value = StallShare(claims[i], split.value[i]) <= StallShare(claims[i], nearly) + 2e-3;
        ASSERT_TRUE(in_bytes || in_value)
            << "seed " << seed << " claim " << i << ": " << split.value[i] << " of " << share;
      }
      if (!held) {
        lost += Lost(claims, split.value);
        lost_by_weight += Lost(claims, shares.value);
        ASSERT_LE(Lost(claims, split.value), Lost(claims, shares.value) + 1e-3 * static_cast<double>(count)) << seed;
      }
      // What was decided is decided again.
      for (size_t i = 0; i < count; ++i) claims[i].held_bytes = split.value[i];
      EXPECT_EQ(Arbitrate(claims, available, options).value, split.value) << seed;
    }
  }
  EXPECT_LT(lost, 0.97 * lost_by_weight);
}

// Where every byte is of use to everybody, budgets are proportional to weights within 5 % of bytes.
TEST(Arbiter, ProportionalWhereEverybodyIsHungry) {
  for (uint64_t seed = 1; seed <= 500; ++seed) {
    sim::Random random(seed);
    const size_t count = random.Between(uint64_t{2}, uint64_t{64});
    const uint64_t available = 64 * count * kGiB;
    std::vector<Claim> claims;
    double weights = 0;
    for (size_t i = 0; i < count; ++i) {
      claims.push_back(Hungry(random.Between(0.5, 4.0), kGiB, available));
      weights += claims.back().weight;
    }
    const auto split = Arbitrate(claims, available, {.granule_bytes = kChunk});
    ASSERT_TRUE(split.ok()) << split.error;
    for (size_t i = 0; i < count; ++i) {
      const double due = static_cast<double>(available) * claims[i].weight / weights;
      EXPECT_GE(static_cast<double>(split.value[i]), 0.95 * due) << seed;
    }
  }
}

TEST(Influence, FallsFromTheSmallestBudgetToTheOneWhereAllStays) {
  const PlanInput input = Deferred({});
  const auto influence = MeasureInfluence(input);
  ASSERT_TRUE(influence.ok()) << influence.error;
  ASSERT_EQ(influence.value.size(), 6u);
  EXPECT_EQ(influence.value.front().budget_bytes, SmallestBudget(input) + input.reserve_bytes);
  EXPECT_GT(influence.value.front().stall_seconds, 0.1);
  EXPECT_NEAR(influence.value.back().stall_seconds, 0, 1e-9);
  for (size_t k = 1; k < influence.value.size(); ++k) {
    EXPECT_GT(influence.value[k].budget_bytes, influence.value[k - 1].budget_bytes);
    EXPECT_LE(influence.value[k].stall_seconds, influence.value[k - 1].stall_seconds * 1.02 + 1e-6);
  }
  EXPECT_FALSE(MeasureInfluence({}).ok());
}

}  // namespace
}  // namespace misa::policy
