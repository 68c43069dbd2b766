// From one period of a step to a plan: what leaves the device after which use, what is loaded from when on.
// Pure functions of their inputs; the same code decides in the daemon, in simulations and in reports.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/policy/trace.h"

namespace misa::policy {

// Bytes per second between the device and the tier below it.
struct LinkRates {
  double load = 0;           // loads alone
  double unload = 0;         // unloads alone
  double duplex_load = 0;    // loads while unloads run
  double duplex_unload = 0;  // unloads while loads run
};

// Another way to a facet's content at its next use than to keep it or to load it; what a trainer can do and what it
// costs.
struct Offer {
  enum Kind : uint8_t {
    kRecompute = 1,  // the content is made anew by compute, at the use; what is on the device then just goes
    kInt8 = 2,  // an int8 copy stays on the device; the host's stays the master, so dirty content is copied down first
  };
  uint32_t facet = 0;
  Kind kind = kRecompute;
  double seconds = 0;  // of compute, for each absence
  uint64_t bytes = 0;  // kInt8: of the copy, less than the facet's
};

struct PlanInput {
  // Device bytes of each facet, by facet id.
  std::vector<uint64_t> facet_bytes;
  Trace trace;
  // Device bytes the session may hold: facets and other tensors.
  uint64_t budget_bytes = 0;
  // Kept free of facets beside the other tensors (fragmentation, drift of the profile).
  uint64_t reserve_bytes = 0;
  LinkRates link;
  // Periods a plan's cycle may have. Where sizes do not divide well, another facet goes in each period of a cycle, and
  // less moves than in any period that repeats by itself.
  uint32_t most_cycle_periods = 1;
  // Fewer bytes are worth a longer search even where the step takes no longer for them.
  bool fewest_bytes = false;
  std::vector<Offer> offers;
  // Facets that stay on the device and take their bytes all the time; the plan is one of the others. Their bytes and the
  // rest's SmallestBudget must fit. Bounds are those of a step without pins.
  std::vector<uint32_t> pinned;
};

struct Action {
  enum Kind : uint8_t {
    kLoad = 1,
    kUnload = 2,
    // Only for facets with an Offer. The first of each pair is due like an unload, the second is part of the use.
    kDrop = 3,        // goes without a copy, whatever it holds
    kRecompute = 4,   // is made anew for the use at this position
    kQuantize = 5,    // shrinks to its int8 copy; dirty content is copied down first
    kDequantize = 6,  // the int8 copy becomes the content, clean, for the use at this position
  };
  uint32_t position = 0;
  Kind kind = kLoad;
  uint32_t facet = 0;

  bool operator==(const Action&) const = default;
};

// Actions in the order in which they start, of the steady state (a period that follows many equal ones). A load's
// position is the earliest use at which it may start; an unload's the use after which the facet goes. A load never
// precedes the unload that makes its room. The list is also in the order in which actions become due: a load when its
// position begins, an unload when the position after its own does.
// A plan's cycle has `periods` periods, and positions count on from one to the next: position p of the cycle's period k
// is k * (positions of a period) + p. After its last period the first one follows.
struct Plan {
  std::vector<Action> actions;
  uint32_t periods = 1;
  // Means of a period over the cycle.
  double step_seconds = 0;   // predicted
  double stall_seconds = 0;  // predicted part of it
  uint64_t loaded_bytes = 0;
  uint64_t unloaded_bytes = 0;
  double offer_seconds = 0;  // compute that recomputation and int8 copies add
};

// What no schedule can beat, a period.
struct Bound {
  uint64_t load_bytes = 0;
  uint64_t unload_bytes = 0;
  double step_seconds = 0;
};

// An answer or a sentence that says what is wrong with the input and what would work.
template <typename T>
struct Result {
  T value{};
  std::string error;  // empty: value holds
  bool ok() const { return error.empty(); }
};

// Bytes the largest position needs at once: its facets and the other tensors. The smallest budget that works.
uint64_t SmallestBudget(const PlanInput& input);

// What is left to plan beside pinned facets: their uses find them there, and their bytes are nobody else's. A sentence, and
// *rest is of no use, for a pin that there is no facet for, or pins that do not fit the budget.
std::string WithoutPinned(const PlanInput& input, PlanInput* rest);

// Chooses which facets stay between their uses (farthest next use, and prices of room: residency.h), prefetches the
// others aggressively within that choice (schedule.h), simulates it on the trace's times and the link's rates until the
// period repeats, for several choices, and returns the one of the shortest step, of equals the one that moves the
// fewest bytes. Refuses (error, nothing planned) a budget under SmallestBudget, an empty trace, facets and accesses out
// of range, zero sizes, non-finite or negative times, rates that are not above zero. Content that a use discards is
// dead: the facet's next use finds nothing to load, whether it says kCreate or not.
Result<Plan> MakePlan(const PlanInput& input);

// Byte-granular lower bounds (facets may be split), varying capacity, clean facets dropped without a copy. Of steps
// that keep and swap: a plan that takes up offers may move less.
Result<Bound> LowerBound(const PlanInput& input);

}  // namespace misa::policy
