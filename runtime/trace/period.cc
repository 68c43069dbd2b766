#include "runtime/trace/period.h"

#include <algorithm>
#include <vector>

namespace misa::trace {

size_t FindPeriod(std::span<const uint64_t> groups, size_t repeats, size_t smallest) {
  const size_t count = groups.size();
  if (repeats < 2 || count < 2) {
    return 0;
  }
  smallest = std::max<size_t>(smallest, 1);
  // Read backwards, the question is about a prefix, and the Z function answers it for every p at once: z[p] is how far
  // the reversed sequence agrees with itself shifted by p, so the first repeats * p entries repeat with period p exactly
  // when z[p] >= (repeats - 1) * p. (Gusfield, Algorithms on Strings, Trees and Sequences, 1997, section 1.4.)
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
    if (p >= smallest && length / p >= repeats - 1) {
      return p;
    }
  }
  return 0;
}

}  // namespace misa::trace
