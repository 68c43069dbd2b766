// The newest symbols of a sequence, in order.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "runtime/predict/predictor.h"

namespace misa::predict {

// At most `limit` symbols. Memory for twice as many is taken at once, so that the newest are always one stretch.
class History {
 public:
  explicit History(size_t limit);

  void Add(Symbol symbol);
  // Oldest first.
  std::span<const Symbol> symbols() const { return {buffer_.data() + begin_, count_}; }
  size_t size() const { return count_; }
  // The one `back` before the newest; back < size().
  Symbol FromEnd(size_t back) const { return buffer_[begin_ + count_ - 1 - back]; }
  size_t memory_bytes() const { return buffer_.capacity() * sizeof(Symbol); }

 private:
  size_t limit_;
  std::vector<Symbol> buffer_;
  size_t begin_ = 0;
  size_t count_ = 0;
};

}  // namespace misa::predict
