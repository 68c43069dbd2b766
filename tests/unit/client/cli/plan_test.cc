#include "client/cli/plan.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace misa::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using testing::StartsWith;

PlanOptions SevenB() {
  PlanOptions options;
  options.model = "llama-7b";
  options.device = "rtx-3090";
  options.checkpointing = "full";
  return options;
}

json Answer(const PlanOptions& options) {
  std::ostringstream out, error;
  EXPECT_EQ(Plan({out, error, /*json=*/true}, options), kExitDone) << error.str();
  return json::parse(out.str());
}

TEST(PlanTest, JsonHasWhatToolsReadOfTheFirstModeAndOfEach) {
  const json answer = Answer(SevenB());
  for (const char* key : {"fits", "peak_bytes", "parts", "step_seconds", "bound_step_seconds", "tokens_per_second",
                          "host_bytes", "suggestions", "limited_by", "smallest_budget_bytes"}) {
    EXPECT_TRUE(answer.contains(key)) << key;
    for (const json& mode : answer["modes"]) EXPECT_TRUE(mode.contains(key)) << key;
  }
  EXPECT_EQ(answer["schema"], "misa.plan/1");
  EXPECT_EQ(answer["mode"], "exact");
  EXPECT_EQ(answer["fits"], true);
  ASSERT_EQ(answer["modes"].size(), 4u);
  EXPECT_EQ(answer["modes"][2]["mode"], "sampled");
  EXPECT_GE(answer["step_seconds"], answer["bound_step_seconds"]);
  EXPECT_NEAR(answer["state"]["total_bytes"], 107.8e9, 1e9);
  uint64_t sum = 0;
  for (const auto& [name, bytes] : answer["parts"].items()) sum += bytes.get<uint64_t>();
  EXPECT_EQ(answer["peak_bytes"], sum);
  EXPECT_LE(sum, uint64_t{24} << 30);
}

TEST(PlanTest, OneModeAndStepIsOneAnswer) {
  PlanOptions options = SevenB();
  options.mode = "sampled";
  options.delta = 0.01;
  const json answer = Answer(options);
  EXPECT_EQ(answer["modes"].size(), 1u);
  EXPECT_EQ(answer["delta"], 0.01);
  EXPECT_NEAR(answer["active_set_limit_bytes"], 1.078e9, 0.01e9);
  options.mode = "exact";
  options.delta.reset();
  options.step = "eager";
  EXPECT_EQ(Answer(options)["step"], "eager");
}

TEST(PlanTest, TextSaysWhatFitsAndWhatWould) {
  PlanOptions options = SevenB();
  options.batch = 64;
  options.checkpointing = "none";
  std::ostringstream out, error;
  EXPECT_EQ(Plan({out, error}, options), kExitDone);
  for (const char* text : {"107.8 GB of training state", "49.7 TFLOP/s", "batch 64 of 2048 tokens, no checkpointing",
                           "LIMITED BY", "It fits with:\n  ", "checkpointing, batch "}) {
    EXPECT_THAT(out.str(), HasSubstr(text));
  }
  EXPECT_EQ(error.str(), "");
}

