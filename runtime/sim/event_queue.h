// Virtual time: what is to happen, in the order of its time, and of its announcement where times are equal.
#pragma once

#include <cstdint>
#include <queue>
#include <utility>
#include <vector>

namespace misa::sim {

template <typename T>
class EventQueue {
 public:
  double now() const { return now_; }
  bool empty() const { return queue_.empty(); }
  size_t size() const { return queue_.size(); }
  double next_time() const { return queue_.top().at; }

  // Nothing happens in the past: a time before now is now.
  void Add(double at, T what) { queue_.push({at < now_ ? now_ : at, next_++, std::move(what)}); }

  // Moves the time on to the next happening. The queue must not be empty.
  T Take() {
    now_ = queue_.top().at;
    // A priority queue gives const access only; what is moved out is removed at once.
    T what = std::move(const_cast<Item&>(queue_.top()).what);
    queue_.pop();
    return what;
  }

 private:
  struct Item {
    double at;
    uint64_t order;
    T what;
    bool operator<(const Item& other) const { return at != other.at ? at > other.at : order > other.order; }
  };
  std::priority_queue<Item> queue_;
  double now_ = 0;
  uint64_t next_ = 0;
};

}  // namespace misa::sim
