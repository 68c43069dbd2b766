#include "server/predict/plugin.h"

#include <dlfcn.h>

#include <utility>

namespace misa::server {
namespace {

constexpr size_t kErrorBytes = 512;
constexpr char kGoesOn[] = ". Sessions go on as they are: their steps are predicted without it";

struct ErrorText {
  char text[kErrorBytes] = {};
  std::string sentence() {
    text[kErrorBytes - 1] = '\0';  // whatever a foreign library wrote
    return text;
  }
};

}  // namespace

std::unique_ptr<PredictorPlugin> PredictorPlugin::Load(const std::string& path, std::string* problem) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    *problem = "the predictor " + path + " could not be loaded (" + (why != nullptr ? why : "no reason given") + ")" +
               kGoesOn + "; install it for this torch, or set prediction.plugin to off";
    return nullptr;
  }
  const auto entry = reinterpret_cast<misa_predictor_entry>(dlsym(library, MISA_PREDICTOR_ENTRY));
  if (entry == nullptr) {
    dlclose(library);
    *problem = "the library " + path + " is no predictor: it has no " + MISA_PREDICTOR_ENTRY + kGoesOn +
               "; set prediction.plugin to one that is, or to off";
    return nullptr;
  }
  const misa_predictor_plugin_v1* api = entry(MISA_PREDICTOR_ABI_VERSION);
  if (api == nullptr || api->abi_version != MISA_PREDICTOR_ABI_VERSION) {
    const std::string theirs = api == nullptr ? "another version" : "version " + std::to_string(api->abi_version);
    dlclose(library);
    *problem = "the predictor " + path + " is made for " + theirs +
               " of misad's interface, and this misad has version " + std::to_string(MISA_PREDICTOR_ABI_VERSION) +
               kGoesOn + "; install the one that came with this misad";
    return nullptr;
  }
  if (api->struct_bytes != sizeof(misa_predictor_plugin_v1) || api->name == nullptr || api->create == nullptr ||
      api->destroy == nullptr || api->observe == nullptr || api->predict == nullptr) {
    dlclose(library);
    *problem =
        "the predictor " + path + " is damaged: its table of functions is not whole" + kGoesOn + "; install it again";
    return nullptr;
  }
  return std::unique_ptr<PredictorPlugin>(new PredictorPlugin(path, api));
}

std::unique_ptr<PredictorPlugin::Instance> PredictorPlugin::Create(uint64_t seed, std::string* problem) {
  misa_predictor_options options{};
  options.seed = seed;
  ErrorText error;
  void* instance = api_->create(&options, error.text, kErrorBytes);
  if (instance == nullptr) {
    *problem = "the predictor " + path_ + " could not be started (" + error.sentence() + ")" + kGoesOn;
    return nullptr;
  }
  return std::unique_ptr<Instance>(new Instance(api_, instance));
}

PredictorPlugin::Instance::~Instance() { api_->destroy(instance_); }

std::string PredictorPlugin::Instance::Observe(const std::vector<uint64_t>& symbols) {
  ErrorText error;
  if (api_->observe(instance_, symbols.data(), symbols.size(), error.text, kErrorBytes) == 0) return "";
  return std::string("the predictor ") + api_->name + " failed (" + error.sentence() + ")" + kGoesOn;
}

std::string PredictorPlugin::Instance::Predict(std::optional<uint64_t>* symbol) {
  ErrorText error;
  uint64_t said = 0;
  int known = 0;
  symbol->reset();
  if (api_->predict(instance_, &said, &known, error.text, kErrorBytes) != 0) {
    return std::string("the predictor ") + api_->name + " failed (" + error.sentence() + ")" + kGoesOn;
  }
  if (known != 0) *symbol = said;
  return "";
}

}  // namespace misa::server
