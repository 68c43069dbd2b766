#include "runtime/guard/batch_hint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

namespace misa::guard {
namespace {

using ::testing::HasSubstr;

TEST(HintBatch, CountsWithTheFormula) {
  // 1000 of budget, 50 kept free; 700 at the peak, of which 200 were other tensors of 8 rows.
  const BatchInput input{1000, 50, 700, 8, {{300, 100}, {150, 200}, {400, 0}}};
  const BatchHint hint = HintBatch(input);
  ASSERT_TRUE(hint.known);
  EXPECT_DOUBLE_EQ(hint.free_share, 1 + 250.0 / 200);
  EXPECT_DOUBLE_EQ(hint.most_share, 800.0 / 200);
  EXPECT_EQ(hint.free_rows, 18u);
  EXPECT_EQ(hint.most_rows, 32u);
  EXPECT_THAT(hint.sentence, HasSubstr("18 rows (10 more); at most 32"));
}

TEST(HintBatch, SaysFewerWhereThePeakIsAboveTheRoom) {
  const BatchHint hint = HintBatch({1000, 0, 1200, 8, {{500, 700}}});
  EXPECT_LT(hint.free_share, 1);
  EXPECT_EQ(hint.most_rows, 5u);
  EXPECT_LE(hint.free_rows, hint.most_rows);
  EXPECT_THAT(hint.sentence, HasSubstr("fewer"));
  EXPECT_EQ(HintBatch({100, 0, 1200, 8, {{500, 700}}}).most_rows, 0u);
}

TEST(HintBatch, KnowsWhatItDoesNotKnow) {
  EXPECT_FALSE(HintBatch({1000, 0, 500, 8, {}}).known);
  EXPECT_FALSE(HintBatch({1000, 0, 500, 8, {{500, 0}}}).known);
  EXPECT_FALSE(HintBatch({0, 0, 500, 8, {{500, 1}}}).known);
  const BatchHint shares = HintBatch({1000, 0, 500, 0, {{500, 250}}});
  EXPECT_TRUE(shares.known);
  EXPECT_EQ(shares.most_rows, 0u);
  EXPECT_THAT(shares.sentence, HasSubstr("2.00 times at most"));
  const uint64_t huge = std::numeric_limits<uint64_t>::max();
  EXPECT_GT(HintBatch({huge, 0, 1, huge, {{0, 1}}}).most_rows, huge / 4) << "no overflow";
}

// A small training: managed state of ten modules, of which as many stay as fit; activations by the row. A batch that
// does not fit ends it, as on a device.
struct Device {
  uint64_t budget = 10000;
  uint64_t module = 600;
  uint64_t per_row = 90;

  bool Runs(uint64_t rows) const { return module + per_row * rows <= budget; }
  BatchHint Hint(uint64_t rows, uint64_t resident) const {
    return HintBatch({budget,
                      0,
                      resident * module + per_row * rows,
                      rows,
                      {{module, per_row * rows / 2}, {module, per_row * rows}}});
  }
};

TEST(HintBatch, FindsTheLargestBatchThatDoublingRunsPast) {
  const Device device;
  uint64_t doubled = 8;
  while (device.Runs(doubled) && doubled < 1000) doubled *= 2;
  EXPECT_FALSE(device.Runs(doubled)) << "trying it out ends in a step that does not fit";
  const BatchHint hint = device.Hint(8, 10);
  EXPECT_TRUE(device.Runs(hint.most_rows));
  EXPECT_FALSE(device.Runs(hint.most_rows + 1));
  // With what is free now, nothing has to leave.
  EXPECT_LE(10 * device.module + device.per_row * hint.free_rows, device.budget);
  EXPECT_GT(10 * device.module + device.per_row * (hint.free_rows + 1), device.budget);
}

}  // namespace
}  // namespace misa::guard
