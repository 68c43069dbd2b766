#include "server/predict/predictions.h"

#include <unistd.h>

namespace misa::server {
namespace {

constexpr char kPluginName[] = "libmisa_lstm_predictor.so";

}  // namespace

PredictionMade Predictions::Compute(const ComputePrediction& effect) {
  PredictionMade made{effect.lease, effect.observed, {}, {}};
  if (plugin_ == nullptr) plugin_ = PredictorPlugin::Load(path_, &made.problem);
  if (plugin_ == nullptr) return made;
  std::unique_ptr<PredictorPlugin::Instance>& instance = instances_[effect.lease];
  // The same seed for each: a session is predicted alike whoever came before it.
  if (instance == nullptr) instance = plugin_->Create(1, &made.problem);
  if (instance != nullptr) made.problem = instance->Observe(effect.digests);
  if (made.problem.empty()) made.problem = instance->Predict(&made.digest);
  if (!made.problem.empty()) instances_.erase(effect.lease);
  return made;
}

std::string PluginPath(const std::string& setting, const std::string& binary_directory, bool private_daemon) {
  if (setting == "off") return "";
  if (setting != "auto") return setting;
  // A private daemon may share its trainer's memory limit, and the library takes more than all else in misad.
  if (private_daemon) return "";
  const std::string path = binary_directory + "/" + kPluginName;
  return access(path.c_str(), R_OK) == 0 ? path : "";
}

}  // namespace misa::server
