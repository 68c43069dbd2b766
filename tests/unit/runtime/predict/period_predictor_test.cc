#include "runtime/predict/period_predictor.h"

#include <gmock/gmock.h>

#include <limits>
#include <vector>

#include "tests/unit/runtime/predict/streams.h"

namespace misa::predict {
namespace {

using ::testing::HasSubstr;

size_t CountWrong(Predictor* predictor, const std::vector<Symbol>& symbols) {
  size_t wrong = 0;
  for (const Symbol symbol : symbols) {
    wrong += predictor->Predict() != symbol;
    predictor->Observe(symbol);
  }
  return wrong;
}

TEST(PeriodPredictor, IsPerfectAfterTwoPeriods) {
  PeriodPredictor predictor;
  EXPECT_EQ(predictor.Predict(), std::nullopt);
  std::vector<Symbol> symbols;
  for (int i = 0; i < 50; ++i) symbols.insert(symbols.end(), {5, 9, 7, 2, 8});
  EXPECT_EQ(CountWrong(&predictor, symbols), 10u);
  EXPECT_EQ(predictor.period(), 5u);
}

TEST(PeriodPredictor, ARunAtTheEndDoesNotHideThePeriod) {
  PeriodPredictor predictor;
  std::vector<Symbol> symbols;
  for (int i = 0; i < 3; ++i) symbols.insert(symbols.end(), {1, 1, 1, 2, 2, 2});
  CountWrong(&predictor, symbols);
  EXPECT_EQ(CountWrong(&predictor, symbols), 0u);
  EXPECT_EQ(predictor.period(), 6u);
}

TEST(PeriodPredictor, ForgetsAPeriodThatEndsAndFindsTheNext) {
  PeriodPredictor predictor;
  std::vector<Symbol> symbols;
  for (int i = 0; i < 4; ++i) symbols.insert(symbols.end(), {1, 2, 3});
  CountWrong(&predictor, symbols);
  predictor.Observe(9);
  EXPECT_EQ(predictor.Predict(), std::nullopt);
  EXPECT_EQ(CountWrong(&predictor, {4, 5, 4, 5, 4, 5}), 4u);
}

TEST(PeriodPredictor, APeriodTooLongForTheWindowIsNone) {
  PeriodPredictor predictor({.window = 8});
  std::vector<Symbol> symbols;
  for (int i = 0; i < 10; ++i) symbols.insert(symbols.end(), {1, 2, 3, 4, 5});
  EXPECT_EQ(CountWrong(&predictor, symbols), symbols.size());
  EXPECT_EQ(predictor.period(), 0u);
}

TEST(PeriodPredictor, HasNothingToSayOfStepsThatDiffer) {
  PeriodPredictor dense, dropping;
  EXPECT_LT(CountWrong(&dense, MakeStream("dense", 1, 4000)), 100u);
  EXPECT_GT(CountWrong(&dropping, MakeStream("layer-drop", 1, 4000)), 3600u);
}

TEST(PeriodPredictor, TakesNoMoreMemoryThanItsWindow) {
  PeriodPredictor predictor({.window = 64});
  const size_t before = predictor.memory_bytes();
  for (Symbol symbol = 0; symbol < 10000; ++symbol) predictor.Observe(symbol);
  EXPECT_EQ(predictor.memory_bytes(), before);
  EXPECT_LT(before, 2048u);
}

TEST(PeriodPredictor, RefusesAWindowThatIsNone) {
  EXPECT_EQ(Check(PeriodOptions{}), "");
  EXPECT_THAT(Check(PeriodOptions{.window = 0}), HasSubstr("in 0 symbols; the window lies between 4 and"));
  EXPECT_THAT(Check(PeriodOptions{.window = std::numeric_limits<size_t>::max()}), HasSubstr("the window lies between"));
}

TEST(LastPredictor, SaysWhatWasLast) {
  LastPredictor predictor;
  EXPECT_EQ(predictor.Predict(), std::nullopt);
  EXPECT_EQ(CountWrong(&predictor, {3, 3, 3, 4, 4, 3}), 3u);
}

}  // namespace
}  // namespace misa::predict
