#include "runtime/predict/ppm_predictor.h"

#include <gmock/gmock.h>

#include <vector>

#include "runtime/sim/random.h"
#include "tests/unit/runtime/predict/streams.h"

namespace misa::predict {
namespace {

using ::testing::HasSubstr;

void Feed(Predictor* predictor, const std::vector<Symbol>& symbols) {
  for (const Symbol symbol : symbols) predictor->Observe(symbol);
}

TEST(PpmPredictor, TheLongestContextDecides) {
  PpmPredictor predictor({.order = 2});
  EXPECT_EQ(predictor.Predict(), std::nullopt);
  // After 1 comes 2 as a rule, but after 9, 1 always 7.
  for (int i = 0; i < 4; ++i) Feed(&predictor, {1, 2, 1, 2, 1, 2, 9, 1, 7, 3});
  Feed(&predictor, {5, 1});
  EXPECT_EQ(predictor.Predict(), 2u) << "5, 1 was never seen: the shorter context speaks";
  Feed(&predictor, {9, 1});
  EXPECT_EQ(predictor.Predict(), 7u);
}

TEST(PpmPredictor, BacksOffToWhatIsMostFrequent) {
  PpmPredictor predictor({.order = 3});
  Feed(&predictor, {1, 2, 2, 2, 3, 2, 2, 4, 2, 2, 2});
  Feed(&predictor, {100});
  EXPECT_EQ(predictor.Predict(), 2u);
}

TEST(PpmPredictor, ALongContextSeenOnceDoesNotOutweighAShortOneSeenOften) {
  PpmPredictor predictor({.order = 4});
  // 1 is followed by 2 except once, just now, in the very context that is there again.
  for (int i = 0; i < 20; ++i) Feed(&predictor, {static_cast<Symbol>(100 + i), 1, 2});
  Feed(&predictor, {50, 51, 52, 1, 9, 50, 51, 52, 1});
  EXPECT_EQ(predictor.Predict(), 2u);
}

TEST(PpmPredictor, OrderZeroCounts) {
  PpmPredictor predictor({.order = 0});
  Feed(&predictor, {1, 2, 2, 3});
  EXPECT_EQ(predictor.Predict(), 2u);
}

TEST(PpmPredictor, ForgetsWhatIsNoLongerSo) {
  PpmPredictor predictor({.order = 1});
  for (int i = 0; i < 2000; ++i) Feed(&predictor, {1, 2});
  for (int i = 0; i < 300; ++i) Feed(&predictor, {1, 3});
  Feed(&predictor, {1});
  EXPECT_EQ(predictor.Predict(), 3u);
}

TEST(PpmPredictor, FollowsBranchesThatNoPeriodHas) {
  for (const char* kind : {"layer-drop", "tasks", "moe"}) {
    PpmPredictor predictor({.order = 4, .contexts = 16384});
    const std::vector<Symbol> symbols = MakeStream(kind, 3, 8000);
    size_t right = 0;
    for (const Symbol symbol : symbols) {
      right += predictor.Predict() == symbol;
      predictor.Observe(symbol);
    }
    EXPECT_GT(right, symbols.size() * 8 / 10) << kind;
  }
}

TEST(PpmPredictor, AFullTableForgetsTheOldestAndGrowsNoFurther) {
  PpmPredictor predictor({.order = 4, .contexts = 64});
  const size_t before = predictor.memory_bytes();
  EXPECT_LT(before, 64u * 128 + 1024);
  sim::Random random(1);
  for (int i = 0; i < 20000; ++i) predictor.Observe(random.Next());
  EXPECT_EQ(predictor.memory_bytes(), before);
  // It still learns what comes now.
  for (int i = 0; i < 10; ++i) Feed(&predictor, {1, 2, 3});
  EXPECT_EQ(predictor.Predict(), 1u);
}

TEST(PpmPredictor, TheSameSymbolsGiveTheSamePredictions) {
  PpmPredictor a({.order = 3, .contexts = 128}), b({.order = 3, .contexts = 128});
  for (const Symbol symbol : MakeStream("moe", 5, 3000)) {
    ASSERT_EQ(a.Predict(), b.Predict());
    a.Observe(symbol);
    b.Observe(symbol);
  }
}

TEST(PpmPredictor, RefusesWhatCannotBe) {
  EXPECT_EQ(Check(PpmOptions{}), "");
  EXPECT_EQ(Check(PpmOptions{.order = 0, .contexts = 4}), "");
  EXPECT_THAT(Check(PpmOptions{.order = 17}),
              HasSubstr("contexts of 17 symbols were asked for, and the longest have 16"));
  EXPECT_THAT(Check(PpmOptions{.order = static_cast<size_t>(-1)}), HasSubstr("the longest have 16"));
  EXPECT_THAT(Check(PpmOptions{.contexts = 0}), HasSubstr("their number lies between 4 and"));
  EXPECT_THAT(Check(PpmOptions{.contexts = 1ull << 40}), HasSubstr("their number lies between 4 and"));
}

}  // namespace
}  // namespace misa::predict
