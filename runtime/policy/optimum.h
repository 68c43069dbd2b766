// The exact optimum of a cache of few facets: the fewest bytes a period, in the long run, of all schedules there are.
#pragma once

#include <cstdint>

#include "runtime/policy/planner.h"
#include "runtime/policy/step_model.h"

namespace misa::policy {

struct Optimum {
  uint32_t periods = 0;  // of the cycle that repeats
  uint64_t misses = 0;   // in the whole cycle
  uint64_t loaded_bytes = 0;
  uint64_t unloaded_bytes = 0;
};

// Loads count first; of schedules that load equally little, one that unloads least. Transfers take no time. Refused
// where there are more than `most_states` states (a position and what is on the device then), with a sentence.
Result<Optimum> FindOptimum(const StepModel& model, uint64_t most_states = 400'000);

}  // namespace misa::policy
