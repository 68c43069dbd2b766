#include "runtime/modules/grouping.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <set>

namespace misa::modules {
namespace {

using ::testing::ElementsAre;

ParameterShape Matrix(const std::string& name) { return {name, 2, 256 * 256, 256 * 256 * 4}; }
ParameterShape Vector(const std::string& name) { return {name, 1, 256, 1024}; }

std::map<std::string, ModuleGroup> ByName(const std::vector<ModuleGroup>& groups) {
  std::map<std::string, ModuleGroup> map;
  for (const auto& group : groups) EXPECT_TRUE(map.emplace(group.name, group).second) << group.name << " is there twice";
  return map;
}

// Every parameter is in exactly one module, and modules come in the order of their first parameter.
void CheckWhole(const std::vector<ModuleGroup>& groups, size_t parameters) {
  std::set<size_t> seen;
  size_t last_first = 0;
  for (const auto& group : groups) {
    ASSERT_FALSE(group.parameters.empty());
    EXPECT_TRUE(std::is_sorted(group.parameters.begin(), group.parameters.end()));
    EXPECT_GE(group.parameters.front(), last_first);
    last_first = group.parameters.front();
    for (size_t p : group.parameters) EXPECT_TRUE(seen.insert(p).second);
  }
  EXPECT_EQ(seen.size(), parameters);
}

TEST(Grouping, Gpt2) {
  std::vector<ParameterShape> parameters = {Matrix("transformer.wte.weight"), Matrix("transformer.wpe.weight")};
  for (const std::string block : {"transformer.h.0.", "transformer.h.1."}) {
    for (const char* name : {"ln_1.weight", "ln_1.bias"}) parameters.push_back(Vector(block + name));
    parameters.push_back(Matrix(block + "attn.c_attn.weight"));
    parameters.push_back(Vector(block + "attn.c_attn.bias"));
    parameters.push_back(Matrix(block + "attn.c_proj.weight"));
    parameters.push_back(Matrix(block + "mlp.c_fc.weight"));
    parameters.push_back(Matrix(block + "mlp.c_proj.weight"));
    parameters.push_back(Vector(block + "mlp.c_proj.bias"));
  }
  parameters.push_back(Vector("transformer.ln_f.weight"));
  parameters.push_back(Matrix("lm_head.weight"));
  const auto groups = GroupParameters(parameters);
  CheckWhole(groups, parameters.size());
  auto by_name = ByName(groups);
  EXPECT_EQ(by_name["transformer.wte"].kind, "embedding");
  EXPECT_EQ(by_name["transformer.wpe"].kind, "embedding");
  EXPECT_EQ(by_name["lm_head"].kind, "head");
  EXPECT_EQ(by_name["transformer.h.1.attn.c_attn"].kind, "attention.query_key_value");
  EXPECT_EQ(by_name["transformer.h.1.attn.c_proj"].kind, "attention.output");
  EXPECT_EQ(by_name["transformer.h.1.mlp.c_fc"].kind, "ffn.up");
  EXPECT_EQ(by_name["transformer.h.1.mlp.c_proj"].kind, "ffn.down");
  EXPECT_EQ(by_name["transformer.h.0.small"].kind, "small");
  EXPECT_THAT(by_name["transformer.h.0.small"].parameters, ElementsAre(2, 3, 5, 9));
  EXPECT_EQ(by_name["small"].kind, "small");  // what is in no block
  std::set<std::string> samplable;
  for (const auto& group : groups) {
    if (group.samplable) samplable.insert(group.kind);
  }
  EXPECT_THAT(samplable, ElementsAre("attention.output", "attention.query_key_value", "ffn.down", "ffn.up"));
}

TEST(Grouping, Llama) {
  std::vector<ParameterShape> parameters = {Matrix("model.embed_tokens.weight")};
  const std::map<std::string, std::string> kinds = {
      {"self_attn.q_proj", "attention.query"}, {"self_attn.k_proj", "attention.key"},
      {"self_attn.v_proj", "attention.value"}, {"self_attn.o_proj", "attention.output"},
      {"mlp.gate_proj", "ffn.gate"},           {"mlp.up_proj", "ffn.up"},
      {"mlp.down_proj", "ffn.down"}};
  for (int layer = 0; layer < 12; ++layer) {
    const std::string block = "model.layers." + std::to_string(layer) + ".";
    for (const auto& [name, kind] : kinds) parameters.push_back(Matrix(block + name + ".weight"));
    parameters.push_back(Vector(block + "input_layernorm.weight"));
    parameters.push_back(Vector(block + "post_attention_layernorm.weight"));
  }
  parameters.push_back(Vector("model.norm.weight"));
  parameters.push_back(Matrix("lm_head.weight"));
  const auto groups = GroupParameters(parameters);
  CheckWhole(groups, parameters.size());
  auto by_name = ByName(groups);
  EXPECT_EQ(groups.size(), 1 + 12 * (kinds.size() + 1) + 2);
  for (const auto& [name, kind] : kinds) {
    const ModuleGroup& group = by_name["model.layers.11." + name];
    EXPECT_EQ(group.kind, kind);
    EXPECT_TRUE(group.samplable);
  }
  EXPECT_FALSE(by_name["model.embed_tokens"].samplable);
  EXPECT_FALSE(by_name["lm_head"].samplable);
  EXPECT_FALSE(by_name["model.layers.1.small"].samplable);
  EXPECT_EQ(by_name["model.layers.10.small"].parameters.size(), 2u);
}

TEST(Grouping, OtherNames) {
  const std::map<std::string, std::string> kinds = {
      {"token_embedding.weight", "embedding"},
      {"blocks.3.attention.query.weight", "attention.query"},
      {"blocks.3.attention.key.weight", "attention.key"},
      {"blocks.3.attention.value.weight", "attention.value"},
      {"blocks.3.attention.output.weight", "attention.output"},
      {"blocks.3.ffn.up.weight", "ffn.up"},
      {"blocks.3.ffn.down.weight", "ffn.down"},
      {"bert.encoder.layer.0.attention.self.query.weight", "attention.query"},
      {"bert.encoder.layer.0.attention.output.dense.weight", "attention.output"},
      {"layers.0.feed_forward.w2.weight", "ffn.down"},
      {"encoder.layers.4.self_attn.in_proj_weight", "attention.query_key_value"},
      {"encoder.layers.4.self_attn.out_proj.weight", "attention.output"},
      {"encoder.layers.4.linear1.weight", "ffn.up"},
      {"gpt_neox.layers.2.mlp.dense_4h_to_h.weight", "ffn.down"},
      {"gpt_neox.embed_out.weight", "embedding"},
      {"classifier.weight", "head"},
      {"Decoder.Blocks.1.Q_Proj.weight", "attention.query"},
      {"features.weight", "matrix"},
  };
  for (const auto& [name, kind] : kinds) EXPECT_EQ(KindOf(name), kind) << name;
}

TEST(Grouping, ASmallMatrixRidesWithItsBlock) {
  const auto groups = GroupParameters({{"blocks.0.gate.weight", 2, 64, 32767}, {"blocks.0.up.weight", 2, 64, 32768}});
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].name, "blocks.0.small");
  EXPECT_FALSE(groups[0].samplable);
  EXPECT_EQ(groups[1].name, "blocks.0.up");
  EXPECT_TRUE(groups[1].samplable);
}

