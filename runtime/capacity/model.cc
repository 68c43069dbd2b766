#include "runtime/capacity/model.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace misa::capacity {
namespace {

constexpr uint64_t kMostSize = uint64_t{1} << 24;       // of one dimension
constexpr uint64_t kMostLayers = 4096;
constexpr uint64_t kMostParameters = uint64_t{1} << 50;

ModelShape Llama(const char* name, uint64_t hidden, uint64_t layers, uint64_t heads, uint64_t key_value_heads,
                 uint64_t intermediate, uint64_t vocabulary, uint64_t context) {
  ModelShape shape;
  shape.name = name;
  shape.vocabulary = vocabulary;
  shape.hidden = hidden;
  shape.intermediate = intermediate;
  shape.layers = layers;
  shape.heads = heads;
  shape.key_value_heads = key_value_heads;
  shape.head_width = hidden / heads;
  shape.context = context;
  return shape;
}

ModelShape Gpt2(const char* name, uint64_t hidden, uint64_t layers, uint64_t heads) {
  ModelShape shape = Llama(name, hidden, layers, heads, heads, 4 * hidden, 50257, 1024);
  shape.learned_positions = 1024;
  shape.gated = false;
  shape.tied = true;
  shape.bias = true;
  shape.norm_bias = true;
  shape.fused_attention = true;
  return shape;
}

std::vector<ModelShape> MakeKnownModels() {
  std::vector<ModelShape> models = {
      Llama("llama-7b", 4096, 32, 32, 32, 11008, 32000, 4096),
      Llama("llama-13b", 5120, 40, 40, 40, 13824, 32000, 4096),
      Llama("llama-30b", 6656, 60, 52, 52, 17920, 32000, 2048),
      Llama("llama-65b", 8192, 80, 64, 64, 22016, 32000, 2048),
      Llama("llama-70b", 8192, 80, 64, 8, 28672, 32000, 4096),
      Llama("llama3-8b", 4096, 32, 32, 8, 14336, 128256, 8192),
      Llama("llama3-70b", 8192, 80, 64, 8, 28672, 128256, 8192),
      Llama("llama3.2-1b", 2048, 16, 32, 8, 8192, 128256, 131072),
      Llama("mistral-7b", 4096, 32, 32, 8, 14336, 32000, 32768),
      Llama("qwen2-7b", 3584, 28, 28, 4, 18944, 152064, 131072),
      Gpt2("gpt2", 768, 12, 12),
      Gpt2("gpt2-xl", 1600, 48, 25),
  };
  for (ModelShape& model : models) {
    if (model.name == "llama3.2-1b") {
      model.tied = true;
    }
    if (model.name == "qwen2-7b") {
      model.attention_bias = true;
    }
  }
  return models;
}

std::string CheckShape(const ModelShape& shape) {
  for (const auto& [what, size] :
       {std::pair{"vocabulary", shape.vocabulary}, std::pair{"hidden size", shape.hidden},
        std::pair{"intermediate size", shape.intermediate}, std::pair{"number of layers", shape.layers},
        std::pair{"number of attention heads", shape.heads},
        std::pair{"number of key and value heads", shape.key_value_heads},
        std::pair{"width of a head", shape.head_width}}) {
    if (size == 0 || size > kMostSize) {
      return std::string("The model's ") + what + " is " + std::to_string(size) + "; it must be between 1 and " +
             std::to_string(kMostSize) + ".";
    }
  }
  if (shape.layers > kMostLayers) {
    return "The model has " + std::to_string(shape.layers) + " layers, and the most is " + std::to_string(kMostLayers) +
           ".";
  }
  if (shape.heads % shape.key_value_heads != 0) {
    return "The model's " + std::to_string(shape.heads) + " attention heads cannot share " +
           std::to_string(shape.key_value_heads) + " key and value heads evenly.";
  }
  if (shape.learned_positions > kMostSize || shape.block_norms > 8) {
    return "The model's table of positions or its number of norms is not one of a transformer.";
  }
  return "";
}

class Builder {
 public:
  explicit Builder(const ModelShape& shape) { model_.shape = shape; }

  uint32_t Add(const std::string& name, uint64_t rows, uint64_t columns = 0) {
    model_.parameters.push_back({name, columns == 0 ? 1 : 2, rows, std::max<uint64_t>(columns, 1)});
    model_.parameter_count += model_.parameters.back().elements();
    return static_cast<uint32_t>(model_.parameters.size() - 1);
  }
  // A matrix and its bias; returns what an operation with them uses.
  Operation Linear(const std::string& name, uint64_t out, uint64_t in, bool bias, uint32_t block) {
    Operation operation;
    operation.block = block;
    operation.flops_per_token = 2.0 * static_cast<double>(out) * static_cast<double>(in);
    operation.parameters.push_back(Add(name + ".weight", out, in));
    if (bias) {
      operation.parameters.push_back(Add(name + ".bias", out));
    }
    return operation;
  }
  Operation Norm(const std::string& name, uint64_t width, uint32_t block) {
    Operation operation;
    operation.block = block;
    operation.parameters.push_back(Add(name + ".weight", width));
    if (model_.shape.norm_bias) {
      operation.parameters.push_back(Add(name + ".bias", width));
    }
    return operation;
  }
  void Run(Operation operation) { model_.operations.push_back(std::move(operation)); }

