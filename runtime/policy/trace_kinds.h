// Periods of the kinds that caches of training state meet, made from a seed: what policies are compared on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/policy/planner.h"
#include "runtime/policy/trace.h"

namespace misa::policy {

enum class TraceKind : uint8_t {
  kZigZag,       // forward, then backward
  kThreePass,    // forward, backward, then a pass of the optimizer in forward order
  kForwardOnly,  // forward: evaluation, inference
  kPhases,       // two tasks on one trunk take turns, three steps each, then one evaluation of everything
  kMixed,        // a training step of weights, gradients and optimizer state with deferred updates, sizes mixed
};

// "zigzag", "three-pass", "forward-only", "phases", "mixed".
std::optional<TraceKind> TraceKindFromName(std::string_view name);
std::string_view NameOf(TraceKind kind);

struct TraceOptions {
  TraceKind kind = TraceKind::kZigZag;
  uint32_t units = 40;              // modules
  uint64_t unit_bytes = 1'000'000;  // of an equal unit; mixed sizes are an eighth of it up to eight times
  bool mixed_sizes = false;         // kMixed always has them
  bool writes = false;              // the last pass over a unit updates it; kMixed always writes
  uint64_t seed = 1;                // sizes and ranks; the same on every machine
};

struct GeneratedTrace {
  std::vector<uint64_t> facet_bytes;
  Trace trace;                // one second and no other tensors at each position
  std::vector<double> ranks;  // of the facets' modules: an importance rank in [0, 1], drawn, for policies that go by it
  uint64_t total_bytes = 0;
};

// Refuses less than 2 or more than 2^20 units, and units of less than 16 or more than 2^36 bytes.
Result<GeneratedTrace> GenerateTrace(const TraceOptions& options);

}  // namespace misa::policy
