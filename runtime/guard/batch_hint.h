// How many rows of a batch the memory has room for. What the batch's tensors take grows with its rows; what the managed
// state takes at a position does not.
//
//   free share  = 1 + (budget - reserve - peak) / other peak
//   most share  = the least of (budget - reserve - managed bytes at once) / other bytes, over all positions of the step
//   rows        = share * rows now, rounded down
//
// The free share is what fits beside everything that is on the device today, so that no more moves; the most is what
// fits at all, with modules coming and going as they must. Other tensors have a part that does not grow with the rows,
// so that a share above 1 errs on the safe side; below 1 shrink a little further.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace misa::guard {

struct BatchPosition {
  uint64_t managed_bytes = 0;  // that the operator at this position needs at once
  uint64_t other_bytes = 0;    // of all unmanaged tensors, activations among them
};

struct BatchInput {
  uint64_t budget_bytes = 0;
  uint64_t reserve_bytes = 0;  // kept free
  uint64_t peak_bytes = 0;     // of the last step, all in all
  uint64_t rows = 0;           // of the batch; 0: not known, and the hint has shares only
  std::vector<BatchPosition> positions;
};

struct BatchHint {
  bool known = false;  // false: no position has other tensors, or there is no budget
  double free_share = 1;
  double most_share = 1;
  // Where rows are known; never more than the most.
  uint64_t free_rows = 0;
  uint64_t most_rows = 0;
  // For people.
  std::string sentence;
};

BatchHint HintBatch(const BatchInput& input);

}  // namespace misa::guard
