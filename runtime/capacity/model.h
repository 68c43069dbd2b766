// Decoder-only transformers as a planner sees them: their parameters by name, and what uses them in which order.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/policy/planner.h"

namespace misa::capacity {

struct ModelShape {
  std::string name;
  uint64_t vocabulary = 0;
  uint64_t hidden = 0;
  uint64_t intermediate = 0;
  uint64_t layers = 0;
  uint64_t heads = 0;
  uint64_t key_value_heads = 0;
  uint64_t head_width = 0;
  uint64_t context = 0;            // longest sequence; 0: not bounded
  uint64_t learned_positions = 0;  // rows of a table of positions; 0: rotary or none
  bool gated = true;               // gate and up, or up alone
  bool tied = false;               // the head is the embedding's matrix
  bool attention_bias = false;     // query, key and value have a bias
  bool bias = false;               // every matrix of a block has one
  bool norm_bias = false;
  bool head_norms = false;         // query and key are normalised by head
  bool fused_attention = false;    // query, key and value are one matrix
  bool fused_gate = false;         // gate and up are one matrix
  uint64_t block_norms = 2;        // of a block
};

struct ModelParameter {
  std::string name;  // as Hugging Face's models of this kind name it
  int64_t dimensions = 0;
  uint64_t rows = 0;
  uint64_t columns = 1;
  uint64_t elements() const { return rows * columns; }
};

// What runs between two touches: the parameters it uses together and its arithmetic.
struct Operation {
  std::vector<uint32_t> parameters;  // indices into Model::parameters
  double flops_per_token = 0;        // of the forward, matrices
  bool attention = false;            // the attention itself runs before it
  uint32_t block = 0;                // kNoBlock outside
};
inline constexpr uint32_t kNoBlock = UINT32_MAX;

struct Model {
  ModelShape shape;
  std::vector<ModelParameter> parameters;  // in the order of named_parameters()
  std::vector<Operation> operations;       // of one forward, in order
  uint64_t parameter_count = 0;
  uint64_t block_parameter_count = 0;      // of one block
};

// Names, each with its size, or a sentence: shapes of 0, heads that do not divide, more than 2^50 parameters.
policy::Result<Model> BuildModel(const ModelShape& shape);

// The models known by name, and their names in one line for sentences.
const std::vector<ModelShape>& KnownModels();
std::string KnownModelNames();
const ModelShape* FindModel(const std::string& name);

// From the text of a Hugging Face config.json, or one of "model_type": "transformer", which has the same names for sizes
// and the flags gated, bias, attention_bias, norm_bias, fused_attention, fused_gate and learned_positions besides. A sentence that names what is missing, of another type, or not supported.
policy::Result<ModelShape> ParseModelConfig(const std::string& text);

}  // namespace misa::capacity
