// A predictor out of a shared library (runtime/predict/plugin_abi.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/predict/plugin_abi.h"

namespace misa::server {

// The library, loaded; it stays loaded until the process ends, because what it depends on may not be loaded twice.
class PredictorPlugin {
 public:
  // One session's.
  class Instance {
   public:
    ~Instance();
    // "" or a sentence; the instance is of no use after one.
    std::string Observe(const std::vector<uint64_t>& symbols);
    std::string Predict(std::optional<uint64_t>* symbol);

   private:
    friend class PredictorPlugin;
    Instance(const misa_predictor_plugin_v1* api, void* instance) : api_(api), instance_(instance) {}
    const misa_predictor_plugin_v1* const api_;
    void* const instance_;
  };

  // Null and a sentence where the file is missing, is no such library, or is of another version.
  static std::unique_ptr<PredictorPlugin> Load(const std::string& path, std::string* problem);

  std::unique_ptr<Instance> Create(uint64_t seed, std::string* problem);
  std::string name() const { return api_->name; }

 private:
  PredictorPlugin(std::string path, const misa_predictor_plugin_v1* api) : path_(std::move(path)), api_(api) {}

  const std::string path_;
  const misa_predictor_plugin_v1* const api_;
};

}  // namespace misa::server
