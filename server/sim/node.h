// One node in virtual time: the daemon's real core and policy, with adapters, trainers, an operator and faults drawn
// from a seed. Nothing here waits, reads a clock or starts a thread; the same seed gives the same run.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "server/core/core.h"

namespace misa::server {

struct NodeOptions {
  uint64_t seed = 1;
  // Virtual seconds in which trainers come and go and faults happen. After them everything settles, then ends.
  double seconds = 1.5;
  uint32_t trainers = 6;  // at most so many come
  // Keeps what happened as text: only a run that is looked at pays for it.
  bool log = false;
  // For tests of the checks themselves: may change an event before the core has it (or an effect before it is carried
  // out), and drops it by returning false. `number` counts events (effects) of this run.
  std::function<bool(Event* event, uint64_t number)> tamper_event;
  std::function<bool(Effect* effect, uint64_t number)> tamper_effect;
};

struct NodeResult {
  std::string violation;  // "" or the first invariant that did not hold
  std::vector<std::string> log;
  uint64_t events = 0;    // that the core handled
  uint64_t steps = 0;     // training steps reported or made alone
  uint64_t sessions = 0;  // that attached
  uint64_t plans = 0;
  uint64_t restarts = 0;
  double virtual_seconds = 0;
};

NodeResult SimulateNode(const NodeOptions& options);

// What a person needs to see of a violation: the sentence, the seed, and the end of the log. Runs the seed once more.
std::string DescribeViolation(const NodeOptions& options, const NodeResult& result, size_t log_lines = 60);

}  // namespace misa::server
