#include "server/predict/plugin.h"

#include <gmock/gmock.h>

#include <cstdlib>
#include <fstream>
#include <string>

#include "server/predict/predictions.h"

namespace misa::server {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::string Fake(const std::string& fault) { return std::string(FAKE_PLUGINS) + "fake_plugin_" + fault + ".so"; }

std::string LoadProblem(const std::string& path) {
  std::string problem;
  EXPECT_EQ(PredictorPlugin::Load(path, &problem), nullptr);
  return problem;
}

ComputePrediction Steps(LeaseId lease, uint64_t observed, std::vector<uint64_t> digests) {
  return {lease, observed, std::move(digests)};
}

TEST(PredictorPlugin, PredictsWhatItsLibraryPredicts) {
  std::string problem;
  const auto plugin = PredictorPlugin::Load(Fake("none"), &problem);
  ASSERT_NE(plugin, nullptr) << problem;
  EXPECT_EQ(plugin->name(), "fake");
  const auto instance = plugin->Create(1, &problem);
  ASSERT_NE(instance, nullptr) << problem;
  ASSERT_EQ(instance->Observe({4, 5, 6}), "");
  std::optional<uint64_t> symbol;
  ASSERT_EQ(instance->Predict(&symbol), "");
  EXPECT_EQ(symbol, 7u);
}

TEST(PredictorPlugin, EveryFaultIsASentenceThatSaysHowItGoesOn) {
  const auto goes_on = HasSubstr("Sessions go on as they are");
  EXPECT_THAT(LoadProblem("/nonexistent/libmisa.so"),
              AllOf(HasSubstr("/nonexistent/libmisa.so could not be loaded"), goes_on));
  EXPECT_THAT(LoadProblem(Fake("no_entry")),
              AllOf(HasSubstr("is no predictor: it has no misa_predictor_plugin"), goes_on));
  EXPECT_THAT(LoadProblem(Fake("foreign")), AllOf(HasSubstr("is made for version 99"), goes_on));
  EXPECT_THAT(LoadProblem(Fake("refuses")), AllOf(HasSubstr("is made for another version"), goes_on));
  EXPECT_THAT(LoadProblem(Fake("damaged")), AllOf(HasSubstr("its table of functions is not whole"), goes_on));
  const std::string text = ::testing::TempDir() + "/no_library.so";
  std::ofstream(text) << "this is not a library";
  EXPECT_THAT(LoadProblem(text), AllOf(HasSubstr("could not be loaded"), goes_on));
}

TEST(Predictions, EachSessionHasItsOwnUntilItIsForgotten) {
  Predictions predictions(Fake("none"));
  PredictionMade made = predictions.Compute(Steps(1, 3, {1, 2, 3}));
  EXPECT_EQ(made.problem, "");
  EXPECT_EQ(made.lease, 1u);
  EXPECT_EQ(made.observed, 3u);
  EXPECT_EQ(made.digest, 4u);
  predictions.Forget(1);
  predictions.Forget(1);
  EXPECT_EQ(predictions.Compute(Steps(2, 1, {9})).digest, 10u);
}

TEST(Predictions, AFaultComesBackAsAProblemEachTime) {
  EXPECT_THAT(Predictions("/nonexistent/libmisa.so").Compute(Steps(1, 1, {1})).problem,
              HasSubstr("could not be loaded"));
  Predictions creates(Fake("create"));
  const PredictionMade made = creates.Compute(Steps(1, 1, {1}));
  EXPECT_THAT(made.problem, HasSubstr("could not be started (0000"));
  EXPECT_LT(made.problem.size(), 1200u) << "a library's sentence is cut";
  EXPECT_EQ(made.digest, std::nullopt);
  Predictions observes(Fake("observe"));
  EXPECT_THAT(observes.Compute(Steps(1, 1, {1})).problem,
              HasSubstr("the predictor fake failed (the numbers ran away)"));
  EXPECT_THAT(observes.Compute(Steps(1, 2, {1})).problem, HasSubstr("the numbers ran away"));
}

TEST(Predictions, ThePluginIsBesideTheBinaryUnlessToldOtherwise) {
  const std::string folder = ::testing::TempDir() + "/beside";
  ASSERT_EQ(std::system(("mkdir -p " + folder + " && rm -f " + folder + "/*").c_str()), 0);
  EXPECT_EQ(PluginPath("auto", folder, false), "") << "it is not there, and nobody is told";
  std::ofstream(folder + "/libmisa_lstm_predictor.so") << "";
  EXPECT_EQ(PluginPath("auto", folder, false), folder + "/libmisa_lstm_predictor.so");
  EXPECT_EQ(PluginPath("auto", folder, true), "") << "a private daemon may share its trainer's memory limit";
  EXPECT_EQ(PluginPath("off", folder, false), "");
  EXPECT_EQ(PluginPath("/elsewhere/x.so", folder, true), "/elsewhere/x.so") << "named, so wanted: its absence is told";
}

}  // namespace
}  // namespace misa::server
