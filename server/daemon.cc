#include "server/daemon.h"

#include <fcntl.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <netinet/in.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <cstdio>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <future>
#include <utility>

#include "runtime/device/cpu/properties.h"
#include "runtime/device/emulated/compute_rate.h"
#include "runtime/device/emulated/host_tier.h"
#include "runtime/device/emulated/twin.h"
#include "runtime/memory/byte_size.h"
#include "runtime/memory/lease_protocol.h"
#include "runtime/policy/session_plan.h"
#include "server/calibration.h"
#include "server/journal.h"
#include "server/lease/process.h"
#include "server/log.h"

namespace misa::server {
namespace {

constexpr char kLockName[] = "misad.lock";
constexpr char kJournalName[] = "journal.json";
constexpr uint64_t kCalibrationFileBytes = 256ull << 20;
constexpr double kCalibrationSeconds = 1.2;
// A trainer waits for its private daemon, and soon knows the link from its own copies.
constexpr double kPrivateCalibrationSeconds = 0.3;
constexpr double kComputeSeconds = 0.3;
// Trainers on the cpu and on emulated devices compute in float32.
constexpr double kTwinElementBytes = 4;
constexpr int kMaxMessageBytes = 64 << 20;  // a trace of a million positions
constexpr double kAliveSeconds = 10;

template <typename... Fs>
struct Overloaded : Fs... {
  using Fs::operator()...;
};
template <typename... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;

std::string ReadAll(int fd) {
  char text[64] = {};
  const ssize_t got = pread(fd, text, sizeof text - 1, 0);
  return got > 0 ? std::string(text, static_cast<size_t>(got)) : "";
}

std::string Rate(double bytes_per_second) { return FormatByteSize(static_cast<uint64_t>(bytes_per_second)) + "/s"; }

std::string Rates(const policy::LinkRates& link) {
  return "loads at " + Rate(link.load) + " and unloads at " + Rate(link.unload) + "; both at once at " +
         Rate(link.duplex_load) + " and " + Rate(link.duplex_unload);
}

// What the configuration gives holds over what was measured.
void Override(const Config::Link& given, policy::LinkRates* link) {
  if (given.load_bytes_per_second > 0) link->load = given.load_bytes_per_second;
  if (given.unload_bytes_per_second > 0) link->unload = given.unload_bytes_per_second;
  if (given.duplex_load_bytes_per_second > 0) link->duplex_load = given.duplex_load_bytes_per_second;
  if (given.duplex_unload_bytes_per_second > 0) link->duplex_unload = given.duplex_unload_bytes_per_second;
}

}  // namespace

Daemon::Daemon(Options options) : options_(std::move(options)), config_(options_.config) {}

Daemon::~Daemon() { Stop(); }

std::string Daemon::PrepareFolder() {
  const std::string& folder = config_.runtime_dir;
  for (const char* name : {kLeaseSocketName, kControlSocketName}) {
    const std::string path = folder + "/" + name;
    if (path.size() >= sizeof(sockaddr_un::sun_path)) {
      return "the path " + path + " has " + std::to_string(path.size()) + " characters and a socket's path must have under " +
             std::to_string(sizeof(sockaddr_un::sun_path)) + "; set runtime_dir (or " + kRuntimeDirectoryVariable +
             ") to a shorter one";
    }
  }
  std::error_code error;
  if (!std::filesystem::exists(folder, error)) {
    std::filesystem::create_directories(folder, error);
    if (error) {
      return "the runtime folder " + folder + " could not be created (" + error.message() +
             "); create it, or set runtime_dir to a folder that misad may write to";
    }
    chmod(folder.c_str(), 0755);
  }
  const std::string lock_path = folder + "/" + kLockName;
  UniqueFd lock(open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!lock.valid()) {
    return "the lock " + lock_path + " could not be opened (" + strerror(errno) +
           "); run misad as the user that owns " + folder + ", or set runtime_dir to another folder";
  }
  // Before any socket is touched: binding would hide the first daemon's sockets from its trainers.
  if (flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
    std::string pid = ReadAll(lock.get());
    while (!pid.empty() && pid.back() == '\n') pid.pop_back();
    return "another misad (pid " + (pid.empty() ? std::string("unknown") : pid) + ") runs in " + folder +
           "; stop it first, or give this one its own runtime_dir";
  }
  const std::string text = std::to_string(getpid()) + "\n";
  if (ftruncate(lock.get(), 0) != 0 || pwrite(lock.get(), text.data(), text.size(), 0) < 0) {
    Log(Level::kWarning, "the pid could not be written to " + lock_path + " (" + strerror(errno) + ")");
  }
  lock_ = std::move(lock);
  return "";
}

std::string Daemon::OpenDisk(CoreOptions* core) {
  auto disk = std::make_unique<device::DirectDiskTier>(config_.disk.directory);
  std::string problem = disk->Open();
  if (!problem.empty()) return problem;
  core->device_kind = "cpu";
  core->device_name = device::CpuName();
  core->device_uuid = device::CpuUuid();
  core->below = disk->name();
  core->disk_capacity_bytes = config_.disk.capacity.Of(disk->FreeBytes());
  core->disk_block_bytes = disk->block_bytes();
  core->link = DefaultLink();
  if (config_.disk.calibrate && !config_.HasLink()) {
    const double seconds = options_.private_daemon ? kPrivateCalibrationSeconds : kCalibrationSeconds;
    problem = Calibrate(disk.get(), kCalibrationFileBytes, seconds, &core->link);
    if (problem.empty()) {
      Log(Level::kInfo, "the link to " + config_.disk.directory + " " + Rates(core->link));
    } else {
      Log(Level::kWarning, "the link could not be measured: " + problem +
                               ". Plans start from cautious defaults until trainers have measured it");
    }
  }
  Override(config_.link, &core->link);
  below_ = std::move(disk);
  return "";
}

std::string Daemon::OpenHost(CoreOptions* core) {
  auto host = std::make_unique<device::HostTier>(device::AvailableMemoryBytes);
  const device::Twin* twin = device::FindTwin(config_.device.twin);
  core->device_kind = "emulated";
  core->device_name = (twin != nullptr ? twin->name + " twin" : std::string("emulated device")) + " on " + device::CpuName();
  core->device_uuid = "EMULATED-" + device::CpuUuid();
  core->below = host->name();
  core->disk_capacity_bytes = config_.host.capacity.Of(device::UsableMemoryBytes());
  core->disk_block_bytes = host->block_bytes();
  double factor = config_.device.duplex_factor;
  if (factor == 0) factor = twin != nullptr ? twin->duplex_factor : 1;
  if (twin != nullptr) {
    double flops = config_.device.compute_flops;
    if (flops == 0) {
      flops = device::MeasureComputeRate(kComputeSeconds);
      char text[64];
      std::snprintf(text, sizeof text, "%.4g", flops);
      Log(Level::kInfo, "one thread here multiplies float32 matrices at " + std::string(text) +
                            " operations a second; set device.compute_flops to keep that figure over restarts");
    }
    core->link = device::TwinRates(*twin, flops, kTwinElementBytes, factor);
  } else {
    core->link.load = config_.link.load_bytes_per_second;
    core->link.unload = config_.link.unload_bytes_per_second;
  }
  Override(config_.link, &core->link);
  // A rate that was replaced takes the one beside the other direction along.
  if (config_.link.duplex_load_bytes_per_second == 0) core->link.duplex_load = factor * core->link.load;
  if (config_.link.duplex_unload_bytes_per_second == 0) core->link.duplex_unload = factor * core->link.unload;
  core->link_modelled = true;
  core->link_latency_seconds =
      config_.device.latency_seconds >= 0 ? config_.device.latency_seconds : device::kDefaultLatencySeconds;
  const std::string problem = LinkModelOptions{core->link, core->link_latency_seconds}.Check();
  if (!problem.empty()) return problem + " See device and link in misad's configuration";
  Log(Level::kInfo, "the emulated link " + Rates(core->link));
  below_ = std::move(host);
  return "";
}

std::string Daemon::Start() {
  std::string problem = PrepareFolder();
  if (!problem.empty()) return problem;
  boot_ = BootId();

  events_ = std::make_unique<EventLog>(config_.events.memory);
  problem = events_->Open(config_.events.file);
  if (!problem.empty()) return problem;

  CoreOptions core;
  core.version = MISA_VERSION;
  core.device_capacity_bytes = config_.device.capacity.Of(device::UsableMemoryBytes());
  core.chunk_bytes = config_.device.chunk_bytes;
  problem = config_.emulated() ? OpenHost(&core) : OpenDisk(&core);
  if (!problem.empty()) return problem;
  core.policy = config_.policy;
  core.max_sessions = config_.limits.sessions;
  core.module_series_limit = config_.metrics.module_series_limit;
  core.private_daemon = options_.private_daemon;

  // Who still holds memory from before.
  std::vector<JournalEntry> journal;
  problem = ReadJournalFile(config_.runtime_dir + "/" + kJournalName, boot_, &journal);
  if (!problem.empty()) Log(Level::kWarning, problem);
  std::vector<JournalEntry> orphans;
  std::vector<UniqueFd> pidfds;
  for (const JournalEntry& entry : journal) {
    // The descriptor first: a pid cannot be taken over by another process between the two looks.
    UniqueFd pidfd = OpenPidfd(entry.pid);
    if (!pidfd.valid() || HasEnded(pidfd.get()) || ProcessStartTime(entry.pid) != entry.start_time) continue;
    orphans.push_back(entry);
    pidfds.push_back(std::move(pidfd));
  }

  // Outstanding work is one operation for each lease, and a journal for each event that changes it.
  const size_t jobs = 4 * (static_cast<size_t>(config_.limits.sessions) + config_.limits.queue) + 1024;
  reserving_ = std::make_unique<Worker>(jobs);
  reclaiming_ = std::make_unique<Worker>(jobs);
  planning_ = std::make_unique<Worker>(jobs);
  scheduler_ = std::make_unique<Scheduler>(config_.limits.queue, &clock_, [this](Effect&& effect) { Perform(std::move(effect)); });
  calls_ = std::make_unique<CallTable>(scheduler_.get());
  streams_ = std::make_unique<TrainStreams>(scheduler_.get(), 2 * static_cast<size_t>(config_.limits.sessions) + 16);
  control_ = std::make_unique<ControlService>(calls_.get(), streams_.get());
  admin_ = std::make_unique<AdminService>(calls_.get(), events_.get());
  leases_ = std::make_unique<LeasePlane>(
      LeasePlane::Options{config_.runtime_dir + "/" + kLeaseSocketName, MISA_VERSION, 5,
                          2 * static_cast<size_t>(config_.limits.sessions) + 64},
      &clock_, &random_,
      LeasePlane::Callbacks{[this](LeaseOpened event) { return scheduler_->Offer(std::move(event)); },
                            [this](LeaseClosed event) { scheduler_->Deliver(std::move(event)); },
                            [this](OrphanEnded event) { scheduler_->Deliver(std::move(event)); }});
  holdings_ = std::make_unique<Holdings>(below_.get(), [this](LeaseId lease, const std::string& json, int fd) {
    return leases_->Send(lease, json, fd);
  });

  Effects first;
  Core machine(std::move(core), orphans, clock_.now(), &first);
  scheduler_->Start(std::move(machine), std::move(first));
  problem = StartMetrics();
  if (problem.empty()) problem = leases_->Start();
  if (!problem.empty()) return problem;
  for (size_t i = 0; i < orphans.size(); ++i) {
    Log(Level::kWarning, "process " + std::to_string(orphans[i].pid) + " still holds " + FormatByteSize(orphans[i].bytes) +
                             " from an earlier misad; they count as orphaned until it ends");
    leases_->WatchOrphan(orphans[i].session, std::move(pidfds[i]));
  }
  return StartServer();
}

std::string Daemon::StartServer() {
  grpc::EnableDefaultHealthCheckService(true);
  static const bool reflection = [] {
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  (void)reflection;
  const std::string path = config_.runtime_dir + "/" + kControlSocketName;
  grpc::ServerBuilder builder;
  int bound = 0;
  builder.AddListeningPort("unix:" + path, grpc::InsecureServerCredentials(), &bound);
  builder.RegisterService(control_.get());
  builder.RegisterService(admin_.get());
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetMaxSendMessageSize(kMaxMessageBytes);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // Under a narrower mode from the start, not after a moment in which everyone may connect.
  const mode_t before = umask(0117);
  server_ = builder.BuildAndStart();
  umask(before);
  if (server_ == nullptr || bound == 0) return "the control socket " + path + " could not be opened";
  return "";
}

std::string Daemon::StartMetrics() {
  collector_ = std::make_shared<MetricsCollector>([this](Figures* figures) { return AskFigures(figures); },
                                                  [this] {
                                                    ProcessFigures process;
                                                    process.version = MISA_VERSION;
                                                    process.events_dropped = events_->dropped();
                                                    process.queue_events = scheduler_->queued();
                                                    process.open_fds = CountOpenFds();
                                                    return process;
                                                  });
  try {
    exposer_ = std::make_unique<prometheus::Exposer>(config_.metrics.listen, 2);
    exposer_->RegisterCollectable(collector_);
  } catch (const std::exception& exception) {
    return "the metrics could not be served on " + config_.metrics.listen + " (" + exception.what() +
           "); is the port taken? Set metrics.listen to another one (port 0: any that is free)";
  }
  return "";
}

void Daemon::StopMetrics() {
  if (exposer_ == nullptr) return;
  // The HTTP library's accepting thread looks for its end only every two seconds, or when somebody connects.
  const std::vector<int> ports = exposer_->GetListeningPorts();
  std::future<void> ended = std::async(std::launch::async, [this] { exposer_.reset(); });
  for (int tries = 0; tries < 100 && ended.wait_for(std::chrono::milliseconds(20)) != std::future_status::ready; ++tries) {
    UniqueFd knock(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(ports.empty() ? 0 : ports.front()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    [[maybe_unused]] const int result = connect(knock.get(), reinterpret_cast<sockaddr*>(&address), sizeof address);
  }
  ended.wait();
}

std::string Daemon::metrics_url() const {
  const std::string host = config_.metrics.listen.substr(0, config_.metrics.listen.rfind(':'));
  const std::vector<int> ports = exposer_->GetListeningPorts();
  return "http://" + host + ":" + std::to_string(ports.empty() ? 0 : ports.front()) + "/metrics";
}

void Daemon::Perform(Effect&& effect) {
  // Workers have room for everything that can be under way; a refusal here is a fault, and is answered like a failure.
  const Error no_room{Code::kInternal, "misad's worker has no room; nothing was changed"};
  std::visit(
      Overloaded{
          [&](SendWelcome& e) { leases_->Welcome(e.lease, e.token); },
          [&](RefuseLease& e) { leases_->Refuse(e.lease, e.sentence); },
          [&](CloseLease& e) { leases_->Close(e.lease); },
          [&](CreateChunks& e) {
            const bool posted = reserving_->Post(
                [this, e] { scheduler_->Deliver(ChunksCreated{e.lease, holdings_->Create(e)}); });
            if (!posted) scheduler_->Deliver(ChunksCreated{e.lease, no_room});
          },
          [&](ReserveDisk& e) {
            const bool posted =
                reserving_->Post([this, e] { scheduler_->Deliver(DiskReserved{e.lease, holdings_->Reserve(e)}); });
            if (!posted) scheduler_->Deliver(DiskReserved{e.lease, no_room});
          },
          [&](Release& e) {
            const bool posted =
                reclaiming_->Post([this, e] { scheduler_->Deliver(Released{e.lease, holdings_->Release(e.lease)}); });
            if (!posted) Log(Level::kError, "an ended session's memory could not be queued for reclaiming");
          },
          [&](Reply& e) { calls_->Complete(std::move(e)); },
          [&](SendTrain& e) { streams_->Send(std::move(e)); },
          [&](ReadTrain& e) { streams_->Read(e.stream); },
          [&](FinishTrain& e) { streams_->Finish(e.stream, e.error); },
          [&](ComputePlan& e) {
            const LeaseId lease = e.lease;
            const uint64_t serial = e.serial;
            const bool posted = planning_->Post([this, e = std::move(e)] {
              policy::SessionPlan made = policy::MakeSessionPlan(e.input);
              scheduler_->Deliver(PlanMade{e.lease, e.serial, std::move(made.plan), std::move(made.bound)});
            });
            if (!posted) {
              PlanMade made{lease, serial, {}, {}};
              made.plan.error = no_room.sentence;
              scheduler_->Deliver(std::move(made));
            }
          },
          [&](ComputeInfluence& e) {
            const bool posted = planning_->Post([this, e = std::move(e)] {
              scheduler_->Deliver(InfluenceMade{e.lease, e.serial, policy::MeasureInfluence(e.input)});
            });
            if (!posted) Log(Level::kWarning, "the influence of a session's budget could not be queued for computing");
          },
          [&](WriteJournal& e) {
            const uint64_t serial = e.serial;
            const bool posted = reserving_->Post([this, e = std::move(e)] {
              const std::string problem = WriteJournalFile(config_.runtime_dir + "/" + kJournalName, boot_, e.entries);
              if (!problem.empty()) Log(Level::kWarning, problem);
              if (e.serial != 0) scheduler_->Deliver(JournalWritten{e.serial});
            });
            if (posted) return;
            Log(Level::kWarning, "the journal could not be queued for writing");
            if (serial != 0) scheduler_->Deliver(JournalWritten{serial});
          },
          [&](EmitEvent& e) { events_->Append(e.event); },
          [&](LogLine& e) { Log(e.level, e.sentence); },
          [&](SetServing& e) {
            if (server_ != nullptr) server_->GetHealthCheckService()->SetServingStatus(e.serving);
          },
          [&](Quit& e) {
            if (options_.quit) options_.quit(e.cause);
          },
      },
      effect);
}

void Daemon::Tick() { scheduler_->Offer(server::Tick{}); }

bool Daemon::Alive() const {
  return clock_.now().monotonic_seconds - scheduler_->last_handled_seconds() < kAliveSeconds;
}

bool Daemon::AskFigures(Figures* figures) {
  // Shared with the answer, which may come after this call has given up.
  auto promise = std::make_shared<std::promise<std::pair<bool, Figures>>>();
  std::future<std::pair<bool, Figures>> future = promise->get_future();
  calls_->Start(
      [promise](const Error& error, Response&& response) {
        Figures* answer = std::get_if<Figures>(&response);
        const bool ok = error.ok() && answer != nullptr;
        promise->set_value({ok, ok ? std::move(*answer) : Figures{}});
      },
      [](CallId call) { return Event(MetricsCall{call}); });
  if (future.wait_for(std::chrono::seconds(1)) != std::future_status::ready) return false;
  std::pair<bool, Figures> answer = future.get();
  if (answer.first) *figures = std::move(answer.second);
  return answer.first;
}

uint32_t Daemon::Sessions() {
  Figures figures;
  return AskFigures(&figures) ? figures.sessions : ~0u;
}

void Daemon::Drain(const std::string& reason) { scheduler_->Deliver(DrainRequested{reason}); }

void Daemon::Reload() {
  if (options_.config_path.empty()) {
    Log(Level::kWarning, "misad runs without a configuration file: there is nothing to reload");
    const std::string problem = events_->Open(config_.events.file);
    if (!problem.empty()) Log(Level::kWarning, problem);
    return;
  }
  Config fresh;
  const std::vector<std::string> errors = LoadConfig(options_.config_path, &fresh);
  for (const std::string& error : errors) Log(Level::kError, error);
  if (!errors.empty()) {
    Log(Level::kError, "the configuration was not reloaded: the one from before stays in force");
    return;
  }
  // What was given on the command line holds over the file's.
  fresh.runtime_dir = config_.runtime_dir;
  std::string note = options_.config_path;
  for (const std::string& key : RestartKeys(config_, fresh)) {
    Log(Level::kWarning, "a change of " + key + " needs a restart of misad and is ignored until then");
    note += "; " + key + " needs a restart";
  }
  // Also where the name is the same: the file was moved away by a rotation.
  const std::string problem = events_->Open(fresh.events.file);
  if (problem.empty()) {
    config_.events.file = fresh.events.file;
  } else {
    Log(Level::kWarning, problem);
  }
  config_.policy = fresh.policy;
  scheduler_->Deliver(PolicyReloaded{fresh.policy, note});
  Log(Level::kInfo, "the configuration was reloaded from " + options_.config_path);
}

void Daemon::Stop() {
  if (stopped_) return;
  stopped_ = true;
  // From the outside in: nobody may enter any more, then what is under way ends, then the core, then its helpers.
  if (calls_ != nullptr) calls_->Close();
  if (streams_ != nullptr) streams_->Close();
  if (admin_ != nullptr) admin_->Close();
  // Every call was just answered; what is left is a good-bye that an idle client may never acknowledge.
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(300));
  StopMetrics();
  if (leases_ != nullptr) leases_->Stop();
  if (scheduler_ != nullptr) scheduler_->Stop();
  if (reserving_ != nullptr) reserving_->Stop();
  if (reclaiming_ != nullptr) reclaiming_->Stop();
  if (planning_ != nullptr) planning_->Stop();
  if (events_ != nullptr) events_->Stop();
  if (server_ != nullptr) unlink((config_.runtime_dir + "/" + kControlSocketName).c_str());
  // server_ is destroyed with the rest; the lock goes last, when no socket of ours is left.
}

}  // namespace misa::server
