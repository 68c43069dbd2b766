// Randomness of a simulation: one seed gives the same draws on every machine and with every standard library.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/policy/split_mix.h"

namespace misa::sim {

// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): small, and any seed is a good one.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    return policy::SplitMix(state_ += policy::kSplitMixStep);
  }
  // 0 … limit-1; limit > 0. The modulo's bias is far below what a simulation could see.
  uint64_t Below(uint64_t limit) { return Next() % limit; }
  uint64_t Between(uint64_t least, uint64_t most) { return least + Below(most - least + 1); }
  // [0, 1)
  double Share() { return static_cast<double>(Next() >> 11) * 0x1.0p-53; }
  double Between(double least, double most) { return least + (most - least) * Share(); }
  bool Chance(double probability) { return Share() < probability; }
  double Exponential(double mean) { return -mean * std::log1p(-Share()); }
  template <typename T>
  const T& Pick(const std::vector<T>& items) {
    return items[Below(items.size())];
  }

 private:
  uint64_t state_;
};

}  // namespace misa::sim
