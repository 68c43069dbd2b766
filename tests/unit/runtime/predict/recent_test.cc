#include "runtime/predict/recent.h"

#include <gmock/gmock.h>

namespace misa::predict {
namespace {

TEST(Recent, ForgetsWhatWasLookedAtLongestAgo) {
  Recent<int> recent(2);
  *recent.Touch(1) = 10;
  *recent.Touch(2) = 20;
  int* one = recent.Touch(1);
  EXPECT_EQ(*one, 10);
  *recent.Touch(3) = 30;
  EXPECT_EQ(recent.Find(2), nullptr);
  EXPECT_EQ(recent.Find(1), one) << "addresses hold";
  EXPECT_EQ(*recent.Find(3), 30);
  EXPECT_EQ(recent.items().size(), 2u);
  EXPECT_EQ(recent.items().front().digest, 3u);
}

TEST(Recent, ALookDoesNotKeepIt) {
  Recent<int> recent(2);
  recent.Touch(1);
  recent.Touch(2);
  EXPECT_NE(recent.Find(1), nullptr);
  recent.Touch(3);
  EXPECT_EQ(recent.Find(1), nullptr);
}

}  // namespace
}  // namespace misa::predict
