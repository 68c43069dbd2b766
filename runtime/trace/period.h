// Exact period of a sequence of touch groups: what turns a stream of touches into the trace of one step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace misa::trace {

// The smallest p of at least `smallest` such that the last repeats * p entries are one block of p entries repeated
// `repeats` times; 0 where there is none, and for repeats under 2. Linear time and memory.
// A step that ends in a run of equal groups has short periods of its own at its end: a caller that knows a lower limit
// (the groups seen since the last step boundary) passes it as `smallest`.
size_t FindPeriod(std::span<const uint64_t> groups, size_t repeats = 2, size_t smallest = 1);

// Of all such p the one that the sequence has kept to for the longest time up to its end, of equals the smallest; 0 where
// there is none. A run of equal groups at the end does not hide the period that the whole has. Linear time and memory.
size_t FindLongestPeriod(std::span<const uint64_t> groups, size_t repeats = 2);

}  // namespace misa::trace