  void Block(uint32_t layer) {
    const ModelShape& shape = model_.shape;
    const uint64_t before = model_.parameter_count;
    const std::string at = "model.layers." + std::to_string(layer) + ".";
    const uint64_t query = shape.heads * shape.head_width;
    const uint64_t key_value = shape.key_value_heads * shape.head_width;
    const bool attention_bias = shape.bias || shape.attention_bias;
    std::vector<Operation> attention;
    if (shape.fused_attention) {
      attention.push_back(Linear(at + "self_attn.qkv_proj", query + 2 * key_value, shape.hidden, attention_bias, layer));
    } else {
      attention.push_back(Linear(at + "self_attn.q_proj", query, shape.hidden, attention_bias, layer));
      attention.push_back(Linear(at + "self_attn.k_proj", key_value, shape.hidden, attention_bias, layer));
      attention.push_back(Linear(at + "self_attn.v_proj", key_value, shape.hidden, attention_bias, layer));
    }
    if (shape.head_norms) {
      attention.push_back(Norm(at + "self_attn.q_norm", shape.head_width, layer));
      attention.push_back(Norm(at + "self_attn.k_norm", shape.head_width, layer));
    }
    attention.push_back(Linear(at + "self_attn.o_proj", shape.hidden, query, shape.bias, layer));
    attention.back().attention = true;
    std::vector<Operation> feed_forward;
    if (shape.gated && shape.fused_gate) {
      feed_forward.push_back(Linear(at + "mlp.gate_up_proj", 2 * shape.intermediate, shape.hidden, shape.bias, layer));
    } else {
      if (shape.gated) {
        feed_forward.push_back(Linear(at + "mlp.gate_proj", shape.intermediate, shape.hidden, shape.bias, layer));
      }
      feed_forward.push_back(Linear(at + "mlp.up_proj", shape.intermediate, shape.hidden, shape.bias, layer));
    }
    feed_forward.push_back(Linear(at + "mlp.down_proj", shape.hidden, shape.intermediate, shape.bias, layer));
    std::vector<Operation> norms;
    for (uint64_t n = 0; n < shape.block_norms; ++n) {
      norms.push_back(Norm(at + (n == 0   ? "input_layernorm"
                                 : n == 1 ? "post_attention_layernorm"
                                          : "norm_" + std::to_string(n)),
                           shape.hidden, layer));
    }
    // One norm before each half; further ones (four in a block) behind it.
    const bool behind = norms.size() >= 4;
    const auto run = [&](size_t norm) {
      if (norm < norms.size()) {
        Run(norms[norm]);
      }
    };
    run(0);
    for (Operation& operation : attention) {
      Run(std::move(operation));
    }
    if (behind) {
      run(2);
    }
    run(1);
    for (Operation& operation : feed_forward) {
      Run(std::move(operation));
    }
    if (behind) {
      run(3);
    }
    model_.block_parameter_count = model_.parameter_count - before;
  }

  Model Build() {
    const ModelShape& shape = model_.shape;
    Operation embedding;
    embedding.block = kNoBlock;
    embedding.parameters.push_back(Add("model.embed_tokens.weight", shape.vocabulary, shape.hidden));
    if (shape.learned_positions > 0) {
      embedding.parameters.push_back(Add("model.embed_positions.weight", shape.learned_positions, shape.hidden));
    }
    const uint32_t tokens = embedding.parameters.front();
    Run(std::move(embedding));
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
      Block(layer);
    }
    Run(Norm("model.norm", shape.hidden, kNoBlock));
    Operation head;
    if (shape.tied) {
      head.parameters.push_back(tokens);
      head.flops_per_token = 2.0 * static_cast<double>(shape.vocabulary) * static_cast<double>(shape.hidden);
    } else {
      head = Linear("lm_head", shape.vocabulary, shape.hidden, false, kNoBlock);
    }
    head.block = kNoBlock;
    Run(std::move(head));
    return std::move(model_);
  }

 private:
  Model model_;
};

}  // namespace

policy::Result<Model> BuildModel(const ModelShape& shape) {
  policy::Result<Model> result;
  result.error = CheckShape(shape);
  if (!result.ok()) {
    return result;
  }
  // Before anything is laid out: the sizes are bounded, so this cannot overflow.
  const double block = static_cast<double>(shape.hidden) *
                       static_cast<double>(3 * shape.intermediate + 4 * shape.heads * shape.head_width);
  const double all = block * static_cast<double>(shape.layers) +
                     2.0 * static_cast<double>(shape.vocabulary) * static_cast<double>(shape.hidden);
  if (all > static_cast<double>(kMostParameters)) {
    result.error = "The model has more than 2^50 parameters; look at the sizes in its description.";
    return result;
  }
  result.value = Builder(shape).Build();
  return result;
}

const std::vector<ModelShape>& KnownModels() {
  static const std::vector<ModelShape> models = MakeKnownModels();
  return models;
}

std::string KnownModelNames() {
  std::string names;
  for (const ModelShape& model : KnownModels()) {
    names += (names.empty() ? "" : ", ") + model.name;
  }
  return names;
}

const ModelShape* FindModel(const std::string& name) {
  const auto found = std::find_if(KnownModels().begin(), KnownModels().end(),
                                  [&](const ModelShape& model) { return model.name == name; });
  return found == KnownModels().end() ? nullptr : &*found;
}

}  // namespace misa::capacity