TEST(PlanTest, NamesWhatIsUnknownOrContradictsItself) {
  const auto error = [](auto change) {
    PlanOptions options = SevenB();
    change(options);
    std::ostringstream out, error;
    EXPECT_EQ(Plan({out, error}, options), kExitNoDaemon);
    EXPECT_EQ(out.str(), "");
    EXPECT_THAT(error.str(), StartsWith("misactl: "));
    return error.str();
  };
  EXPECT_THAT(error([](PlanOptions& o) { o.model = "llama-8b"; }), HasSubstr("Known are llama-7b, llama-13b"));
  EXPECT_THAT(error([](PlanOptions& o) { o.device = "rtx-9090"; }), HasSubstr("Known are rtx-3090, rtx-4090"));
  EXPECT_THAT(error([](PlanOptions& o) { o.device.clear(); }), HasSubstr("either --device or --device-file"));
  EXPECT_THAT(error([](PlanOptions& o) { o.device_file = "x"; }), HasSubstr("either --device or --device-file"));
  EXPECT_THAT(error([](PlanOptions& o) { o.optimizer = "sdg"; }), HasSubstr("known are adamw"));
  EXPECT_THAT(error([](PlanOptions& o) { o.precision = "fp8"; }), HasSubstr("known are bf16-mixed"));
  EXPECT_THAT(error([](PlanOptions& o) { o.mode = "exakt"; }), HasSubstr("known are exact, sampled, quantized"));
  EXPECT_THAT(error([](PlanOptions& o) { o.step = "late"; }), HasSubstr("known are deferred, in_backward, eager"));
  EXPECT_THAT(error([](PlanOptions& o) { o.checkpointing = "some"; }), HasSubstr("known are none, full"));
  EXPECT_THAT(error([](PlanOptions& o) { o.attention = "flash"; }), HasSubstr("known are fused, unfused"));
  EXPECT_THAT(error([](PlanOptions& o) { o.budget = "much"; }), HasSubstr("--budget: \"much\""));
  EXPECT_THAT(error([](PlanOptions& o) { o.budget = "0"; }), HasSubstr("0 bytes holds nothing"));
  EXPECT_THAT(error([](PlanOptions& o) { o.budget = "80GiB"; }), HasSubstr("is more than rtx-3090 has"));
  EXPECT_THAT(error([](PlanOptions& o) { o.batch = 0; }), HasSubstr("A batch of 0"));
  EXPECT_THAT(error([](PlanOptions& o) { o.micro_batch = 2; }), HasSubstr("at most the 1 of the batch"));
  EXPECT_THAT(error([](PlanOptions& o) { o.micro_batch = 0; }), HasSubstr("at least 1 sequence"));
  EXPECT_THAT(error([](PlanOptions& o) { o.sequence = 0; }), HasSubstr("at least 1 token"));
  EXPECT_THAT(error([](PlanOptions& o) { o.sequence = 1 << 20; }), HasSubstr("longer than the 4096"));
  EXPECT_THAT(error([](PlanOptions& o) { o.delta = 0.1, o.mode = "exact"; }), HasSubstr("trains every parameter"));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THAT(error([&](PlanOptions& o) { o.delta = nan; }), HasSubstr("delta"));
  EXPECT_THAT(error([](PlanOptions& o) { o.delta = 1e-7; }), HasSubstr("model.layers."));
  EXPECT_THAT(error([&](PlanOptions& o) { o.utilization = nan; }), HasSubstr("utilization"));
  EXPECT_THAT(error([](PlanOptions& o) { o.utilization = 0; }), HasSubstr("utilization"));
  EXPECT_THAT(error([](PlanOptions& o) { o.host_memory = "x"; }), HasSubstr("--host-memory"));
}

class PlanFilesTest : public testing::Test {
 protected:
  void SetUp() override {
    char pattern[] = "/tmp/misactl-XXXXXX";
    folder_ = mkdtemp(pattern);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string Write(const std::string& name, const std::string& text) {
    std::ofstream(folder_ + "/" + name) << text;
    return folder_ + "/" + name;
  }
  std::string folder_;
};

TEST_F(PlanFilesTest, ASmallModelOnAMeasuredDevice) {
  PlanOptions options;
  options.model = Write("config.json",
                        R"({"model_type": "transformer", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 2048,
                            "num_hidden_layers": 8, "num_attention_heads": 8, "max_position_embeddings": 256,
                            "gated": false, "bias": true, "norm_bias": true, "learned_positions": true,
                            "tie_word_embeddings": true})");
  options.device_file = Write("device.json",
                              R"({"name": "measured", "capacity_bytes": 158177962, "flops_per_second": 1.3e11,
                                  "h2d_bytes_per_second": 7.8e8, "d2h_bytes_per_second": 1.6e9,
                                  "total_bytes_per_second": 1.65e9, "host_bytes": 1e12})");
  options.precision = "fp32";
  options.batch = 4;
  options.checkpointing = "full";
  options.mode = "exact";
  options.step = "deferred";
  const json answer = Answer(options);
  EXPECT_EQ(answer["fits"], true);
  EXPECT_EQ(answer["model"]["parameter_count"], 27448320);
  EXPECT_EQ(answer["tokens_per_step"], 1024);
  EXPECT_LE(answer["peak_bytes"], 158177962);
  EXPECT_GT(answer["loaded_bytes"], 0);
}

TEST_F(PlanFilesTest, FilesThatCannotBeUsedAreNamed) {
  const auto error = [](const PlanOptions& options) {
    std::ostringstream out, error;
    EXPECT_EQ(Plan({out, error}, options), kExitNoDaemon);
    return error.str();
  };
  PlanOptions options = SevenB();
  options.model = Write("config.json", R"({"model_type": "llama", "vocab_size": 5})");
  EXPECT_THAT(error(options), HasSubstr("config.json: The model's description cannot be used: \"hidden_size\" is missing"));
  options.model = folder_;
  EXPECT_THAT(error(options), HasSubstr("not a regular file"));
  options = SevenB();
  options.device.clear();
  options.device_file = Write("device.json", R"({"name": "a"})");
  EXPECT_THAT(error(options), HasSubstr("device.json: The device's description lacks"));
}

}  // namespace
}  // namespace misa::cli
