// One step of a training as the planner's input: which facets there are, and the trace of forward, backward and update.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/capacity/device.h"
#include "runtime/capacity/model.h"
#include "runtime/policy/planner.h"
#include "runtime/trace/trace_file.h"

namespace misa::capacity {

enum class Mode : uint8_t { kExact, kSampled, kQuantized };
// When the optimizer's step of a module is carried out (docs: `step=`).
enum class Update : uint8_t { kDeferred, kInBackward, kEager };

const char* ModeName(Mode mode);
const char* UpdateName(Update update);

// Bytes an optimizer keeps for each parameter, beside a master copy.
struct OptimizerKind {
  const char* name;
  double states;        // elements of state for each parameter
  bool factored;        // one row and one column of a matrix instead of the matrix
  bool eight_bit;       // one byte an element and a scale for each 2048, whatever the precision
  double temporaries;   // elements for each parameter of the largest tensor, while it is stepped
};
struct PrecisionKind {
  const char* name;
  double weight_bytes;
  double gradient_bytes;
  double master_bytes;  // of a copy in full precision, among the optimizer's state
  double state_bytes;   // of one element of state
  double activation_bytes;
  bool full;            // matrices are computed in fp32
};
const std::vector<OptimizerKind>& Optimizers();
const std::vector<PrecisionKind>& Precisions();

struct Training {
  std::string optimizer = "adamw";
  std::string precision = "bf16-mixed";
  uint64_t batch = 1;
  uint64_t sequence = 0;  // 0: 2048, or the model's longest where that is shorter
  // Sequences that go through a block at once; 0: all. All of a batch go through a block before the next block begins, so
  // that one load serves them, and one at a time leaves its activations.
  uint64_t micro_batch = 0;
  bool checkpointing = false;  // every block's activations are computed again in backward
  bool fused_attention = true;
  Mode mode = Mode::kExact;
  Update update = Update::kDeferred;
  double delta = 0.03;  // share of the samplable parameters that a round trains
  uint64_t seed = 0;    // of the round that is planned
};

// Training state, without any rounding: parameters times bytes.
struct StateBytes {
  double weights = 0;
  double gradients = 0;
  double optimizer = 0;
  double total() const { return weights + gradients + optimizer; }
};

struct Workload {
  // Budget and reserve are the caller's.
  policy::PlanInput input;
  std::vector<trace::FacetInfo> facets;
  StateBytes state;
  uint64_t trained_parameters = 0;
  uint64_t tokens = 0;
  double compute_seconds = 0;       // of the step
  double forward_seconds = 0;       // of it
  double update_seconds = 0;        // of it
};

// Refuses, with a sentence that lists what is known: an unknown optimizer or precision, a batch or sequence of 0 or past
// the model's context, a share that no module fits into.
policy::Result<Workload> MakeWorkload(const Model& model, const DeviceProfile& device, const Training& training);

// Parameters times the bytes of this precision and optimizer: all of them trained.
policy::Result<StateBytes> StateOf(const Model& model, const std::string& optimizer, const std::string& precision);

// Bytes of activations that one block leaves behind for backward: s*b*h*(34 + 5*a*s/h), the second term only without
// fused attention; 16-bit, twice as much in fp32.
double BlockActivationBytes(const ModelShape& shape, const Training& training, double activation_bytes);

}  // namespace misa::capacity
