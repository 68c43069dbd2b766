#include "runtime/modules/grouping.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>

namespace misa::modules {
namespace {

// A matrix smaller than this is not worth a residency of its own.
constexpr uint64_t kSmallBytes = 32 << 10;

std::vector<std::string> Split(const std::string& name) {
  std::vector<std::string> parts;
  std::string part;
  for (char c : name) {
    if (c == '.') {
      parts.push_back(std::move(part));
      part.clear();
    } else {
      part.push_back(static_cast<char>(std::tolower(static_cast<unsigned char>(c))));
    }
  }
  parts.push_back(std::move(part));
  return parts;
}

bool IsNumber(const std::string& part) {
  return !part.empty() && std::all_of(part.begin(), part.end(), [](unsigned char c) { return std::isdigit(c); });
}

// "blocks.3" of "blocks.3.attention.query.weight"; "" outside a numbered block.
std::string BlockOf(const std::string& name) {
  size_t begin = 0;
  while (begin <= name.size()) {
    size_t end = name.find('.', begin);
    if (end == std::string::npos) end = name.size();
    if (begin > 0 && IsNumber(name.substr(begin, end - begin)) && end < name.size()) return name.substr(0, end);
    begin = end + 1;
  }
  return "";
}

std::string ModuleName(const std::string& parameter) {
  const std::string suffix = ".weight";
  if (parameter.size() > suffix.size() && parameter.compare(parameter.size() - suffix.size(), suffix.size(), suffix) == 0) {
    return parameter.substr(0, parameter.size() - suffix.size());
  }
  return parameter;
}

}  // namespace

std::string KindOf(const std::string& name) {
  struct Rule {
    const char* kind;
    std::vector<const char*> words;
  };
  static const std::vector<Rule> rules = {
      {"attention.query", {"q_proj", "query", "wq", "q", "q_lin"}},
      {"attention.key", {"k_proj", "key", "wk", "k", "k_lin"}},
      {"attention.value", {"v_proj", "value", "wv", "v", "v_lin"}},
      {"attention.query_key_value", {"qkv", "query_key_value", "c_attn", "in_proj_weight", "wqkv", "qkv_proj"}},
      {"attention.output", {"o_proj", "out_proj", "wo", "o", "out_lin"}},
      {"ffn.gate", {"gate_proj", "gate", "w1_gate", "gate_up_proj"}},
      {"ffn.up", {"up_proj", "up", "fc1", "c_fc", "w1", "lin1", "dense_h_to_4h", "linear1", "wi"}},
      {"ffn.down", {"down_proj", "down", "fc2", "w2", "lin2", "dense_4h_to_h", "linear2"}},
      {"head", {"lm_head", "head", "classifier", "score", "embed_out"}},
  };
  const std::vector<std::string> parts = Split(name);
  for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
    if (*part == "weight" || *part == "bias") continue;
    if (part->find("emb") != std::string::npos || *part == "wte" || *part == "wpe") return "embedding";
    for (const Rule& rule : rules) {
      for (const char* word : rule.words) {
        if (*part == word) return rule.kind;
      }
    }
    if (part->find("norm") != std::string::npos || part->rfind("ln", 0) == 0) return "norm";
    // "output" and "proj" name an attention's or an ffn's last matrix, by what is around them.
    if (*part == "output" || *part == "proj" || *part == "c_proj" || *part == "dense") {
      for (const std::string& around : parts) {
        if (around.find("attn") != std::string::npos || around.find("attention") != std::string::npos) {
          return "attention.output";
        }
        if (around.find("mlp") != std::string::npos || around.find("ffn") != std::string::npos) return "ffn.down";
      }
    }
  }
  return "matrix";
}

std::vector<ModuleGroup> GroupParameters(const std::vector<ParameterShape>& parameters) {
  std::vector<ModuleGroup> groups;
  std::map<std::string, size_t> small;  // block -> group
  std::set<std::string> taken;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const ParameterShape& p = parameters[i];
    const std::string block = BlockOf(p.name);
    const bool matrix = p.dimensions >= 2 && p.bytes >= kSmallBytes;
    if (!matrix) {
      auto found = small.find(block);
      if (found != small.end()) {
        groups[found->second].parameters.push_back(i);
        continue;
      }
      small[block] = groups.size();
    }
    ModuleGroup group;
    group.name = matrix ? ModuleName(p.name) : (block.empty() ? "small" : block + ".small");
    group.kind = matrix ? KindOf(p.name) : "small";
    group.samplable = matrix && !block.empty() && group.kind != "embedding" && group.kind != "head";
    group.parameters.push_back(i);
    const std::string name = group.name;
    for (int number = 2; !taken.insert(group.name).second; ++number) group.name = name + "#" + std::to_string(number);
    groups.push_back(std::move(group));
  }
  return groups;
}

}  // namespace misa::modules
