// Sparse attention looks at other blocks of its context from batch to batch: an importance window as long as a dense
// module's tells of blocks that have passed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace misa::guard {

// Two thirds, at least 1: the seed goes from 30 to 20.
inline uint32_t SparseWindow(uint32_t window) {
  return window < 2 ? 1 : static_cast<uint32_t>(uint64_t{window} * 2 / 3);
}

// Words in the names of families and modules whose attention is sparse.
const std::vector<std::string>& SparseAttentionWords();
// An attention matrix (of a kind that begins with "attention") with one of the words in its name, whatever the case.
bool IsSparseAttention(const std::string& name, const std::string& kind, const std::vector<std::string>& words);

}  // namespace misa::guard
