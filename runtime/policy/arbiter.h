// How the memory of one device is split between those who train on it. Pure: the same code decides in the daemon and in
// simulations.
//
// Everybody has a *share* by weight: memory is filled up in proportion to the weights, from the least that works to the
// most that is of use (weighted max-min fairness; Bertsekas and Gallager, Data Networks, 1992, section 6.5). From there
// bytes move to where they save more stall, and nobody is worse off for it than with all but a fortieth of its share.
// What saves nobody any stall is given out by weight all the same, up to what was asked for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/policy/planner.h"

namespace misa::policy {

// What one step is predicted to lose at a budget.
struct StallPoint {
  uint64_t budget_bytes = 0;
  double stall_seconds = 0;
  double step_seconds = 0;

  bool operator==(const StallPoint&) const = default;
};

// One row of the memory/performance influence matrix: the step planned at `points` budgets, from the smallest that
// works to the one at which everything stays. Rising in budget_bytes. The reserve of `input` is kept beside each.
Result<std::vector<StallPoint>> MeasureInfluence(const PlanInput& input, size_t points = 6);

// A session or a task that wants memory.
struct Claim {
  double weight = 1;
  uint64_t least_bytes = 0;  // below it, it does not work
  uint64_t most_bytes = 0;   // it has asked for no more
  uint64_t held_bytes = 0;   // its budget now; 0: it comes anew
  // Empty: nothing is known, and every byte is taken to be of the same use.
  std::vector<StallPoint> influence;
};

struct ArbiterOptions {
  // Of its share, how much may be taken from a claim for the good of others. What saves it no stall may go in any case.
  double most_taken = 0.025;
  // A move must save so many times what it costs.
  double least_gain = 1.25;
  // A budget that is so near to the new one stays as it is.
  double hysteresis = 0.025;
  // Budgets are multiples of it, but for a claim's own limits.
  uint64_t granule_bytes = 1;
};

// Budgets by claim. Their sum is at most `available_bytes`, each within its claim's limits. An error where the claims'
// least does not fit, or where a claim makes no sense (a weight that is not above 0, least above most).
Result<std::vector<uint64_t>> Arbitrate(const std::vector<Claim>& claims, uint64_t available_bytes,
                                        const ArbiterOptions& options = {});

// The share by weight alone, which Arbitrate begins with.
Result<std::vector<uint64_t>> WeightedShares(const std::vector<Claim>& claims, uint64_t available_bytes);

// The part of its time that a claim stalls at a budget, by its influence.
double StallShare(const Claim& claim, uint64_t budget_bytes);

}  // namespace misa::policy
