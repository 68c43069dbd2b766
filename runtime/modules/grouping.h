// From parameter names to modules: each matrix is one of its own, small tensors ride with their block.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace misa::modules {

struct ParameterShape {
  std::string name;
  int64_t dimensions = 0;
  uint64_t elements = 0;
  uint64_t bytes = 0;
};

struct ModuleGroup {
  std::string name;
  std::string kind;        // "attention.query", "ffn.up", "embedding", "head", "norm", "small", "matrix", …
  std::vector<size_t> parameters;  // indices into the input
  bool samplable = false;  // a matrix inside a block
};

// Deterministic; modules in the order of their first parameter. Names are unique.
std::vector<ModuleGroup> GroupParameters(const std::vector<ParameterShape>& parameters);

// What a matrix is, from the last parts of its name; "matrix" where nothing is known.
std::string KindOf(const std::string& name);

}  // namespace misa::modules
