#include "runtime/trace/period.h"

#include <algorithm>
#include <vector>

namespace misa::trace {
namespace {

// Read backwards, the question is about a prefix, and the Z function answers it for every p at once: z[p] is how far the
// reversed sequence agrees with itself shifted by p, so the first repeats * p entries repeat with period p exactly when
// z[p] >= (repeats - 1) * p. (Gusfield, Algorithms on Strings, Trees and Sequences, 1997, section 1.4.)
// `found` is told of every such p and its z[p], the smallest p first, until it returns false.
template <typename Found>
void EachPeriod(std::span<const uint64_t> groups, size_t repeats, size_t smallest, Found found) {
  const size_t count = groups.size();
  if (repeats < 2 || count < 2) {
    return;
  }
  smallest = std::max<size_t>(smallest, 1);
  const auto at = [&](size_t i) { return groups[count - 1 - i]; };
  const size_t limit = count / repeats;  // no longer p has room for its repeats
  std::vector<size_t> z(limit + 1, 0);
  size_t left = 0;
  size_t right = 0;  // [left, right) is the rightmost stretch known to equal a prefix
  for (size_t p = 1; p <= limit; ++p) {
    size_t length = p < right ? std::min(right - p, z[p - left]) : 0;
    while (p + length < count && at(length) == at(p + length)) {
      ++length;
    }
    z[p] = length;
    if (p + length > right) {
      left = p;
      right = p + length;
    }
    if (p >= smallest && length / p >= repeats - 1 && !found(p, length)) {
      return;
    }
  }
}

}  // namespace

size_t FindPeriod(std::span<const uint64_t> groups, size_t repeats, size_t smallest) {
  size_t period = 0;
  EachPeriod(groups, repeats, smallest, [&](size_t p, size_t) {
    period = p;
    return false;
  });
  return period;
}

size_t FindLongestPeriod(std::span<const uint64_t> groups, size_t repeats) {
  size_t period = 0;
  size_t longest = 0;
  EachPeriod(groups, repeats, 1, [&](size_t p, size_t length) {
    if (length > longest) {
      period = p;
      longest = length;
    }
    return true;
  });
  return period;
}

}  // namespace misa::trace
