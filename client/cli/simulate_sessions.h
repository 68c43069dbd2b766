// misactl simulate sessions: whole nodes in virtual time, one a seed. No daemon is asked.
#pragma once

#include <cstdint>

#include "client/cli/commands.h"

namespace CLI {
class App;
}

namespace misa::cli {

struct SimulateSessionsOptions {
  uint64_t seed = 1;      // the first one
  uint64_t seeds = 1000;  // how many
  uint64_t steps = 0;     // ends once so many training steps were simulated; 0: not before the seeds are done
  uint32_t trainers = 6;  // at most, of one node
  double seconds = 1.5;   // virtual, of one node, before everything settles
  bool log = false;       // everything that happens in the first seed
};

// The subcommand `sessions` of `simulate`.
CLI::App* AddSimulateSessions(CLI::App* simulate, SimulateSessionsOptions* options);

// Stops at the first violated invariant, prints its seed and the end of its log, and gives kExitRefused.
ExitCode SimulateSessions(const SimulateSessionsOptions& options, const Output& output);

}  // namespace misa::cli
