#include "runtime/policy/yardsticks.h"

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>

namespace misa::policy {
namespace {

// Both policies evict the resident facet with the extreme key; they differ in the key a use gives its facet.
// key(time) is unique for each time, and the facet with the smallest key goes.
template <typename Key>
std::vector<size_t> Misses(const std::vector<uint32_t>& period, size_t capacity, size_t periods, Key key) {
  std::vector<size_t> misses(periods, 0);
  std::set<std::pair<int64_t, uint32_t>> resident;
  std::unordered_map<uint32_t, int64_t> keys;
  capacity = std::max<size_t>(capacity, 1);
  for (size_t k = 0; k < periods; ++k) {
    for (size_t i = 0; i < period.size(); ++i) {
      const uint32_t facet = period[i];
      const auto found = keys.find(facet);
      if (found != keys.end()) {
        resident.erase({found->second, facet});
      } else {
        ++misses[k];
        if (resident.size() == capacity) {
          keys.erase(resident.begin()->second);
          resident.erase(resident.begin());
        }
      }
      keys[facet] = key(k, i);
      resident.insert({keys[facet], facet});
    }
  }
  return misses;
}

}  // namespace

std::vector<size_t> LruMisses(const std::vector<uint32_t>& period, size_t capacity, size_t periods) {
  return Misses(period, capacity, periods,
                [&](size_t k, size_t i) { return static_cast<int64_t>(k * period.size() + i); });
}

std::vector<size_t> BeladyMisses(const std::vector<uint32_t>& period, size_t capacity, size_t periods) {
  // Distance from each use to the facet's next one, around the period.
  std::vector<size_t> distance(period.size(), 0);
  std::unordered_map<uint32_t, size_t> next;
  for (size_t j = 2 * period.size(); j-- > 0;) {
    const size_t i = j % period.size();
    const auto found = next.find(period[i]);
    if (found != next.end()) {
      distance[i] = found->second - j;
    }
    next[period[i]] = j;
  }
  return Misses(period, capacity, periods, [&](size_t k, size_t i) {
    return -static_cast<int64_t>(k * period.size() + i + distance[i]);
  });
}

std::vector<uint32_t> ForwardOnly(uint32_t units) {
  std::vector<uint32_t> order(units);
  for (uint32_t i = 0; i < units; ++i) {
    order[i] = i;
  }
  return order;
}

std::vector<uint32_t> ZigZag(uint32_t units) {
  std::vector<uint32_t> order = ForwardOnly(units);
  for (uint32_t i = units; i-- > 0;) {
    order.push_back(i);
  }
  return order;
}

std::vector<uint32_t> ThreePass(uint32_t units) {
  std::vector<uint32_t> order = ZigZag(units);
  for (uint32_t i = 0; i < units; ++i) {
    order.push_back(i);
  }
  return order;
}

}  // namespace misa::policy
