// Does a training fit, what does it hold, how fast is it: the daemon's planner on a step that is not there yet.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/capacity/workload.h"

namespace misa::capacity {

// Bytes on the device where they are most.
struct Parts {
  uint64_t weights_bytes = 0;
  uint64_t gradients_bytes = 0;
  uint64_t optimizer_bytes = 0;
  uint64_t activations_bytes = 0;  // all other tensors
  uint64_t reserve_bytes = 0;      // what the planner keeps free beside them
  uint64_t base_line_bytes = 0;    // driver and libraries
  uint64_t total() const {
    return weights_bytes + gradients_bytes + optimizer_bytes + activations_bytes + reserve_bytes + base_line_bytes;
  }
};

// A change with which it fits, and what then is to be expected.
struct Suggestion {
  std::string change;  // "batch 2", "checkpointing", …
  uint64_t smallest_budget_bytes = 0;
  uint64_t host_bytes = 0;
  double step_seconds = 0;
  double tokens_per_second = 0;
};

struct Prediction {
  bool fits = false;
  std::string reason;  // why not
  uint64_t budget_bytes = 0;           // what facets and other tensors may hold together
  uint64_t smallest_budget_bytes = 0;  // with which the step works at all
  uint64_t peak_bytes = 0;             // of the plan; of the smallest budget where it does not fit
  Parts parts;                         // their sum is peak_bytes
  uint64_t host_bytes = 0;             // what the tier below holds
  // Of the plan; 0 where there is none.
  double step_seconds = 0;
  double compute_seconds = 0;
  double stall_seconds = 0;
  double bound_step_seconds = 0;
  double tokens_per_second = 0;
  uint64_t loaded_bytes = 0;
  uint64_t unloaded_bytes = 0;
  uint64_t bound_load_bytes = 0;
  uint64_t bound_unload_bytes = 0;
  std::string limited_by;  // "compute", "link", "memory" or "host memory"
  // The state and activations all on the device at once, as without misa.
  uint64_t plain_bytes = 0;
  StateBytes state;
  uint64_t trained_parameters = 0;
  uint64_t tokens = 0;
  // The least batch at which the step no longer waits for the link; where it waits, and where such a batch fits.
  std::optional<uint64_t> hidden_from_batch;
  std::vector<Suggestion> suggestions;
};

struct Question {
  Model model;
  DeviceProfile device;
  Training training;
  uint64_t budget_bytes = 0;  // 0: the device's capacity less its watermark and base line
};

// The budget that a question without one has.
uint64_t DefaultBudget(const DeviceProfile& device);

// One mode. Refuses contradictions (a budget above the device, impossible sizes) with a sentence. Suggestions are made
// where it does not fit.
policy::Result<Prediction> Predict(const Question& question);

}  // namespace misa::capacity
