// A trainer's side of the three planes: the lease socket, the control plane, and a private daemon where none runs.
// No protobuf or gRPC header is included here, so that files with torch headers can include it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/core/executor.h"
#include "client/core/private_daemon.h"
#include "runtime/policy/importance.h"
#include "runtime/policy/planner.h"
#include "runtime/policy/sampler.h"
#include "runtime/trace/trace_file.h"

namespace misa {

enum class Mode : uint8_t { kExact = 1, kSampled = 2 };
// kAuto: the node's daemon, else a private one, and the log says so. kRequired: the node's or an error. kPrivate: always
// one of its own.
enum class DaemonChoice : uint8_t { kAuto, kRequired, kPrivate };

struct SessionOptions {
  std::string runtime_directory;  // "": MISA_RUNTIME_DIR or /run/misa
  DaemonChoice daemon = DaemonChoice::kAuto;
  std::string job;
  uint64_t budget_bytes = 0;
  // The daemon chooses the budget between least_bytes and most_bytes (0: whatever the pool has), and changes it as others
  // come and go; budget_bytes has no meaning then.
  bool elastic = false;
  uint64_t least_bytes = 0;
  uint64_t most_bytes = 0;
  double weight = 1;  // beside others that share the device
  Mode mode = Mode::kExact;
  policy::SamplerOptions sampling;
  // For a private daemon: its binary ("": $MISA_DAEMON, else found on PATH) and the directory of its disk tier.
  std::string daemon_binary;
  std::string disk_directory;
  uint64_t chunk_bytes = 0;  // for a private daemon; 0: the daemon's default
  std::optional<EmulatedDevice> emulated;  // for a private daemon; none: the cpu device
  double deadline_seconds = 30;
};

struct SessionInfo {
  std::string session;
  uint64_t budget_bytes = 0;  // at first
  uint64_t chunks_bytes = 0;  // what the chunks' memfd holds: the most that a budget can become
  uint64_t chunk_bytes = 0;
  uint32_t block_bytes = 4096;
  std::string device_kind;
  std::string device_name;
  std::string device_uuid;
  uint64_t device_capacity_bytes = 0;
  policy::LinkRates link;
  std::string below = "disk";  // the tier below the device: "disk" or "host"
  bool link_modelled = false;  // copies keep to `link` and this latency
  double link_latency_seconds = 0;
  bool private_daemon = false;
  int32_t daemon_pid = 0;  // of a private daemon
  std::string runtime_directory;
};

struct ModuleDescription {
  std::string name;
  std::string kind;
  uint64_t parameter_count = 0;
  bool samplable = false;
  struct FacetDescription {
    uint32_t id = 0;
    FacetKind kind = FacetKind::kWeights;
    uint64_t device_bytes = 0;
  };
  std::vector<FacetDescription> facets;
  bool pinned = false;  // stays on the device as far as the budget allows
};

struct ModuleStatistics {
  uint32_t module = 0;
  policy::GradientStatistics statistics;
};

struct StepReport {
  StepSummary summary;
  std::vector<ModuleStatistics> statistics;
  std::vector<FacetState> states;
  uint64_t round = 0;
  std::vector<uint32_t> active_modules;
  uint64_t sampler_digest = 0;
  uint32_t counted_steps = 1;   // inner steps of the round that this step counts as
  bool sampling_waits = false;  // everything was trained, and the sampler stood still
  std::optional<double> loss;
  uint64_t rows = 0;  // of the batch; 0: not known
  std::string problem;
  uint64_t device_bytes = 0;
  uint64_t pool_backed_bytes = 0;
  uint64_t budget_serial = 0;  // of the change that was in force in the whole step
  bool send_trace = false;
  std::vector<trace::Section> mode_traces;  // periods inside this step, to be sent
  std::string task;                         // that this step belongs to; "": none
  double task_weight = 1;
};

struct OfferedPlan {
  std::shared_ptr<const policy::Plan> plan;
  uint64_t version = 0;
  uint64_t trace_digest = 0;
  policy::Bound bound;
};

class Session {
 public:
  virtual ~Session() = default;

  // Finds or starts a daemon and attaches. Null and a sentence in *error on failure; nothing is left behind then.
  static std::unique_ptr<Session> Open(const SessionOptions& options, std::string* error);

  virtual const SessionInfo& info() const = 0;
  // The memfd of the session's chunks; the caller owns it. Once.
  virtual int TakeChunks() = 0;
  // Reserves disk_bytes in all and names the modules. On the first success *disk_fd is the session's file below, which the
  // caller owns; -1 later. A sentence on failure; what was reserved before stays.
  virtual std::string Register(const std::vector<ModuleDescription>& modules, uint64_t disk_bytes, int* disk_fd) = 0;
  // Where this trainer goes on with an earlier run's sampler: its state (ModuleSampler::Serialize), so that the daemon's
  // mirror goes on from there too. A sentence where the daemon does not take it; without one alive "" and nothing.
  virtual std::string ResumeSampler(const std::string& state) = 0;
  // Starts the stream. The callbacks run on a thread of the session; on_plan returns "" or why it refused.
  virtual void StartTraining(std::function<std::string(const OfferedPlan&)> on_plan,
                             std::function<void(uint64_t budget_bytes, uint64_t serial)> on_budget,
                             std::function<void(const std::string&)> on_notice) = 0;
  // Never blocks: where the daemon does not keep up or is gone, the oldest reports are dropped.
  virtual void Report(StepReport report) = 0;
  // A step needs so much at once; the answer comes as a budget. Any thread.
  virtual void AskForBudget(uint64_t bytes) = 0;
  virtual bool daemon_alive() const = 0;
  // A clean end; also ends a private daemon. Idempotent, bounded in time.
  virtual void Close() = 0;
  // In a forked child: forgets the session without a word to the daemon.
  virtual void ForgetInChild() = 0;
};

}  // namespace misa
