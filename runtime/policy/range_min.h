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
    // A leaf before the first and one after the last, so that every range has a neighbour on both sides.
    while (leaves_ < count_ + 2) {
      leaves_ *= 2;
    }
    lowest_.assign(2 * leaves_, kFar);
    added_.assign(2 * leaves_, 0);
    std::copy(values.begin(), values.end(), lowest_.begin() + static_cast<std::ptrdiff_t>(leaves_) + 1);
    for (size_t node = leaves_ - 1; node >= 1; --node) {
      lowest_[node] = std::min(lowest_[2 * node], lowest_[2 * node + 1]);
    }
  }

  // `length` numbers from `first` on, past the end to the beginning; at most once around.
  void Add(size_t first, size_t length, int64_t value) {
    Split(first, length, [&](size_t begin, size_t end) { AddTo(begin, end, value); });
  }
  int64_t Min(size_t first, size_t length) const {
    int64_t lowest = kFar;
    Split(first, length, [&](size_t begin, size_t end) { lowest = std::min(lowest, MinOf(begin, end)); });
    return lowest;
  }
  int64_t At(size_t index) const { return Min(index, 1); }
  void Set(size_t index, int64_t value) { Add(index, 1, value - At(index)); }

 private:
  static constexpr int64_t kFar = std::numeric_limits<int64_t>::max() / 2;

  template <typename Part>
  void Split(size_t first, size_t length, Part part) const {
    length = std::min(length, count_);
    if (length == 0) {
      return;
    }
    first = first < count_ ? first : first % count_;
    const size_t end = first + length;
    part(first, std::min(end, count_));
    if (end > count_) {
      part(size_t{0}, end - count_);
    }
  }

  // From the leaves up, between the neighbours of the range; what was added to a node stays there. lowest_ of a node
  // includes its own added_, and not those above it.
  void AddTo(size_t begin, size_t end, int64_t value) {
    size_t left = leaves_ + begin;
    size_t right = leaves_ + end + 1;
    for (; (left ^ right) != 1; left /= 2, right /= 2, Pull(left), Pull(right)) {
      if (left % 2 == 0) {
        lowest_[left + 1] += value;
        added_[left + 1] += value;
      }
      if (right % 2 == 1) {
        lowest_[right - 1] += value;
        added_[right - 1] += value;
      }
    }
    for (left /= 2; left > 0; left /= 2) {
      const int64_t before = lowest_[left];
      Pull(left);
      if (lowest_[left] == before) {
        return;
      }
    }
  }
  int64_t MinOf(size_t begin, size_t end) const {
    size_t left = leaves_ + begin;
    size_t right = leaves_ + end + 1;
    int64_t from_left = kFar;
    int64_t from_right = kFar;
    for (; (left ^ right) != 1; left /= 2, right /= 2, from_left += added_[left], from_right += added_[right]) {
      if (left % 2 == 0) {
        from_left = std::min(from_left, lowest_[left + 1]);
      }
      if (right % 2 == 1) {
        from_right = std::min(from_right, lowest_[right - 1]);
      }
    }
    int64_t lowest = std::min(from_left, from_right);
    for (left /= 2; left > 0; left /= 2) {
      lowest += added_[left];
    }
    return lowest;
  }
  void Pull(size_t node) { lowest_[node] = std::min(lowest_[2 * node], lowest_[2 * node + 1]) + added_[node]; }

  size_t count_;
  size_t leaves_ = 1;
  std::vector<int64_t> lowest_;
  std::vector<int64_t> added_;
};

}  // namespace misa::policy
