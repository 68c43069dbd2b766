// The LSTM predictor as misad loads it: a shared library behind the plug-in's C interface.
#include <gmock/gmock.h>

#include <string>
#include <vector>

#include "server/predict/plugin.h"
#include "tests/unit/runtime/predict/streams.h"

namespace misa::server {
namespace {

std::unique_ptr<PredictorPlugin::Instance> Create(uint64_t seed = 1) {
  static std::string problem;
  static const auto plugin = PredictorPlugin::Load(LSTM_PLUGIN, &problem);
  EXPECT_NE(plugin, nullptr) << problem;
  return plugin != nullptr ? plugin->Create(seed, &problem) : nullptr;
}

// Predictions of every symbol from `from` on.
std::vector<std::optional<uint64_t>> Follow(PredictorPlugin::Instance* instance, const std::vector<uint64_t>& symbols,
                                            size_t from, size_t* right) {
  std::vector<std::optional<uint64_t>> said;
  EXPECT_EQ(instance->Observe({symbols.begin(), symbols.begin() + static_cast<std::ptrdiff_t>(from)}), "");
  *right = 0;
  for (size_t i = from; i < symbols.size(); ++i) {
    std::optional<uint64_t> symbol;
    EXPECT_EQ(instance->Predict(&symbol), "");
    *right += symbol == symbols[i];
    said.push_back(symbol);
    EXPECT_EQ(instance->Observe({symbols[i]}), "");
  }
  return said;
}

TEST(LstmPredictor, LearnsBranchesThatDependOnWhatWasLongAgo) {
  const auto instance = Create();
  ASSERT_NE(instance, nullptr);
  const std::vector<uint64_t> symbols = predict::MakeStream("tasks", 4, 2300);
  size_t right = 0;
  Follow(instance.get(), symbols, 2000, &right);
  EXPECT_GT(right, 300u * 8 / 10);
}

TEST(LstmPredictor, TheSameSymbolsGiveTheSamePredictions) {
  const std::vector<uint64_t> symbols = predict::MakeStream("moe", 4, 260);
  size_t right = 0;
  const auto one = Follow(Create().get(), symbols, 200, &right);
  EXPECT_EQ(Follow(Create().get(), symbols, 200, &right), one);
}

TEST(LstmPredictor, MoreSymbolsThanItKnowsAreOne) {
  const auto instance = Create();
  ASSERT_NE(instance, nullptr);
  std::optional<uint64_t> symbol = 1;
  ASSERT_EQ(instance->Predict(&symbol), "");
  EXPECT_EQ(symbol, std::nullopt) << "nothing was seen";
  ASSERT_EQ(instance->Observe({}), "");
  std::vector<uint64_t> symbols;
  for (uint64_t i = 0; i < 400; ++i) symbols.push_back(i * i * 0x9e3779b97f4a7c15ull);
  EXPECT_EQ(instance->Observe(symbols), "");
  EXPECT_EQ(instance->Predict(&symbol), "");
}

}  // namespace
}  // namespace misa::server
