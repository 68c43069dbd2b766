#include <algorithm>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "runtime/capacity/model.h"

// Hugging Face's config.json: the fields that decide sizes, by family of models.

namespace misa::capacity {
namespace {

using nlohmann::json;

// Reads fields; the first thing that is wrong stays.
class Fields {
 public:
  explicit Fields(const json& config) : config_(config) {}

  const std::string& error() const { return error_; }
  void Fail(const std::string& what) {
    if (error_.empty()) {
      error_ = what;
    }
  }

  // The first of `names` that is there and not null.
  std::optional<uint64_t> Optional(std::initializer_list<const char*> names) {
    for (const char* name : names) {
      const auto found = config_.find(name);
      if (found == config_.end() || found->is_null()) {
        continue;
      }
      if (!found->is_number_unsigned() || found->get<uint64_t>() == 0) {
        Fail(std::string("\"") + name + "\" is " + found->dump() + ", and must be a whole number above 0");
        return std::nullopt;
      }
      return found->get<uint64_t>();
    }
    return std::nullopt;
  }
  uint64_t Number(std::initializer_list<const char*> names) {
    const std::optional<uint64_t> number = Optional(names);
    if (!number) {
      Fail(std::string("\"") + *names.begin() + "\" is missing");
    }
    return number.value_or(0);
  }
  bool Flag(const char* name, bool otherwise) {
    const auto found = config_.find(name);
    if (found == config_.end() || found->is_null()) {
      return otherwise;
    }
    if (!found->is_boolean()) {
      Fail(std::string("\"") + name + "\" is " + found->dump() + ", and must be true or false");
      return otherwise;
    }
    return found->get<bool>();
  }

 private:
  const json& config_;
  std::string error_;
};

void ReadLlamaLike(Fields* in, ModelShape* shape) {
  shape->vocabulary = in->Number({"vocab_size"});
  shape->hidden = in->Number({"hidden_size"});
  shape->intermediate = in->Number({"intermediate_size"});
  shape->layers = in->Number({"num_hidden_layers"});
  shape->heads = in->Number({"num_attention_heads"});
  shape->key_value_heads = in->Optional({"num_key_value_heads"}).value_or(shape->heads);
  shape->head_width = in->Optional({"head_dim"}).value_or(shape->heads == 0 ? 0 : shape->hidden / shape->heads);
  shape->context = in->Optional({"max_position_embeddings"}).value_or(0);
  shape->tied = in->Flag("tie_word_embeddings", false);
}

void ReadLlama(Fields* in, ModelShape* shape) {
  ReadLlamaLike(in, shape);
  shape->attention_bias = in->Flag("attention_bias", false);
}
void ReadQwen2(Fields* in, ModelShape* shape) {
  ReadLlamaLike(in, shape);
  shape->attention_bias = true;
}
void ReadQwen3(Fields* in, ModelShape* shape) {
  ReadLlama(in, shape);
  shape->head_norms = true;
}
void ReadGemma(Fields* in, ModelShape* shape) {
  ReadLlama(in, shape);
  shape->tied = in->Flag("tie_word_embeddings", true);
}
void ReadGemma2(Fields* in, ModelShape* shape) {
  ReadGemma(in, shape);
  shape->block_norms = 4;
}
void ReadPhi3(Fields* in, ModelShape* shape) {
  ReadLlamaLike(in, shape);
  shape->fused_attention = true;
  shape->fused_gate = true;
}
void ReadGpt2(Fields* in, ModelShape* shape) {
  shape->vocabulary = in->Number({"vocab_size"});
  shape->hidden = in->Number({"n_embd"});
  shape->layers = in->Number({"n_layer"});
  shape->heads = in->Number({"n_head"});
  shape->intermediate = in->Optional({"n_inner"}).value_or(4 * shape->hidden);
  shape->context = in->Number({"n_positions", "n_ctx"});
  shape->learned_positions = shape->context;
  shape->tied = in->Flag("tie_word_embeddings", true);
  shape->key_value_heads = shape->heads;
  shape->head_width = shape->heads == 0 ? 0 : shape->hidden / shape->heads;
  shape->gated = false;
  shape->bias = true;
  shape->norm_bias = true;
  shape->fused_attention = true;
}
void ReadGptNeoX(Fields* in, ModelShape* shape) {
  ReadLlamaLike(in, shape);
  shape->gated = false;
  shape->bias = in->Flag("attention_bias", true);
  shape->norm_bias = true;
  shape->fused_attention = true;
}

// Not a family of Hugging Face's: any decoder, its parts named one by one.
void ReadTransformer(Fields* in, ModelShape* shape) {
  ReadLlamaLike(in, shape);
  shape->gated = in->Flag("gated", true);
  shape->attention_bias = in->Flag("attention_bias", false);
  shape->bias = in->Flag("bias", false);
  shape->norm_bias = in->Flag("norm_bias", false);
  shape->fused_attention = in->Flag("fused_attention", false);
  shape->fused_gate = in->Flag("fused_gate", false);
  if (in->Flag("learned_positions", false)) {
    shape->learned_positions = in->Number({"max_position_embeddings"});
  }
}

struct Family {
  const char* type;
  void (*read)(Fields*, ModelShape*);
};
constexpr Family kFamilies[] = {
    {"llama", ReadLlama}, {"mistral", ReadLlama}, {"qwen2", ReadQwen2}, {"qwen3", ReadQwen3},   {"gemma", ReadGemma},
    {"gemma2", ReadGemma2}, {"phi3", ReadPhi3},   {"gpt2", ReadGpt2},   {"gpt_neox", ReadGptNeoX},
    {"transformer", ReadTransformer},
};

// Fields that say that parameters are there which the families above do not have.
constexpr const char* kExperts[] = {"num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size"};

}  // namespace

policy::Result<ModelShape> ParseModelConfig(const std::string& text) {
  policy::Result<ModelShape> result;
  const auto fail = [&](const std::string& what) {
    result.value = {};
    result.error = "The model's description cannot be used: " + what + ".";
    return result;
  };
  const json config = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) {
    return fail("it is not a JSON object, as a Hugging Face config.json is");
  }
  std::string known;
  for (const Family& family : kFamilies) {
    known += std::string(known.empty() ? "" : ", ") + family.type;
  }
  const auto type = config.find("model_type");
  if (type == config.end() || !type->is_string()) {
    return fail("\"model_type\" is missing; it is one of " + known);
  }
  const auto family = std::find_if(std::begin(kFamilies), std::end(kFamilies),
                                   [&](const Family& f) { return type->get<std::string>() == f.type; });
  if (family == std::end(kFamilies)) {
    return fail("\"model_type\" is " + type->dump() + ", and supported are " + known);
  }
  for (const char* field : kExperts) {
    if (config.contains(field) && !config[field].is_null()) {
      return fail(std::string("\"") + field + "\" says that it is a mixture of experts, which is not supported");
    }
  }
  Fields fields(config);
  ModelShape& shape = result.value;
  family->read(&fields, &shape);
  if (!fields.error().empty()) {
    return fail(fields.error());
  }
  const auto name = config.find("_name_or_path");
  shape.name = name != config.end() && name->is_string() && !name->get<std::string>().empty() ? name->get<std::string>()
                                                                                              : type->get<std::string>();
  if (const policy::Result<Model> built = BuildModel(shape); !built.ok()) {
    result.value = {};
    result.error = built.error;
  }
  return result;
}

}  // namespace misa::capacity
