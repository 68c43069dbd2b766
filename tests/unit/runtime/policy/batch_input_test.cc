#include "runtime/policy/batch_input.h"

#include <gtest/gtest.h>

namespace misa::policy {
namespace {

TEST(BatchInputOf, CountsEachFacetOfAPositionOnce) {
  PlanInput plan;
  plan.facet_bytes = {100, 20};
  plan.budget_bytes = 1000;
  plan.reserve_bytes = 30;
  plan.trace.entries.push_back({{{0, kRead}, {1, kRead}, {0, kWrite}}, 1.0, 7});
  plan.trace.entries.push_back({{{0, kRead}}, 1.0, 9});
  const guard::BatchInput input = BatchInputOf(plan, 500, 4);
  EXPECT_EQ(input.budget_bytes, 1000u);
  EXPECT_EQ(input.reserve_bytes, 30u);
  EXPECT_EQ(input.peak_bytes, 500u);
  EXPECT_EQ(input.rows, 4u);
  ASSERT_EQ(input.positions.size(), 2u);
  EXPECT_EQ(input.positions[0].managed_bytes, 120u);
  EXPECT_EQ(input.positions[0].other_bytes, 7u);
  EXPECT_EQ(input.positions[1].managed_bytes, 100u);
}

}  // namespace
}  // namespace misa::policy
