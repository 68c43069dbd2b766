// The physical limit of a training step in closed form, from sizes, compute times, a budget and a link: what no
// schedule of a step can beat, before there is a trace of it. LowerBound (planner.h) is the same limit of a trace.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/policy/planner.h"

namespace misa::policy {

// When and where weights are updated.
enum class UpdatePlace : uint8_t {
  kFrozen,      // nowhere: no gradients, no optimizer
  kInBackward,  // on the device, as soon as a gradient is complete; gradients never leave the device
  kDeferred,    // on the device, at the next touch, in the next forward; gradients live until then
  kEager,       // on the device, in a pass of its own after backward
  kHost,        // on the host's processor: gradients go down, weights come back up
};

// A step's sizes and times. All bytes and seconds are finite and at least 0.
struct StepShape {
  UpdatePlace update = UpdatePlace::kDeferred;
  double weight_bytes = 0;     // W
  double gradient_bytes = 0;   // G
  double optimizer_bytes = 0;  // O
  // Share of the weights that the optimizer updates (mode sampled trains few); the others are never dirty.
  double updated_share = 1;
  // The host makes the low-precision weight from its master copy, so that updated weights need no copy down.
  bool host_recasts = false;
  double forward_seconds = 0;    // C_F
  double backward_seconds = 0;   // C_B, recomputation included
  double optimizer_seconds = 0;  // C_O, on the device
  double host_seconds = 0;       // T_cpu: an optimizer on the host
  LinkRates link;                // all rates above 0
};

// What stays on the device where a step's phases meet.
struct StepKept {
  double weights_at_start_bytes = 0;  // m0: weights on the device when forward begins
  double weights_at_turn_bytes = 0;   // m1: and when backward begins
  double optimizer_bytes = 0;         // m_o: optimizer state that is never away
  double gradient_bytes = 0;          // m_g: gradients that are never away
};

// Room for facets (budget - reserve - other tensors) where the phases meet.
struct StepRoom {
  double start_bytes = 0;  // when forward begins, and when a pass of the optimizer does
  double turn_bytes = 0;   // when backward begins
};

// The residency that loads least in that room: weights first, then gradients where only the start has room, then
// optimizer state.
StepKept KeepMost(const StepShape& shape, const StepRoom& room);

struct StepLimit {
  double load_bytes = 0;
  double unload_bytes = 0;
  double step_seconds = 0;   // the largest of the three below
  double phase_seconds = 0;  // forward and backward, each no shorter than its compute and its weights' way up
  double link_seconds = 0;   // all bytes of a step over the link, both ways at once where that is faster
  double host_seconds = 0;   // the optimizer on the host
  std::string limited_by;    // "compute", "phase", "link" or "host": what the step's time comes from
};

// The limit of a step that keeps what `kept` says.
// Refuses (error, nothing computed) sizes, times, shares and rates that are negative, NaN or infinite, or rates of 0.
Result<StepLimit> StepBound(const StepShape& shape, const StepKept& kept);
// The limit of any step in that room: fewest loads and fewest unloads, each by the residency that suits it. Room below
// 0 is refused: not even the other tensors fit.
Result<StepLimit> StepBound(const StepShape& shape, const StepRoom& room);

// Seconds of one phase whose parts need `missing_bytes[i]` loaded before they compute for `compute_seconds[i]`, on a
// link of `rate` bytes a second that is free at the phase's start: max over j of sum_{i<=j} missing / rate + sum_{i>=j}
// compute.
double PhaseSeconds(const std::vector<double>& missing_bytes, const std::vector<double>& compute_seconds, double rate);

// The least time in which the link moves both: alone, or both at once at its duplex rates.
double LinkSeconds(double load_bytes, double unload_bytes, const LinkRates& link);

// The bound of a step in a report, from what a run measured: no step is shorter than its compute (the fastest step's: a
// bound that a slow moment of the machine could raise would be none), nor than the link needs for the bound's bytes. The
// bound of the trace knows more, but times the compute on one early step; the lower of the two holds. Rates that were not
// measured are 0 and count nothing; so does a bound of 0 seconds, which is none yet.
double MeasuredStepBound(double compute_seconds, const Bound& bound, const LinkRates& measured);

// An optimizer on the host reads and writes 28 bytes for each parameter (fp32 master, moments, gradient; Adam).
double HostAdamSeconds(double parameters, double host_memory_bytes_per_second);

}  // namespace misa::policy
