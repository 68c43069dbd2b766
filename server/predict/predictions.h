// Carries out ComputePrediction: an instance of the plug-in for each session that needs one.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <utility>

#include "server/core/effect.h"
#include "server/predict/plugin.h"

namespace misa::server {

// Used by one thread. The library is loaded when the first session asks, not before: most never do, and it is large.
class Predictions {
 public:
  explicit Predictions(std::string path) : path_(std::move(path)) {}

  PredictionMade Compute(const ComputePrediction& effect);
  void Forget(LeaseId lease) { instances_.erase(lease); }

 private:
  const std::string path_;
  std::unique_ptr<PredictorPlugin> plugin_;
  std::map<LeaseId, std::unique_ptr<PredictorPlugin::Instance>> instances_;
};

// What prediction.plugin says: a file, or "" for none. `binary_directory` is misad's own.
std::string PluginPath(const std::string& setting, const std::string& binary_directory, bool private_daemon);

}  // namespace misa::server
