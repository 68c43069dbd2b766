// Which facets stay on the device between two uses, and which go: the choice that fixes the bytes of a plan.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/policy/step_model.h"

namespace misa::policy {

// The positions at which keeping a facet from one use to its next takes room that its going would free.
struct Cover {
  uint32_t start = 0;
  uint32_t length = 0;
};

// The problem a choice solves: which of the intervals to keep where each position has so much room for them.
struct Intervals {
  std::vector<Cover> covers;  // by use
  std::vector<int64_t> room;  // by position
};

// With `transfer_room` a facet that goes and comes takes room for so many times the duration of its transfers at either
// end of its absence; 0: transfers take no time. More makes more facets go, and leaves more room to load ahead in.
Intervals WidenUses(const StepModel& model, double transfer_room);

// A choice says for each use of the model whether the facet stays on the device from that use to its next one. Whatever
// happens before, a period run with any choice returned here respects the capacity at each position, provided that
// transfers take no time.

// Farthest next use goes (Belady's MIN, with sizes). Victims whose next use is within `tie_window` of the distance to the
// farthest one count as equally far; of those a clean one goes first.
std::vector<uint8_t> ChooseFarthest(const StepModel& model, const Intervals& intervals, double tie_window);

// What a byte costs where it is moved.
struct Weights {
  double load = 1;
  double unload = 1;
};

// The least bytes, by the Lagrangian relaxation of the capacities: each position has a price for its room, each facet
// decides for itself, and prices follow demand. It knows what farthest-next-use does not: that one copy down pays for
// all absences until the next write, and that sizes differ. A choice that costs no more than `enough` is not improved.
std::vector<uint8_t> ChoosePriced(const StepModel& model, const Intervals& intervals, const Weights& weights,
                                  double enough);

// Exchanges intervals of a choice as long as it gets cheaper: one that goes is kept, what is in its way goes, and what then
// fits is kept. Looks at no more than `most_visits` uses.
void Exchange(const StepModel& model, const Intervals& intervals, const Weights& weights, size_t most_visits,
              std::vector<uint8_t>* kept);

// Bytes a period that a choice moves.
struct MovedBytes {
  int64_t loads = 0;
  int64_t unloads = 0;
};
MovedBytes CountBytes(const StepModel& model, const std::vector<uint8_t>& kept);
double CostOf(const StepModel& model, const std::vector<uint8_t>& kept, const Weights& weights);

// Makes any choice hold around the period; evictions by farthest next use.
void Repair(const StepModel& model, std::vector<uint8_t>* kept);
// Keeps what still fits into the room. Short intervals first: they take the least room for the transfers they save.
void Fill(const StepModel& model, const Intervals& intervals, std::vector<uint8_t>* kept);

}  // namespace misa::policy
