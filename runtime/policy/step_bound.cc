#include "runtime/policy/step_bound.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace misa::policy {
namespace {

double Above(double value, double least) { return std::max(0.0, value - least); }

std::string Check(const StepShape& shape, const StepKept& kept) {
  const std::pair<const char*, double> amounts[] = {
      {"weight bytes", shape.weight_bytes},
      {"gradient bytes", shape.gradient_bytes},
      {"optimizer bytes", shape.optimizer_bytes},
      {"share of updated weights", shape.updated_share},
      {"forward seconds", shape.forward_seconds},
      {"backward seconds", shape.backward_seconds},
      {"optimizer seconds", shape.optimizer_seconds},
      {"host seconds", shape.host_seconds},
      {"weight bytes kept at the start", kept.weights_at_start_bytes},
      {"weight bytes kept at the turn", kept.weights_at_turn_bytes},
      {"optimizer bytes kept", kept.optimizer_bytes},
      {"gradient bytes kept", kept.gradient_bytes},
  };
  for (const auto& [name, value] : amounts) {
    if (!std::isfinite(value) || value < 0) {
      return std::string("The step's ") + name + " must be a finite number of at least 0, and is " +
             std::to_string(value) + ".";
    }
  }
  if (shape.updated_share > 1) {
    return "The share of updated weights must be at most 1, and is " + std::to_string(shape.updated_share) + ".";
  }
  const std::pair<const char*, double> rates[] = {{"load", shape.link.load},
                                                  {"unload", shape.link.unload},
                                                  {"duplex load", shape.link.duplex_load},
                                                  {"duplex unload", shape.link.duplex_unload}};
  for (const auto& [name, rate] : rates) {
    if (!std::isfinite(rate) || rate <= 0) {
      return std::string("The link's ") + name + " rate must be a finite number of bytes per second above 0, and is " +
             std::to_string(rate) + ".";
    }
  }
  return "";
}

bool OnDevice(UpdatePlace place) {
  return place == UpdatePlace::kInBackward || place == UpdatePlace::kDeferred || place == UpdatePlace::kEager;
}

// Gradients outlive the part of the step that makes them.
bool KeepsGradients(UpdatePlace place) { return place == UpdatePlace::kDeferred || place == UpdatePlace::kEager; }

// Bytes that are not on the device when they are wanted.
struct Missing {
  double at_start = 0;
  double at_turn = 0;
  double optimizer = 0;
  double gradients = 0;
};

Missing WhatIsMissing(const StepShape& shape, const StepKept& kept) {
  Missing missing;
  missing.at_start = Above(shape.weight_bytes, shape.update == UpdatePlace::kHost ? 0 : kept.weights_at_start_bytes);
  missing.at_turn = Above(shape.weight_bytes, kept.weights_at_turn_bytes);
  missing.optimizer = OnDevice(shape.update) ? Above(shape.optimizer_bytes, kept.optimizer_bytes) : 0;
  missing.gradients = KeepsGradients(shape.update) ? Above(shape.gradient_bytes, kept.gradient_bytes) : 0;
  return missing;
}

// The seconds of a limit whose bytes are known.
void AddTimes(const StepShape& shape, const Missing& missing, StepLimit* limit) {
  const double rate = std::max(shape.link.load, shape.link.duplex_load);
  const double compute = shape.forward_seconds + shape.backward_seconds + shape.optimizer_seconds;
  // An update on the device has the compute stream to itself while it runs.
  limit->phase_seconds = std::max(compute, std::max(shape.forward_seconds, missing.at_start / rate) +
                                               std::max(shape.backward_seconds, missing.at_turn / rate));
  limit->link_seconds = LinkSeconds(limit->load_bytes, limit->unload_bytes, shape.link);
  limit->host_seconds = shape.update == UpdatePlace::kHost ? shape.host_seconds : 0;
  limit->step_seconds = std::max({limit->phase_seconds, limit->link_seconds, limit->host_seconds});
  if (limit->step_seconds == compute) {
    limit->limited_by = "compute";
  } else if (limit->step_seconds == limit->phase_seconds) {
    limit->limited_by = "phase";
  } else {
    limit->limited_by = limit->step_seconds == limit->link_seconds ? "link" : "host";
  }
}

}  // namespace

StepKept KeepMost(const StepShape& shape, const StepRoom& room) {
  StepKept kept;
  double start = std::max(0.0, room.start_bytes);
  double turn = std::max(0.0, room.turn_bytes);
  // On the host all weights come new from there.
  kept.weights_at_start_bytes = shape.update == UpdatePlace::kHost ? 0 : std::min(start, shape.weight_bytes);
  kept.weights_at_turn_bytes = std::min(turn, shape.weight_bytes);
  start -= kept.weights_at_start_bytes;
  turn -= kept.weights_at_turn_bytes;
  if (KeepsGradients(shape.update)) {
    // Gradients are not there at the turn: the step's own are yet to be made.
    kept.gradient_bytes = std::min(shape.gradient_bytes, Above(start, turn));
    start -= kept.gradient_bytes;
  }
  if (OnDevice(shape.update)) {
    kept.optimizer_bytes = std::min({shape.optimizer_bytes, start, turn});
    start -= kept.optimizer_bytes;
  }
  if (KeepsGradients(shape.update)) {
    kept.gradient_bytes += std::min(start, shape.gradient_bytes - kept.gradient_bytes);
  }
  return kept;
}

