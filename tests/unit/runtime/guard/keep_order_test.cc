#include "runtime/guard/keep_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "runtime/sim/random.h"

namespace misa::guard {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(KeepOrder, CriticalOnesFirstThenHotOnesByRank) {
  const std::vector<KeepCandidate> candidates = {{10, 0.9, false, true},
                                                 {10, 0.1, true, false},
                                                 {10, 1.0, false, true},
                                                 {10, 0.5, false, false},
                                                 {10, 0.3, true, true}};
  EXPECT_THAT(KeepOrder(candidates, {}), ElementsAre(4, 1, 2, 0));
  EXPECT_THAT(KeepOrder({}, {}), IsEmpty());
  EXPECT_THAT(KeepOrder({{1, std::nan(""), true, false}, {1, 0.5, true, false}}, {}), ElementsAre(1, 0));
}

TEST(KeepOrder, AModuleComesWithWhatItNeedsAndNeverWithWhatItIsApartFrom) {
  ResolvedDependencies dependencies;
  ASSERT_EQ(
      Resolve({"a", "b", "c", "d"}, {{"a", Dependency::kNeeds, "b"}, {"a", Dependency::kApart, "c"}}, &dependencies),
      "");
  const std::vector<KeepCandidate> candidates = {
      {10, 0.9, false, true}, {20, 0.0, false, false}, {10, 0.8, false, true}, {10, 0.7, false, true}};
  const std::vector<uint32_t> order = KeepOrder(candidates, dependencies);
  EXPECT_THAT(order, ElementsAre(1, 0, 3));
  EXPECT_EQ(KeepCount(order, candidates, dependencies, 100), 3u);
  EXPECT_EQ(KeepCount(order, candidates, dependencies, 29), 1u) << "b alone fits";
  EXPECT_EQ(KeepCount(order, candidates, dependencies, 30), 2u);
  EXPECT_EQ(KeepCount(order, candidates, dependencies, 19), 0u);
}

TEST(KeepCount, NeverKeepsHalfOfTwoThatNeedEachOther) {
  ResolvedDependencies dependencies;
  ASSERT_EQ(Resolve({"a", "b"}, {{"a", Dependency::kNeeds, "b"}, {"b", Dependency::kNeeds, "a"}}, &dependencies), "");
  const std::vector<KeepCandidate> candidates = {{10, 0.9, false, true}, {10, 0.8, false, true}};
  const std::vector<uint32_t> order = KeepOrder(candidates, dependencies);
  EXPECT_EQ(KeepCount(order, candidates, dependencies, 15), 0u);
  EXPECT_EQ(KeepCount(order, candidates, dependencies, 20), 2u);
}

// A small training while its budget shrinks from all of its modules to none: each step needs every critical module, and
// some others by chance; what is not on the device is waited for. Seconds waited for critical ones.
struct Degraded {
  double critical_seconds = 0;
  size_t moved = 0;  // modules that came back although the budget only shrank
};

Degraded Shrink(bool guarded) {
  constexpr size_t kModules = 20;
  sim::Random random(7);
  std::vector<KeepCandidate> candidates;
  for (size_t i = 0; i < kModules; ++i) {
    // Embeddings and norms have small gradients: by importance alone they would be the first to leave.
    const bool critical = i < 4;
    candidates.push_back(
        {random.Between(uint64_t{50}, uint64_t{150}), critical ? 0.05 : random.Between(0.3, 1.0), critical, true});
  }
  uint64_t total = 0;
  for (const KeepCandidate& candidate : candidates) total += candidate.bytes;
  std::vector<KeepCandidate> judged = candidates;
  if (!guarded) {
    for (KeepCandidate& candidate : judged) candidate.critical = false;
  }
  Degraded result;
  std::set<uint32_t> before;
  for (int step = 0; step <= 100; ++step) {
    const std::vector<uint32_t> order = KeepOrder(judged, {});
    const size_t count = KeepCount(order, judged, {}, total * (100 - step) / 100);
    const std::set<uint32_t> kept(order.begin(), order.begin() + static_cast<ptrdiff_t>(count));
    for (const uint32_t module : kept) result.moved += step > 0 && !before.contains(module);
    for (uint32_t i = 0; i < 4; ++i) {
      if (!kept.contains(i)) result.critical_seconds += static_cast<double>(candidates[i].bytes) / 1000;
    }
    before = kept;
  }
  return result;
}

TEST(KeepOrder, DegradesStepByStepWithCriticalModulesLast) {
  const Degraded without = Shrink(false);
  const Degraded with = Shrink(true);
  EXPECT_GT(without.critical_seconds, 4 * with.critical_seconds);
  EXPECT_EQ(with.moved, 0u);
}

}  // namespace
}  // namespace misa::guard
