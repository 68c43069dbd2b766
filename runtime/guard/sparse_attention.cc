#include "runtime/guard/sparse_attention.h"

#include <algorithm>
#include <cctype>

namespace misa::guard {
namespace {

std::string Lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

}  // namespace

const std::vector<std::string>& SparseAttentionWords() {
  static const std::vector<std::string> words = {"sparse_att", "sparseatt", "longformer",
                                                 "bigbird",    "local_att", "block_att"};
  return words;
}

bool IsSparseAttention(const std::string& name, const std::string& kind, const std::vector<std::string>& words) {
  if (kind.rfind("attention", 0) != 0) return false;
  const std::string lower = Lower(name);
  return std::any_of(words.begin(), words.end(), [&](const std::string& word) {
    return !word.empty() && lower.find(Lower(word)) != std::string::npos;
  });
}

}  // namespace misa::guard
