// How long a plan takes: training steps of many modules on a disk's rates, one JSON object a line.
//
//   policy_speed [MODULES [REPEATS]]
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "runtime/policy/planner.h"
#include "tests/unit/runtime/policy/workloads.h"

namespace {

using namespace misa::policy;

void Measure(const std::string& name, const PlanInput& input, uint32_t modules, int repeats) {
  std::vector<double> seconds;
  Result<Plan> plan;
  for (int i = 0; i < repeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    plan = MakePlan(input);
    seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(seconds.begin(), seconds.end());
  const Bound bound = LowerBound(input).value;
  nlohmann::ordered_json row;
  row["case"] = name;
  row["modules"] = modules;
  row["facets"] = input.facet_bytes.size();
  row["positions"] = input.trace.entries.size();
  row["repeats"] = repeats;
  row["plan_seconds_median"] = seconds[seconds.size() / 2];
  row["plan_seconds_least"] = seconds.front();
  row["plan_seconds_most"] = seconds.back();
  row["step_over_bound"] = plan.value.step_seconds / bound.step_seconds;
  row["moved_over_bound"] = static_cast<double>(plan.value.loaded_bytes + plan.value.unloaded_bytes) /
                            static_cast<double>(bound.load_bytes + bound.unload_bytes);
  std::cout << row.dump() << "\n";
}

}  // namespace

int main(int argc, char** argv) {
  const int modules = argc > 1 ? std::atoi(argv[1]) : 1000;
  const int repeats = argc > 2 ? std::atoi(argv[2]) : 21;
  if (modules < 1 || modules > 100'000 || repeats < 1) {
    std::cerr << "policy_speed: there must be 1 to 100000 modules and at least 1 repeat.\n";
    return 2;
  }
  TrainingStep step;
  step.weight_bytes = step.weight_bytes * step.matrices / static_cast<uint64_t>(modules);
  step.matrices = static_cast<uint32_t>(modules);
  Measure("deferred updates", Deferred(step), step.matrices, repeats);
  Measure("updates in backward", InBackward(step), step.matrices, repeats);
  Measure("eager updates", Eager(step), step.matrices, repeats);
  return 0;
}
