// Known replacement policies on unit-sized facets, on demand and without time: what a planner is measured against.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace misa::policy {

// The order of facets used in one period, repeated `periods` times; misses in each period, the first (cold) one included.
// `capacity` is the number of facets that fit, at least 1.
std::vector<size_t> LruMisses(const std::vector<uint32_t>& period, size_t capacity, size_t periods);

// Belady's MIN (IBM Systems Journal 5, 1966): the facet evicted is the one whose next use is farthest. It knows that the
// period goes on repeating after the last one counted.
std::vector<size_t> BeladyMisses(const std::vector<uint32_t>& period, size_t capacity, size_t periods);

// Orders of `units` equal facets: what a training step does with its weights.
std::vector<uint32_t> ForwardOnly(uint32_t units);  // 0 … n-1
std::vector<uint32_t> ZigZag(uint32_t units);       // forward, backward
std::vector<uint32_t> ThreePass(uint32_t units);    // forward, backward, an optimizer pass in forward order

}  // namespace misa::policy
