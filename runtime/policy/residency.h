// Which facets stay on the device between two uses, and which go: the choice that fixes the bytes of a plan.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/policy/step_model.h"

namespace misa::policy {

struct ResidencyOptions {
  // How many times the duration of its transfers a facet that goes and comes still takes room at either end of its
  // absence. 0: transfers take no time. More makes more facets go, and leaves more room to load ahead in.
  double transfer_room = 1;
  // Victims whose next use is within this share of the distance to the farthest one count as equally far; of those a
  // clean one goes first.
  double tie_window = 0.1;
};

// For each use of the model: whether the facet stays on the device from that use to its next one. Whatever happens
// before, a period run with this choice respects the capacity at each position, provided transfers take no time.
std::vector<uint8_t> ChooseResidency(const StepModel& model, const ResidencyOptions& options);

}  // namespace misa::policy
