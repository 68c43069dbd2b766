#include "runtime/policy/session_plan.h"

#include <gtest/gtest.h>

namespace misa::policy {
namespace {

PlanInput Four() {
  PlanInput input;
  input.facet_bytes.assign(4, 100);
  input.budget_bytes = 250;
  input.link = {1e6, 1e6, 5e5, 5e5};
  for (uint32_t p = 0; p < 4; ++p) input.trace.entries.push_back({{{p, kRead}}, 1.0, 100});
  return input;
}

TEST(MakeSessionPlan, KeepsTheReserveWhereItCan) {
  PlanInput input = Four();
  input.reserve_bytes = 50;
  const SessionPlan made = MakeSessionPlan(input);
  ASSERT_TRUE(made.plan.ok()) << made.plan.error;
  EXPECT_EQ(made.plan.value.loaded_bytes, 400u);  // one facet fits at a time
}

TEST(MakeSessionPlan, GivesTheReserveUpRatherThanThePlan) {
  PlanInput input = Four();
  input.reserve_bytes = 100;
  const SessionPlan made = MakeSessionPlan(input);
  ASSERT_TRUE(made.plan.ok()) << made.plan.error;
  ASSERT_TRUE(made.bound.ok()) << made.bound.error;
  input.reserve_bytes = 0;
  EXPECT_EQ(made.bound.value.load_bytes, MakeSessionPlan(input).bound.value.load_bytes);
}

TEST(MakeSessionPlan, SaysWhyThereIsNone) {
  PlanInput input = Four();
  input.budget_bytes = 150;
  const SessionPlan made = MakeSessionPlan(input);
  ASSERT_FALSE(made.plan.ok());
  EXPECT_NE(made.plan.error.find("150"), std::string::npos) << made.plan.error;
  EXPECT_FALSE(made.bound.ok());
}

}  // namespace
}  // namespace misa::policy