Result<StepLimit> StepBound(const StepShape& shape, const StepKept& kept) {
  Result<StepLimit> result;
  result.error = Check(shape, kept);
  if (!result.ok()) {
    return result;
  }
  const Missing missing = WhatIsMissing(shape, kept);
  StepLimit& limit = result.value;
  limit.load_bytes = missing.at_start + missing.at_turn + missing.optimizer + missing.gradients;
  if (shape.update == UpdatePlace::kEager) {
    // A third pass over the weights, which begins with what backward left.
    limit.load_bytes += shape.updated_share * missing.at_start;
  }
  limit.unload_bytes = missing.optimizer + missing.gradients;
  if (shape.update == UpdatePlace::kHost) {
    limit.unload_bytes = shape.gradient_bytes;
  } else if (OnDevice(shape.update) && !shape.host_recasts) {
    // An updated weight is spared its copy only where it stays until its next update, and that is over both meetings.
    limit.unload_bytes += Above(shape.updated_share * shape.weight_bytes,
                                std::min(kept.weights_at_start_bytes, kept.weights_at_turn_bytes));
  }
  AddTimes(shape, missing, &limit);
  return result;
}

Result<StepLimit> StepBound(const StepShape& shape, const StepRoom& room) {
  Result<StepLimit> result;
  if (!(std::isfinite(room.start_bytes) && room.start_bytes >= 0 && std::isfinite(room.turn_bytes) &&
        room.turn_bytes >= 0)) {
    result.error =
        "There must be finite room for facets of at least 0 bytes at the step's start and at the turn, and it is " +
        std::to_string(room.start_bytes) + " and " + std::to_string(room.turn_bytes) +
        ": the other tensors alone take more than the budget.";
    return result;
  }
  result = StepBound(shape, KeepMost(shape, room));
  if (!result.ok() || !OnDevice(shape.update)) {
    return result;
  }
  StepLimit& limit = result.value;
  const double updated = shape.host_recasts ? 0 : shape.updated_share * shape.weight_bytes;
  if (shape.update == UpdatePlace::kEager) {
    // What the pass needs and does not find on the device; each term counts loads of its own.
    limit.load_bytes = Above(shape.weight_bytes, room.start_bytes) + Above(shape.weight_bytes, room.turn_bytes) +
                       Above(shape.updated_share * shape.weight_bytes + shape.gradient_bytes + shape.optimizer_bytes,
                             room.start_bytes);
  }
  // Dirty content is spared its copy where it stays from one write to the next: all of it is there at once when forward
  // begins (eager: when the pass does), and all but the gradients at the turn.
  const double gradients = KeepsGradients(shape.update) ? shape.gradient_bytes : 0;
  limit.unload_bytes = std::max(Above(updated + shape.optimizer_bytes + gradients, room.start_bytes),
                                Above(updated + shape.optimizer_bytes, room.turn_bytes));
  AddTimes(shape, WhatIsMissing(shape, KeepMost(shape, room)), &limit);
  return result;
}

double PhaseSeconds(const std::vector<double>& missing_bytes, const std::vector<double>& compute_seconds, double rate) {
  const size_t parts = std::min(missing_bytes.size(), compute_seconds.size());
  double left = 0;
  for (size_t i = 0; i < parts; ++i) {
    left += compute_seconds[i];
  }
  double loaded = 0;
  double longest = left;
  for (size_t i = 0; i < parts; ++i) {
    loaded += missing_bytes[i];
    longest = std::max(longest, loaded / rate + left);
    left -= compute_seconds[i];
  }
  return longest;
}

// With d seconds of both at once the total is (L - d * dl) / l + (U - d * du) / u + d, linear in d, so that its least
// is at one of the ends of what d can be. ((L + U) / (dl + du) is not a bound: one direction alone may be faster than
// both.)
double LinkSeconds(double load_bytes, double unload_bytes, const LinkRates& link) {
  const double load = std::max(link.load, link.duplex_load);
  const double unload = std::max(link.unload, link.duplex_unload);
  const double apart = load_bytes / load + unload_bytes / unload;
  const double d = std::min(load_bytes / link.duplex_load, unload_bytes / link.duplex_unload);
  const double together =
      (load_bytes - d * link.duplex_load) / load + (unload_bytes - d * link.duplex_unload) / unload + d;
  return std::max({load_bytes / load, unload_bytes / unload, std::min(apart, together)});
}

double MeasuredStepBound(double compute_seconds, const Bound& bound, const LinkRates& measured) {
  const auto load = static_cast<double>(bound.load_bytes);
  const auto unload = static_cast<double>(bound.unload_bytes);
  double seconds = compute_seconds;
  if (measured.load > 0) {
    seconds = std::max(seconds, load / std::max(measured.load, measured.duplex_load));
  }
  if (measured.unload > 0) {
    seconds = std::max(seconds, unload / std::max(measured.unload, measured.duplex_unload));
  }
  if (measured.load > 0 && measured.unload > 0 && measured.duplex_load > 0 && measured.duplex_unload > 0) {
    seconds = std::max(seconds, LinkSeconds(load, unload, measured));
  }
  return bound.step_seconds > 0 ? std::min(seconds, bound.step_seconds) : seconds;
}

double HostAdamSeconds(double parameters, double host_memory_bytes_per_second) {
  constexpr double kBytesPerParameter = 28;
  return kBytesPerParameter * parameters / host_memory_bytes_per_second;
}

}  // namespace misa::policy
