#include "runtime/capacity/model.h"

#include <gmock/gmock.h>

#include <nlohmann/json.hpp>

namespace misa::capacity {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

Model Known(const std::string& name) {
  const ModelShape* shape = FindModel(name);
  EXPECT_NE(shape, nullptr) << name;
  const policy::Result<Model> model = BuildModel(*shape);
  EXPECT_EQ(model.error, "");
  return model.value;
}

TEST(ModelTest, KnownModelsHaveTheirParameters) {
  // Published counts, and of one block.
  const struct {
    const char* name;
    double parameters;
    double block;
  } expected[] = {
      {"llama-7b", 6.738e9, 202.4e6},    {"llama-13b", 13.016e9, 317.2e6}, {"llama-70b", 68.977e9, 855.7e6},
      {"llama3-8b", 8.030e9, 218.1e6},   {"mistral-7b", 7.242e9, 218.1e6}, {"qwen2-7b", 7.616e9, 233.1e6},
      {"llama3.2-1b", 1.236e9, 60.8e6},  {"gpt2", 124.4e6, 7.088e6},       {"gpt2-xl", 1.5576e9, 30.74e6},
      {"llama-30b", 32.53e9, 535.0e6},   {"llama-65b", 65.29e9, 809.5e6},  {"llama3-70b", 70.55e9, 855.7e6},
  };
  for (const auto& [name, parameters, block] : expected) {
    const Model model = Known(name);
    EXPECT_NEAR(static_cast<double>(model.parameter_count), parameters, 1e-3 * parameters) << name;
    EXPECT_NEAR(static_cast<double>(model.block_parameter_count), block, 1e-3 * block) << name;
  }
  EXPECT_EQ(std::size(expected), KnownModels().size());
}

TEST(ModelTest, OperationsUseEveryParameterInForwardOrder) {
  for (const ModelShape& shape : KnownModels()) {
    const Model model = Known(shape.name);
    std::vector<int> uses(model.parameters.size(), 0);
    for (const Operation& operation : model.operations) {
      for (const uint32_t parameter : operation.parameters) ++uses[parameter];
    }
    for (size_t i = 0; i < uses.size(); ++i) {
      const bool twice = shape.tied && model.parameters[i].name == "model.embed_tokens.weight";
      EXPECT_EQ(uses[i], twice ? 2 : 1) << shape.name << " " << model.parameters[i].name;
    }
  }
}

const char kLlama[] = R"({"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
  "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096, "tie_word_embeddings": false,
  "rope_theta": 10000.0, "torch_dtype": "float16", "_name_or_path": "a/llama"})";

TEST(ModelConfigTest, ReadsWhatHuggingFaceWrites) {
  const policy::Result<ModelShape> shape = ParseModelConfig(kLlama);
  ASSERT_EQ(shape.error, "");
  EXPECT_EQ(shape.value.name, "a/llama");
  EXPECT_EQ(BuildModel(shape.value).value.parameter_count, Known("llama-7b").parameter_count);
}

TEST(ModelConfigTest, ReadsOtherFamilies) {
  const auto count = [](const char* text) {
    const policy::Result<ModelShape> shape = ParseModelConfig(text);
    EXPECT_EQ(shape.error, "");
    return BuildModel(shape.value).value.parameter_count;
  };
  EXPECT_EQ(count(R"({"model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12,
                      "n_positions": 1024, "n_inner": null})"),
            124439808u);
  // qwen2.5-0.5b: 494,032,768; qwen3-0.6b: 596,049,920; gemma-2-2b: 2,614,341,888; pythia-160m: 162,322,944.
  EXPECT_EQ(count(R"({"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
                      "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
                      "tie_word_embeddings": true})"),
            494032768u);
  EXPECT_EQ(count(R"({"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
                      "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
                      "tie_word_embeddings": true})"),
            596049920u);
  EXPECT_EQ(count(R"({"model_type": "gemma2", "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216,
                      "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256})"),
            2614341888u);
  EXPECT_EQ(count(R"({"model_type": "gpt_neox", "vocab_size": 50304, "hidden_size": 768, "intermediate_size": 3072,
                      "num_hidden_layers": 12, "num_attention_heads": 12})"),
            162322944u);
  EXPECT_EQ(count(R"({"model_type": "phi3", "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
                      "num_hidden_layers": 32, "num_attention_heads": 32})"),
            3821079552u);
  // The model that the demo trains: separate matrices with biases, learned positions, a tied head.
  EXPECT_EQ(count(R"({"model_type": "transformer", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 2048,
                      "num_hidden_layers": 8, "num_attention_heads": 8, "max_position_embeddings": 256, "gated": false,
                      "bias": true, "norm_bias": true, "learned_positions": true, "tie_word_embeddings": true})"),
            27448320u);
}

TEST(ModelConfigTest, SaysWhatIsMissingOrNotSupported) {
  const auto error = [](auto change) {
    json config = json::parse(kLlama);
    change(config);
    return ParseModelConfig(config.dump()).error;
  };
  EXPECT_THAT(ParseModelConfig("[1]").error, HasSubstr("not a JSON object"));
  EXPECT_THAT(ParseModelConfig("{\"a\": ").error, HasSubstr("not a JSON object"));
  EXPECT_THAT(error([](json& c) { c.erase("model_type"); }), HasSubstr("\"model_type\" is missing; it is one of llama,"));
  EXPECT_THAT(error([](json& c) { c["model_type"] = "mamba"; }), HasSubstr("is \"mamba\", and supported are llama,"));
  EXPECT_THAT(error([](json& c) { c.erase("hidden_size"); }), HasSubstr("\"hidden_size\" is missing"));
  EXPECT_THAT(error([](json& c) { c["num_hidden_layers"] = 0; }), HasSubstr("\"num_hidden_layers\" is 0"));
  EXPECT_THAT(error([](json& c) { c["num_hidden_layers"] = -3; }), HasSubstr("\"num_hidden_layers\" is -3"));
  EXPECT_THAT(error([](json& c) { c["vocab_size"] = "many"; }), HasSubstr("must be a whole number above 0"));
  EXPECT_THAT(error([](json& c) { c["vocab_size"] = 3.5; }), HasSubstr("must be a whole number above 0"));
  EXPECT_THAT(error([](json& c) { c["tie_word_embeddings"] = 1; }), HasSubstr("true or false"));
  EXPECT_THAT(error([](json& c) { c["num_local_experts"] = 8; }), HasSubstr("mixture of experts"));
  EXPECT_THAT(error([](json& c) { c["num_key_value_heads"] = 5; }), HasSubstr("cannot share 5"));
  EXPECT_THAT(error([](json& c) { c["hidden_size"] = uint64_t{1} << 60; }), HasSubstr("must be between 1 and"));
  EXPECT_THAT(error([](json& c) { c["num_hidden_layers"] = 1000000; }), HasSubstr("the most is 4096"));
}

}  // namespace
}  // namespace misa::capacity
