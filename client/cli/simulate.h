// misactl simulate: what cache policies load and unload a period, on traces made from a seed or recorded in a file.
// Asks no daemon.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "client/cli/commands.h"

namespace misa::cli {

struct SimulateOptions {
  std::string trace = "zigzag";  // a kind's name, or a trace file
  std::string mode = "train";    // of a file: the period looked at
  std::string policy = "all";    // a policy's name, or all of them
  uint32_t units = 40;
  std::optional<double> capacity;  // in units, of mixed sizes in units of mean size; none: 38
  std::string budget;              // of a file: room in bytes, in place of its session's
  uint64_t unit_bytes = 1'000'000;
  bool mixed_sizes = false;
  bool writes = false;
  uint32_t periods = 400;  // at most
  uint64_t seed = 1;
};

ExitCode Simulate(const SimulateOptions& options, const Output& output);

}  // namespace misa::cli
