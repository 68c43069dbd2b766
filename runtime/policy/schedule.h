// When the transfers of a choice of residency start: the step simulated on its times and the link's rates.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/policy/planner.h"
#include "runtime/policy/step_model.h"

namespace misa::policy {

struct ScheduleOptions {
  // How many times the duration of its copy room is set aside for a facet that leaves dirty, so that a load ahead does
  // not take it from the position after.
  double unload_room = 1;
  int most_periods = 12;
};

struct Schedule {
  Plan plan;
  bool repeats = false;  // two periods in a row had the same actions
};

// Aggressive prefetch (Cao, Felten, Karlin, Li, SIGMETRICS 1995) within the choice `kept` (from ChooseResidency): the
// link is never idle while something that is away can be loaded without taking the room of a use before its own.
// A result without `repeats` holds the last period simulated; its actions move the same facets.
Result<Schedule> MakeSchedule(const StepModel& model, const std::vector<uint8_t>& kept, const ScheduleOptions& options);

}  // namespace misa::policy
