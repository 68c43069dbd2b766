// The output function of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): a bijection of 64-bit words. Not for adversaries.
#pragma once

#include <cstdint>

namespace misa::policy {

inline constexpr uint64_t kSplitMixStep = 0x9e3779b97f4a7c15ull;  // between two states of the generator

constexpr uint64_t SplitMix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

}  // namespace misa::policy
