#include "runtime/trace/period.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace misa::trace {
namespace {

std::vector<uint64_t> Repeat(const std::vector<uint64_t>& block, size_t times) {
  std::vector<uint64_t> all;
  for (size_t i = 0; i < times; ++i) {
    all.insert(all.end(), block.begin(), block.end());
  }
  return all;
}

// The definition, word for word.
size_t Slow(const std::vector<uint64_t>& groups, size_t repeats, size_t smallest) {
  for (size_t p = std::max<size_t>(smallest, 1); p * repeats <= groups.size(); ++p) {
    bool equal = true;
    for (size_t i = groups.size() - p * repeats; i + p < groups.size() && equal; ++i) {
      equal = groups[i] == groups[i + p];
    }
    if (equal) {
      return p;
    }
  }
  return 0;
}

TEST(FindPeriod, FindsTheBlockOfARepeatedStep) {
  EXPECT_EQ(FindPeriod(Repeat({1, 2, 3, 3, 2, 1, 4}, 2)), 7u);
  EXPECT_EQ(FindPeriod(Repeat({1, 2, 3, 4}, 5), 3), 4u);
}

TEST(FindPeriod, ForgetsAnIrregularBeginning) {
  std::vector<uint64_t> groups = {9, 8, 7, 9, 1};
  const std::vector<uint64_t> steps = Repeat({1, 2, 3}, 2);
  groups.insert(groups.end(), steps.begin(), steps.end());
  EXPECT_EQ(FindPeriod(groups), 3u);
}

TEST(FindPeriod, IsZeroWhereNothingRepeats) {
  EXPECT_EQ(FindPeriod(std::vector<uint64_t>{}), 0u);
  EXPECT_EQ(FindPeriod(std::vector<uint64_t>{1}), 0u);
  EXPECT_EQ(FindPeriod(std::vector<uint64_t>{1, 2, 3, 4}), 0u);
  EXPECT_EQ(FindPeriod(std::vector<uint64_t>{1, 2, 1}), 0u);
  EXPECT_EQ(FindPeriod(std::vector<uint64_t>{1, 1}, 1), 0u);
}

TEST(FindPeriod, TakesNoPeriodUnderTheLimit) {
  const std::vector<uint64_t> groups = Repeat({1, 2, 5, 5}, 3);
  EXPECT_EQ(FindPeriod(groups), 1u) << "the step ends in a run";
  EXPECT_EQ(FindPeriod(groups, 2, 2), 4u);
  EXPECT_EQ(FindPeriod(groups, 2, 5), 0u);
}

TEST(FindPeriod, AgreesWithTheDefinitionOnRandomSequences) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 5000; ++round) {
    std::vector<uint64_t> block(1 + random() % 6);
    for (uint64_t& group : block) {
      group = random() % 3;
    }
    std::vector<uint64_t> groups = Repeat(block, 1 + random() % 5);
    if (random() % 2 == 0) {
      groups[random() % groups.size()] = random() % 3;
    }
    const size_t repeats = 2 + random() % 2;
    const size_t smallest = 1 + random() % 3;
    ASSERT_EQ(FindPeriod(groups, repeats, smallest), Slow(groups, repeats, smallest)) << "round " << round;
  }
}

TEST(FindLongestPeriod, IsOfTheWholeAndNotOfARunAtItsEnd) {
  const std::vector<uint64_t> groups = Repeat({1, 2, 5, 5}, 3);
  EXPECT_EQ(FindPeriod(groups), 1u);
  EXPECT_EQ(FindLongestPeriod(groups), 4u);
  EXPECT_EQ(FindLongestPeriod(Repeat({7}, 5)), 1u);
  EXPECT_EQ(FindLongestPeriod(std::vector<uint64_t>{1, 2, 3}), 0u);
  EXPECT_EQ(FindLongestPeriod(std::vector<uint64_t>{}), 0u);
}

TEST(FindLongestPeriod, AgreesWithTheDefinitionOnRandomSequences) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 2000; ++round) {
    std::vector<uint64_t> groups(2 + random() % 24);
    for (uint64_t& group : groups) group = random() % 2;
    size_t expected = 0;
    size_t longest = 0;
    for (size_t p = 1; 2 * p <= groups.size(); ++p) {
      size_t held = 0;
      while (held + p < groups.size() && groups[groups.size() - 1 - held] == groups[groups.size() - 1 - held - p]) ++held;
      if (held >= p && held > longest) {
        longest = held;
        expected = p;
      }
    }
    ASSERT_EQ(FindLongestPeriod(groups), expected) << "round " << round;
  }
}

TEST(FindPeriod, IsLinearOnSequencesThatAlmostRepeat) {
  // Half a million equal groups but for the last: a quadratic search would not end in this test's time.
  std::vector<uint64_t> groups(500000, 7);
  groups.front() = 1;
  groups.back() = 2;
  EXPECT_EQ(FindPeriod(groups), 0u);
  groups.back() = 7;
  EXPECT_EQ(FindPeriod(groups, 2, 200000), 200000u);
}

}  // namespace
}  // namespace misa::trace
