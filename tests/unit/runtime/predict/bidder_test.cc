#include "runtime/predict/bidder.h"

#include <gmock/gmock.h>

#include <limits>
#include <vector>

#include "runtime/predict/awaited_predictor.h"
#include "tests/unit/runtime/predict/streams.h"

namespace misa::predict {
namespace {

using ::testing::HasSubstr;

// Always says the same, or nothing.
class Fixed final : public Predictor {
 public:
  Fixed(const char* name, std::optional<Symbol> symbol) : name_(name), symbol_(symbol) {}
  const char* name() const override { return name_; }
  void Observe(Symbol) override {}
  std::optional<Symbol> Predict() const override { return symbol_; }
  size_t memory_bytes() const override { return sizeof(*this); }

 private:
  const char* name_;
  std::optional<Symbol> symbol_;
};

std::vector<std::unique_ptr<Predictor>> Two(std::optional<Symbol> cheap, std::optional<Symbol> dear) {
  std::vector<std::unique_ptr<Predictor>> two;
  two.push_back(std::make_unique<Fixed>("cheap", cheap));
  two.push_back(std::make_unique<Fixed>("dear", dear));
  return two;
}

TEST(Bidder, BelievesWhoWasRightLately) {
  Bidder bidder({.window = 8}, Two(1, 2));
  EXPECT_EQ(bidder.Predict(), 1u) << "nothing was seen: the cheaper one";
  for (int i = 0; i < 20; ++i) bidder.Observe(2);
  EXPECT_EQ(bidder.Predict(), 2u);
  for (int i = 0; i < 20; ++i) bidder.Observe(1);
  EXPECT_EQ(bidder.Predict(), 1u);
  const std::vector<Standing> standings = bidder.standings();
  ASSERT_EQ(standings.size(), 3u);
  EXPECT_STREQ(standings[0].name, "cheap");
  EXPECT_STREQ(standings[2].name, "bidder");
  EXPECT_GT(standings[0].accuracy, 0.9);
  EXPECT_LT(standings[1].accuracy, 0.1);
  EXPECT_EQ(standings[0].right, 20u);
  EXPECT_EQ(standings[1].right, 20u);
}

TEST(Bidder, OfEqualsTheCheaper) {
  Bidder bidder({}, Two(1, 2));
  for (int i = 0; i < 5; ++i) bidder.Observe(3);
  EXPECT_EQ(bidder.Predict(), 1u);
}

TEST(Bidder, SilenceIsWrongAndLeavesTheWordToOthers) {
  Bidder bidder({}, Two(std::nullopt, 2));
  EXPECT_EQ(bidder.Predict(), 2u);
  bidder.Observe(2);
  EXPECT_EQ(bidder.standings()[0].accuracy, 0);
  EXPECT_EQ(bidder.standings()[1].accuracy, 1);
  Bidder silent({}, Two(std::nullopt, std::nullopt));
  silent.Observe(1);
  EXPECT_EQ(silent.Predict(), std::nullopt);
}

TEST(Bidder, WithoutPredictorsSaysNothing) {
  Bidder bidder({}, {});
  bidder.Observe(1);
  EXPECT_EQ(bidder.Predict(), std::nullopt);
  ASSERT_EQ(bidder.standings().size(), 1u);
  EXPECT_EQ(bidder.standings()[0].accuracy, 0);
}

TEST(Bidder, IsAsGoodAsTheBestOnEveryKindOfTrace) {
  for (const char* kind : {"dense", "layer-drop", "tasks", "moe"}) {
    StepPredictorOptions options;
    options.ppm.contexts = 16384;
    const auto bidder = MakeStepBidder(options);
    const std::vector<Symbol> symbols = MakeStream(kind, 2, 6000);
    for (const Symbol symbol : symbols) bidder->Observe(symbol);
    uint64_t best = 0;
    const std::vector<Standing> standings = bidder->standings();
    for (size_t i = 0; i + 1 < standings.size(); ++i) best = std::max(best, standings[i].right);
    EXPECT_GE(static_cast<double>(standings.back().right), 0.98 * static_cast<double>(best)) << kind;
  }
}

TEST(Bidder, ChangesOfTheLawAreFollowed) {
  const auto bidder = MakeStepBidder({});
  for (int i = 0; i < 200; ++i) bidder->Observe(7);
  EXPECT_EQ(bidder->Predict(), 7u);
  size_t wrong = 0;
  for (int i = 0; i < 200; ++i) {
    const Symbol symbol = i % 2;
    wrong += bidder->Predict() != symbol;
    bidder->Observe(symbol);
  }
  // The one that says what was last was always right before, and has to lose that first.
  EXPECT_LT(wrong, 70u);
}

TEST(Bidder, ItsMemoryIsBoundedByItsOptions) {
  const auto bidder = MakeStepBidder({});
  const size_t before = bidder->memory_bytes();
  EXPECT_LT(before, 256u << 10);
  for (Symbol symbol = 0; symbol < 5000; ++symbol) bidder->Observe(symbol * symbol);
  EXPECT_EQ(bidder->memory_bytes(), before);
}

TEST(Bidder, RefusesWhatCannotBe) {
  EXPECT_EQ(Check(StepPredictorOptions{}), "");
  EXPECT_THAT(Check(BidderOptions{.window = std::numeric_limits<double>::quiet_NaN()}),
              HasSubstr("the window lies between 1 and"));
  EXPECT_THAT(Check(BidderOptions{.window = 0}), HasSubstr("the window lies between 1 and"));
  EXPECT_THAT(Check(BidderOptions{.window = std::numeric_limits<double>::infinity()}), HasSubstr("1000000"));
  StepPredictorOptions options;
  options.ppm.order = 99;
  EXPECT_THAT(Check(options), HasSubstr("contexts of 99 symbols"));
}

TEST(AwaitedPredictor, WhatComesInTimeCountsAndWhatComesLateDoesNot) {
  AwaitedPredictor predictor("elsewhere");
  EXPECT_STREQ(predictor.name(), "elsewhere");
  predictor.Observe(1);
  EXPECT_TRUE(predictor.Arrive(1, 42));
  EXPECT_EQ(predictor.Predict(), 42u);
  predictor.Observe(42);
  EXPECT_EQ(predictor.Predict(), std::nullopt) << "it was said of the symbol before";
  predictor.Observe(2);
  EXPECT_FALSE(predictor.Arrive(2, 43));
  EXPECT_FALSE(predictor.Arrive(99, 43));
  EXPECT_EQ(predictor.Predict(), std::nullopt);
}

}  // namespace
}  // namespace misa::predict
