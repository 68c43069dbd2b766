#include "server/sim/node.h"

#include <algorithm>

#include "server/sim/world.h"

namespace misa::server {

NodeResult SimulateNode(const NodeOptions& options) { return World(options).Run(); }

std::string DescribeViolation(const NodeOptions& options, const NodeResult& result, size_t log_lines) {
  NodeOptions again = options;
  again.log = true;
  const NodeResult replay = SimulateNode(again);
  std::string text = "seed " + std::to_string(options.seed) + ": " + result.violation + "\n";
  if (replay.violation != result.violation) {
    text += "the replay of the seed differs, which is a fault of the simulation's own: \"" + replay.violation + "\"\n";
  }
  const size_t first = replay.log.size() > log_lines ? replay.log.size() - log_lines : 0;
  for (size_t i = first; i < replay.log.size(); ++i) text += replay.log[i] + "\n";
  return text;
}

}  // namespace misa::server
