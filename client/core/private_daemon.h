// A daemon of this trainer's own, for where the node has none: started with a configuration in a temporary directory,
// ended with the trainer.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "runtime/policy/planner.h"

namespace misa {

// An emulated device for a private daemon; what is 0 or empty is the daemon's default.
struct EmulatedDevice {
  std::string twin;  // "": rates.load and rates.unload are given
  double compute_flops = 0;
  policy::LinkRates rates;
  double duplex_factor = 0;
  double latency_seconds = -1;  // below 0: the default
};

struct PrivateDaemonOptions {
  std::string binary;          // "": $MISA_DAEMON, else misad on PATH
  std::string disk_directory;  // "": $MISA_DISK_DIR, else /var/tmp
  uint64_t capacity_bytes = 0;
  uint64_t chunk_bytes = 0;    // 0: the daemon's default
  std::optional<EmulatedDevice> emulated;  // none: the cpu device
  double deadline_seconds = 30;
};

class PrivateDaemon {
 public:
  ~PrivateDaemon();
  // Null and a sentence where it does not become ready in time; the daemon's own last words are part of it.
  static std::unique_ptr<PrivateDaemon> Start(const PrivateDaemonOptions& options, std::string* error);

  const std::string& runtime_directory() const { return directory_; }
  int32_t pid() const { return pid_; }
  // Ends it (SIGTERM, then SIGKILL) and removes its directory. Idempotent.
  void Stop();

 private:
  PrivateDaemon() = default;
  std::string directory_;
  int32_t pid_ = 0;
  int32_t owner_ = 0;  // the process that started it; a forked child leaves it alone
};

}  // namespace misa
