// All of misad's parts, wired together: the core in the middle, adapters around it.
#pragma once

#include <grpcpp/grpcpp.h>
#include <prometheus/exposer.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "runtime/device/cpu/disk_tier.h"
#include "runtime/device/cpu/unique_fd.h"
#include "runtime/device/lower_tier.h"
#include "server/config.h"
#include "server/grpc/admin_service.h"
#include "server/grpc/call_table.h"
#include "server/grpc/control_service.h"
#include "server/grpc/train_stream.h"
#include "server/lease/holdings.h"
#include "server/lease/lease_plane.h"
#include "server/observe/event_log.h"
#include "server/observe/metrics.h"
#include "server/predict/predictions.h"
#include "server/scheduler/clock.h"
#include "server/scheduler/scheduler.h"
#include "server/scheduler/worker.h"

namespace misa::server {

class Daemon {
 public:
  struct Options {
    Config config;
    std::string config_path;  // "" where there is none
    bool private_daemon = false;
    // Called from the scheduler's thread when a private daemon's work is done.
    std::function<void(const std::string& cause)> quit;
  };

  explicit Daemon(Options options);
  ~Daemon();

  // Everything up, or a sentence.
  std::string Start();

  // "http://HOST:PORT/metrics".
  std::string metrics_url() const;

  void Tick();
  // Reads the configuration again; what cannot change while it runs is named and stays.
  void Reload();
  void Drain(const std::string& reason);
  // Sessions that are attached now; asks the core, and gives up after a second (~0u).
  uint32_t Sessions();
  // True while the scheduler handles what it is given.
  bool Alive() const;
  // Ends the daemon's side; trainers keep what they hold.
  void Stop();

 private:
  std::string PrepareFolder();
  // The tier below the device and the link to it.
  std::string OpenDisk(CoreOptions* core);
  std::string OpenHost(CoreOptions* core);
  std::string StartServer();
  std::string StartMetrics();
  void StopMetrics();
  void Perform(Effect&& effect);
  bool AskFigures(Figures* figures);

  Options options_;
  Config& config_;
  SystemClock clock_;
  KernelRandom random_;
  UniqueFd lock_;
  std::string boot_;
  std::unique_ptr<device::LowerTier> below_;
  std::unique_ptr<EventLog> events_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<LeasePlane> leases_;
  std::unique_ptr<Holdings> holdings_;
  std::unique_ptr<CallTable> calls_;
  std::unique_ptr<TrainStreams> streams_;
  std::unique_ptr<ControlService> control_;
  std::unique_ptr<AdminService> admin_;
  std::unique_ptr<grpc::Server> server_;
  std::shared_ptr<MetricsCollector> collector_;
  std::unique_ptr<prometheus::Exposer> exposer_;
  // Apart, so that a long scrub holds up neither new sessions nor plans.
  std::unique_ptr<Worker> reserving_;
  std::unique_ptr<Worker> reclaiming_;
  std::unique_ptr<Worker> planning_;
  std::unique_ptr<Predictions> predictions_;  // the worker's alone
  std::unique_ptr<Worker> predicting_;        // null where nothing learns
  bool stopped_ = false;
};

}  // namespace misa::server
