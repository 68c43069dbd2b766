// The core's figures at one moment, for /metrics. Plain numbers: the exposition is made outside the core.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace misa::server {

// Upper bounds of the step-time histogram, in seconds: 10, 50, 100, 300 µs, then 1 and 3 of each decade up to 100 s.
inline constexpr std::array<double, 15> kStepSecondsBuckets = {10e-6, 50e-6, 100e-6, 300e-6, 1e-3, 3e-3, 10e-3, 30e-3,
                                                               100e-3, 300e-3, 1,     3,      10,   30,   100};

struct PoolFigures {
  uint64_t free = 0;
  uint64_t leased = 0;
  uint64_t reclaiming = 0;
  uint64_t orphaned = 0;
};

// What has been counted since the daemon started; survives the sessions it came from.
struct Totals {
  uint64_t demand_loads = 0;
  uint64_t prefetch_loads = 0;
  uint64_t demand_loaded_bytes = 0;
  uint64_t prefetch_loaded_bytes = 0;
  uint64_t unloads = 0;
  uint64_t unloaded_bytes = 0;
  uint64_t prefetch_hits = 0;
  uint64_t departures = 0;
  uint64_t steps = 0;
  double stall_seconds = 0;
  double step_seconds_sum = 0;
  std::array<uint64_t, kStepSecondsBuckets.size() + 1> step_seconds_counts{};  // the last one is +Inf
  std::map<std::string, uint64_t> events;
};

struct SessionFigures {
  uint32_t slot = 0;  // a small number that is used again: bounds the series
  double bound_step_seconds = 0;
  uint64_t plan_version = 0;
  uint64_t budget_bytes = 0;
  uint64_t leased_bytes = 0;
  double weight = 1;
  uint64_t tasks = 0;  // that the trainer has named
};

struct ModuleFigure {
  uint32_t slot = 0;
  std::string module;
  double importance = 0;
};

struct Figures {
  PoolFigures device;
  std::string below = "disk";  // the tier that `disk` is
  PoolFigures disk;
  uint32_t sessions = 0;
  uint32_t orphans = 0;
  Totals totals;
  // By facet kind (weights, gradients, optimizer) and residency (the enum's number).
  std::array<std::array<uint64_t, 8>, 3> facets{};
  std::array<uint64_t, 8> facet_bytes{};
  std::vector<SessionFigures> session_figures;
  std::vector<ModuleFigure> modules;  // largest importance first
};

}  // namespace misa::server
