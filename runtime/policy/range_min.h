// Numbers on a circle: add to a range, take the minimum of a range, set one back; each in O(log n).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace misa::policy {

class RangeMin {
 public:
  explicit RangeMin(const std::vector<int64_t>& values) : count_(values.size()) {
    while (leaves_ < count_) {
      leaves_ *= 2;
    }
    lowest_.assign(2 * leaves_, std::numeric_limits<int64_t>::max() / 2);
    added_.assign(2 * leaves_, 0);
    std::copy(values.begin(), values.end(), lowest_.begin() + static_cast<std::ptrdiff_t>(leaves_));
    for (size_t node = leaves_ - 1; node >= 1; --node) {
      lowest_[node] = std::min(lowest_[2 * node], lowest_[2 * node + 1]);
    }
  }

  // `length` numbers from `first` on, past the end to the beginning; at most once around.
  void Add(size_t first, size_t length, int64_t value) {
    Split(first, length, [&](size_t begin, size_t end) { AddIn(1, 0, leaves_, begin, end, value); });
  }
  int64_t Min(size_t first, size_t length) const {
    int64_t lowest = std::numeric_limits<int64_t>::max() / 2;
    Split(first, length, [&](size_t begin, size_t end) {
      lowest = std::min(lowest, MinIn(1, 0, leaves_, begin, end));
    });
    return lowest;
  }
  int64_t At(size_t index) const { return Min(index, 1); }
  void Set(size_t index, int64_t value) { Add(index, 1, value - At(index)); }

 private:
  template <typename Part>
  void Split(size_t first, size_t length, Part part) const {
    length = std::min(length, count_);
    if (length == 0) {
      return;
    }
    first %= count_;
    const size_t end = first + length;
    part(first, std::min(end, count_));
    if (end > count_) {
      part(size_t{0}, end - count_);
    }
  }

  // lowest_ of a node includes its own added_, and not those above it.
  void AddIn(size_t node, size_t from, size_t to, size_t begin, size_t end, int64_t value) {
    if (end <= from || to <= begin) {
      return;
    }
    if (begin <= from && to <= end) {
      lowest_[node] += value;
      added_[node] += value;
      return;
    }
    const size_t middle = (from + to) / 2;
    AddIn(2 * node, from, middle, begin, end, value);
    AddIn(2 * node + 1, middle, to, begin, end, value);
    lowest_[node] = std::min(lowest_[2 * node], lowest_[2 * node + 1]) + added_[node];
  }
  int64_t MinIn(size_t node, size_t from, size_t to, size_t begin, size_t end) const {
    if (end <= from || to <= begin) {
      return std::numeric_limits<int64_t>::max() / 2;
    }
    if (begin <= from && to <= end) {
      return lowest_[node];
    }
    const size_t middle = (from + to) / 2;
    return std::min(MinIn(2 * node, from, middle, begin, end), MinIn(2 * node + 1, middle, to, begin, end)) +
           added_[node];
  }

  size_t count_;
  size_t leaves_ = 1;
  std::vector<int64_t> lowest_;
  std::vector<int64_t> added_;
};

}  // namespace misa::policy
