// misad's configuration: strict, so that a misspelt key never passes as a default.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/policy/planner.h"
#include "server/core/event.h"

namespace misa::server {

// A size in bytes, or a share of what there is.
struct Amount {
  uint64_t bytes = 0;
  double share = 0;  // in (0, 1]; 0: `bytes` holds
  uint64_t Of(uint64_t total) const;

  bool operator==(const Amount&) const = default;
};

struct Config {
  std::string runtime_dir;  // $MISA_RUNTIME_DIR, else /run/misa
  struct Device {
    std::string kind = "cpu";  // or "emulated"
    Amount capacity{0, 0.5};
    uint64_t chunk_bytes = 64 << 10;
    // Of an emulated device; a rate given under `link` holds over the twin's.
    std::string twin;            // "": all rates are given under `link`
    double compute_flops = 0;    // what a twin's rate is a part of; 0: measured at the start
    double duplex_factor = 0;    // 0: the twin's, or 1
    double latency_seconds = -1; // below 0: the default
    bool operator==(const Device&) const = default;
  } device;
  struct Disk {
    std::string directory = "/var/lib/misa";
    Amount capacity{0, 0.8};
    bool calibrate = true;
    bool operator==(const Disk&) const = default;
  } disk;
  // The tier below an emulated device.
  struct Host {
    Amount capacity{0, 0.5};
    bool operator==(const Host&) const = default;
  } host;
  // Rates that replace measured ones, or make up an emulated device's link; 0: measured, or the twin's.
  struct Link {
    double load_bytes_per_second = 0;
    double unload_bytes_per_second = 0;
    double duplex_load_bytes_per_second = 0;
    double duplex_unload_bytes_per_second = 0;
    bool operator==(const Link&) const = default;
  } link;
  struct Metrics {
    std::string listen = "127.0.0.1:9465";
    bool allow_remote = false;
    uint32_t module_series_limit = 90;
    bool operator==(const Metrics&) const = default;
  } metrics;
  struct Events {
    std::string file;  // "": memory only
    uint32_t memory = 4096;
    bool operator==(const Events&) const = default;
  } events;
  PolicyOptions policy;
  // How a session's next step is predicted.
  struct Prediction {
    uint32_t window = 64;
    uint32_t order = 4;
    std::string plugin = "auto";  // of the predictor that learns: "auto", "off", or its file
    bool operator==(const Prediction&) const = default;
  } prediction;
  struct Limits {
    uint32_t sessions = 64;
    uint32_t queue = 1024;
    bool operator==(const Limits&) const = default;
  } limits;

  bool emulated() const { return device.kind == "emulated"; }
  // All four given: nothing is left to measure.
  bool HasLink() const;
};

// Reads `text`; `name` is the file's name for sentences. Every mistake gives one sentence that starts with
// "FILE:LINE:COLUMN: ". Empty: *config holds.
std::vector<std::string> ParseConfig(const std::string& text, const std::string& name, Config* config);

// Reads a file; "" gives the defaults.
std::vector<std::string> LoadConfig(const std::string& path, Config* config);

// The keys whose change needs a restart and that differ.
std::vector<std::string> RestartKeys(const Config& before, const Config& after);

}  // namespace misa::server
