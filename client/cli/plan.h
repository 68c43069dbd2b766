// misactl plan: will a training fit, in which mode, and how fast. Asks no daemon.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "client/cli/commands.h"
#include "nlohmann/json.hpp"
#include "runtime/capacity/predict.h"

namespace misa::cli {

// As they were typed.
struct PlanOptions {
  std::string model;        // a known name or a config.json
  std::string device;       // a known name
  std::string device_file;  // instead of it
  std::string optimizer = "adamw";
  std::string precision = "bf16-mixed";
  uint64_t batch = 1;
  std::optional<uint64_t> sequence;
  std::optional<uint64_t> micro_batch;  // none: the whole batch at once
  std::string checkpointing = "none";  // or "full"
  std::string attention = "fused";     // or "unfused"
  std::string budget;       // "": what the device has
  std::string mode;         // "": all of them
  std::string step;         // "": deferred, and in_backward beside it
  std::optional<double> delta;
  std::optional<double> utilization;
  std::string host_memory;
};

// One line of the answer: a mode, and what it comes to.
struct PlannedMode {
  capacity::Training training;
  capacity::Prediction prediction;
};
struct PlanAnswer {
  capacity::Model model;
  capacity::DeviceProfile device;
  capacity::StateBytes state;   // with every parameter trained
  std::vector<PlannedMode> modes;
};

// A sentence for what is unknown, impossible or contradicts itself.
policy::Result<PlanAnswer> MakePlanAnswer(const PlanOptions& options);

std::string PlanText(const PlanAnswer& answer, bool color);
nlohmann::json PlanJson(const PlanAnswer& answer);

ExitCode Plan(const Output& output, const PlanOptions& options);

}  // namespace misa::cli
