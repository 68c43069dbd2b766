// A few things by digest; the one that was looked at longest ago gives way to a new one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <utility>

namespace misa::predict {

// Traces of one session's steps that trainer and daemon remember, each with its plan. Both forget in the same order.
inline constexpr size_t kMostPhases = 8;

// Addresses of items hold until they are forgotten.
template <typename T>
class Recent {
 public:
  struct Item {
    uint64_t digest = 0;
    T value{};
  };

  explicit Recent(size_t limit = kMostPhases) : limit_(limit) {}

  // nullptr where it is not there; its age stays as it was.
  T* Find(uint64_t digest) { return const_cast<T*>(std::as_const(*this).Find(digest)); }
  const T* Find(uint64_t digest) const {
    for (const Item& item : items_) {
      if (item.digest == digest) return &item.value;
    }
    return nullptr;
  }

  // The newest one from now on; made where it is not there.
  T* Touch(uint64_t digest) {
    for (auto item = items_.begin(); item != items_.end(); ++item) {
      if (item->digest != digest) continue;
      items_.splice(items_.begin(), items_, item);
      return &item->value;
    }
    if (items_.size() >= limit_) items_.pop_back();
    items_.push_front({digest, {}});
    return &items_.front().value;
  }

  void ForgetOldest() {
    if (!items_.empty()) items_.pop_back();
  }

  // Newest first.
  std::list<Item>& items() { return items_; }
  const std::list<Item>& items() const { return items_; }

 private:
  size_t limit_;
  std::list<Item> items_;
};

}  // namespace misa::predict
