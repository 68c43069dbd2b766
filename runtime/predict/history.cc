#include "runtime/predict/history.h"

#include <algorithm>

namespace misa::predict {

History::History(size_t limit) : limit_(std::max<size_t>(limit, 1)), buffer_(2 * limit_) {}

void History::Add(Symbol symbol) {
  if (begin_ + count_ == buffer_.size()) {
    std::copy(buffer_.begin() + static_cast<std::ptrdiff_t>(begin_ + 1), buffer_.end(), buffer_.begin());
    begin_ = 0;
    --count_;
  }
  buffer_[begin_ + count_++] = symbol;
  if (count_ > limit_) {
    ++begin_;
    --count_;
  }
}

}  // namespace misa::predict