TEST(Grouping, OnlyWhatIsInANumberedBlockIsSamplable) {
  const auto groups = GroupParameters({Matrix("0.weight"), Matrix("2.weight"), Matrix("layers.0.weight"), Matrix("up.weight")});
  ASSERT_EQ(groups.size(), 4u);
  EXPECT_FALSE(groups[0].samplable);  // a bare list of layers has no blocks
  EXPECT_TRUE(groups[2].samplable);
  EXPECT_FALSE(groups[3].samplable);
}

TEST(Grouping, NamesAreUnique) {
  // Parameters' names need not be: several groups of an optimizer, or matrices that are called as small ones are.
  const std::vector<ParameterShape> parameters = {
      Matrix("blocks.0.up.weight"), Matrix("blocks.0.up.weight"), Matrix("blocks.0.up"), Matrix("blocks.0.up.weight"),
      Vector("blocks.0.b"),         Matrix("blocks.0.small.weight"), Matrix("small"),    Vector("b"), Matrix("")};
  const auto groups = GroupParameters(parameters);
  CheckWhole(groups, parameters.size());
  EXPECT_EQ(ByName(groups).size(), parameters.size());
}

TEST(Grouping, IsTheSameEveryTime) {
  const std::vector<ParameterShape> parameters = {Matrix("b.0.x"), Vector("b.0.y"), Vector("z"), Matrix("b.1.x"), Vector("b.0.w")};
  const auto first = GroupParameters(parameters);
  const auto second = GroupParameters(parameters);
  ASSERT_EQ(first.size(), second.size());
  for (size_t i = 0; i < first.size(); ++i) {
    EXPECT_EQ(first[i].name, second[i].name);
    EXPECT_EQ(first[i].parameters, second[i].parameters);
  }
  EXPECT_THAT(GroupParameters({}), ElementsAre());
}

}  // namespace
}  // namespace misa::modules
