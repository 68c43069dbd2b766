// What cache policies load and unload a period when a step's period repeats: the known replacement policies on demand,
// the planner, and the exact optimum. Transfers take no time here; only bytes count.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "runtime/policy/planner.h"
#include "runtime/policy/trace.h"

namespace misa::policy {

enum class CachePolicy : uint8_t {
  kLru,           // the facet used longest ago goes
  kLruThreshold,  // cold modules go first, hot ones last, of equals the one used longest ago
  kBelady,        // the facet whose next use is farthest goes (IBM Systems Journal 5, 1966), until there is room
  kPlanner,       // MakePlan, on a link that is never short
  kOptimum,       // FindOptimum (optimum.h): small cases only
};

// "lru", "lru-threshold", "belady", "planner", "optimum".
std::optional<CachePolicy> CachePolicyFromName(std::string_view name);
std::string_view NameOf(CachePolicy policy);

struct CacheQuestion {
  std::vector<uint64_t> facet_bytes;
  Trace trace;  // one period; its times do not count, its other tensors take room
  uint64_t capacity_bytes = 0;
  CachePolicy policy = CachePolicy::kLru;
  // Periods to go through at most, from an empty device; policies that come back to a state end sooner.
  uint32_t most_periods = 400;
  // kPlanner: periods that a plan's cycle may have.
  uint32_t most_cycle_periods = 64;
  // kLruThreshold: importance rank of each facet's module in [0, 1] (none: all warm), and the seed's thresholds.
  std::vector<double> ranks;
  double hot = 0.75;
  double cold = 0.35;
};

struct CachePeriod {
  uint64_t misses = 0;  // loads
  uint64_t loaded_bytes = 0;
  uint64_t unloaded_bytes = 0;  // dirty content that had to leave; clean content goes without a copy

  bool operator==(const CachePeriod&) const = default;
};

struct CacheAnswer {
  // Every period from the cold one on; kOptimum tells only of its cycle's sum.
  std::vector<CachePeriod> periods;
  // The steady state: the mean over the last `cycle_periods`, after which everything repeats (`repeats`), or over the
  // second half of the periods where nothing did.
  bool repeats = false;
  uint32_t cycle_periods = 0;
  double misses_per_period = 0;
  double loaded_bytes_per_period = 0;
  double unloaded_bytes_per_period = 0;
};

// The planner's input of a question: one second a position and a link that moves everything in a thousandth of it.
PlanInput CacheInput(const CacheQuestion& question);

// Refuses what MakePlan refuses, no periods, and ranks or thresholds outside [0, 1].
Result<CacheAnswer> AskCache(const CacheQuestion& question);

// The bytes of a plan made elsewhere, which must keep to the capacity; a sentence where it does not.
Result<CacheAnswer> AskCache(const CacheQuestion& question, const Plan& plan);

}  // namespace misa::policy
