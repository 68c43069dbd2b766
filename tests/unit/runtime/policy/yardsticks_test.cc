// The yardsticks' known values, and the planner beside them.
#include "runtime/policy/yardsticks.h"

#include <gtest/gtest.h>

#include <numeric>

#include "runtime/policy/planner.h"
#include "tests/unit/runtime/policy/workloads.h"

namespace misa::policy {
namespace {

constexpr uint32_t kUnits = 40;
constexpr size_t kFit = 38;

TEST(Yardsticks, ThreePass) {
  EXPECT_EQ(LruMisses(ThreePass(kUnits), kFit, 5).back(), 44u);
  EXPECT_EQ(BeladyMisses(ThreePass(kUnits), kFit, 5).back(), 6u);
}

TEST(Yardsticks, ZigZag) {
  EXPECT_EQ(LruMisses(ZigZag(kUnits), kFit, 5).back(), 4u);
  EXPECT_EQ(BeladyMisses(ZigZag(kUnits), kFit, 5).back(), 4u);
}

TEST(Yardsticks, ForwardOnly) {
  EXPECT_EQ(LruMisses(ForwardOnly(kUnits), kFit, 5).back(), 40u);
  // Each miss leaves all but one unit of the 39 others in place: 40 / 39 of the two that do not fit.
  const std::vector<size_t> misses = BeladyMisses(ForwardOnly(kUnits), kFit, 1 + 39 * 10);
  const double average = std::accumulate(misses.begin() + 1, misses.end(), 0.0) / (39 * 10);
  EXPECT_NEAR(average, 2.0 * 40 / 39, 0.01);
}

TEST(Yardsticks, TheFirstPeriodIsCold) {
  EXPECT_EQ(LruMisses(ZigZag(3), 5, 2), (std::vector<size_t>{3, 0}));
  EXPECT_EQ(BeladyMisses(ZigZag(3), 5, 2), (std::vector<size_t>{3, 0}));
}

// Facets whose uses are one position long: prefetch would take a third slot while the use has one, so the plan is on a
// fast link, where it may load at the use itself.
uint64_t PlannedLoads(const std::vector<uint32_t>& order) {
  const Result<Plan> plan = MakePlan(UnitTrace(order, kFit));
  EXPECT_TRUE(plan.ok()) << plan.error;
  return plan.value.loaded_bytes;
}

TEST(Yardsticks, ThePlanLoadsNoMoreThanBelady) {
  EXPECT_LE(PlannedLoads(ThreePass(kUnits)), 6u);
  EXPECT_LE(PlannedLoads(ZigZag(kUnits)), 4u);
  // Belady's 2.05 is an average over 39 periods that all differ. A plan is one period: a facet stays in each or in none,
  // and 37 can stay beside the one in use, so 3 is the least.
  EXPECT_LE(PlannedLoads(ForwardOnly(kUnits)), 3u);
}

TEST(Yardsticks, TheBoundIsBeladyOnUnits) {
  EXPECT_EQ(LowerBound(UnitTrace(ThreePass(kUnits), kFit)).value.load_bytes, 6u);
  EXPECT_EQ(LowerBound(UnitTrace(ZigZag(kUnits), kFit)).value.load_bytes, 4u);
  EXPECT_EQ(LowerBound(UnitTrace(ForwardOnly(kUnits), kFit)).value.load_bytes, 2u);
}

}  // namespace
}  // namespace misa::policy
