#include "client/core/session.h"

#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <utility>
#include <deque>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "client/core/private_daemon.h"
#include "misa/v1/control.grpc.pb.h"
#include "runtime/memory/byte_size.h"
#include "runtime/memory/lease_protocol.h"

namespace misa {
namespace {

using nlohmann::json;
using std::chrono::duration;
using Clock = std::chrono::steady_clock;

constexpr char kVersion[] = "0.1.0";
constexpr size_t kMaxReports = 64;
constexpr double kDetachSeconds = 2;

uint64_t StartTime() {
  // Field 22 of /proc/self/stat; the command in field 2 may hold spaces, so count from its closing parenthesis.
  std::ifstream in("/proc/self/stat");
  std::string line((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const size_t close = line.rfind(')');
  if (close == std::string::npos) return 0;
  std::istringstream rest(line.substr(close + 2));
  std::string field;
  for (int i = 3; i <= 22; ++i) rest >> field;
  return std::strtoull(field.c_str(), nullptr, 10);
}

std::string CommandLine() {
  std::ifstream in("/proc/self/cmdline");
  std::string line((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  for (char& c : line) {
    if (c == '\0') c = ' ';
  }
  return line.substr(0, 200);
}

// One end of the lease socket.
class Lease {
 public:
  ~Lease() { Close(); }
  void Close() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
    for (auto& [type, fd] : fds_) close(fd);
    fds_.clear();
  }

  // kNoDaemon in *absent where nobody listens.
  std::string Connect(const std::string& directory, double seconds, bool* absent) {
    *absent = false;
    const std::string path = directory + "/" + kLeaseSocketName;
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof(address.sun_path)) {
      return "The socket path " + path + " is longer than " + std::to_string(sizeof(address.sun_path) - 1) +
             " characters: choose a shorter runtime directory.";
    }
    std::strcpy(address.sun_path, path.c_str());
    fd_ = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd_ < 0) return std::string("No socket could be made (") + std::strerror(errno) + ").";
    SetTimeout(seconds);
    if (connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
      const int code = errno;
      *absent = code == ENOENT || code == ECONNREFUSED;
      return *absent ? "No misad listens on " + path + "."
                     : "misad's socket " + path + " cannot be reached (" + std::strerror(code) +
                           "): the user who trains needs access to it.";
    }
    const std::string hello =
        json{{"type", "hello"}, {"protocol", kProtocolVersion}, {"client_version", kVersion}, {"start_time", StartTime()}}
            .dump();
    if (send(fd_, hello.data(), hello.size(), MSG_NOSIGNAL) < 0) {
      return std::string("misad did not take the greeting (") + std::strerror(errno) + ").";
    }
    json answer;
    std::string error = Receive(&answer);
    if (!error.empty()) return error;
    if (answer.value("type", "") == "refused") return "misad refuses: " + answer.value("error", "no reason given");
    token_ = answer.value("token", "");
    if (answer.value("type", "") != "welcome" || token_.empty()) return "misad answered the greeting with something else.";
    return "";
  }

  // The file descriptor that travels with a packet of this type.
  std::string TakeFd(const std::string& type, int* fd) {
    while (fds_.find(type) == fds_.end()) {
      json packet;
      std::string error = Receive(&packet);
      if (!error.empty()) return error;
    }
    *fd = fds_[type];
    fds_.erase(type);
    return "";
  }

  const std::string& token() const { return token_; }
  int fd() const { return fd_; }

 private:
  void SetTimeout(double seconds) {
    timeval time{static_cast<time_t>(seconds), static_cast<suseconds_t>((seconds - static_cast<time_t>(seconds)) * 1e6)};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time));
    setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof(time));
  }

  std::string Receive(json* packet) {
    char buffer[kMaxLeasePacketBytes];
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 4)];
    iovec io{buffer, sizeof(buffer)};
    msghdr message{};
    message.msg_iov = &io;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    ssize_t got;
    do {
      got = recvmsg(fd_, &message, MSG_CMSG_CLOEXEC);
    } while (got < 0 && errno == EINTR);
    if (got == 0) return "misad closed the lease socket: it has ended or refused this trainer; see its log.";
    if (got < 0) return std::string("misad did not answer on the lease socket (") + std::strerror(errno) + ").";
    int received = -1;
    for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
      if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
      std::memcpy(&received, CMSG_DATA(c), sizeof(int));
    }
    *packet = json::parse(buffer, buffer + got, nullptr, /*allow_exceptions=*/false);
    if (packet->is_discarded() || !packet->is_object()) {
      if (received >= 0) close(received);
      return "misad sent something that is not a lease packet.";
    }
    if (message.msg_flags & MSG_CTRUNC) return "The file descriptors misad sent did not all arrive: raise RLIMIT_NOFILE.";
    if (received >= 0) fds_[packet->value("type", "")] = received;
    return "";
  }

  int fd_ = -1;
  std::string token_;
  std::map<std::string, int> fds_;
};

v1::Residency ToProto(FacetState state, bool host) {
  switch (state) {
    case FacetState::kEmpty: return v1::RESIDENCY_EMPTY;
    case FacetState::kAway: return host ? v1::RESIDENCY_HOST : v1::RESIDENCY_DISK;
    case FacetState::kLoading: return v1::RESIDENCY_LOADING;
    case FacetState::kReady:
    case FacetState::kDevice: return v1::RESIDENCY_DEVICE;
    case FacetState::kUnloading: return v1::RESIDENCY_UNLOADING;
  }
  return v1::RESIDENCY_UNSPECIFIED;
}

void Fill(v1::SamplingOptions* out, const policy::SamplerOptions& in) {
  out->set_delta(in.delta);
  out->set_eta(in.eta);
  out->set_alpha(in.alpha);
  out->set_inner_steps(in.inner_steps);
  out->set_seed(in.seed);
  for (const guard::Dependency& dependency : in.dependencies) {
    v1::ModuleDependency* item = out->add_dependencies();
    item->set_module(dependency.module);
    item->set_kind(static_cast<v1::DependencyKind>(dependency.kind));
    item->set_other(dependency.other);
  }
}

void Fill(v1::Trace* out, const policy::Trace& in, uint64_t digest) {
  out->set_digest(digest);
  for (const policy::TraceEntry& entry : in.entries) {
    v1::TraceEntry* e = out->add_entries();
    e->set_compute_seconds(entry.compute_seconds);
    e->set_other_bytes(entry.other_bytes);
    for (const policy::Use& use : entry.uses) {
      e->add_facets(use.facet);
      e->add_access(use.access);
    }
  }
}

policy::LinkRates FromProto(const v1::LinkRates& in) {
  return {in.load_bytes_per_second(), in.unload_bytes_per_second(), in.duplex_load_bytes_per_second(),
          in.duplex_unload_bytes_per_second()};
}

class GrpcSession final : public Session {
 public:
  ~GrpcSession() override { Close(); }

  std::string Start(const SessionOptions& options) {
    options_ = options;
    std::string directory = options.runtime_directory;
    if (directory.empty()) {
      const char* variable = std::getenv(kRuntimeDirectoryVariable);
      directory = variable != nullptr && *variable != '\0' ? variable : kDefaultRuntimeDirectory;
    }
    bool absent = true;
    std::string error;
    if (options.daemon != DaemonChoice::kPrivate) {
      error = lease_.Connect(directory, options.deadline_seconds, &absent);
      if (error.empty()) return Attach(directory);
      if (options.daemon == DaemonChoice::kRequired || !absent) {
        return error + (absent ? " A daemon is required here: start one (systemctl start misad, or misad by hand), or "
                                 "let misa start a private one with daemon=\"auto\"."
                               : "");
      }
      lease_.Close();
    }
    PrivateDaemonOptions daemon;
    daemon.binary = options.daemon_binary;
    daemon.disk_directory = options.disk_directory;
    daemon.capacity_bytes = options.budget_bytes;
    if (options.elastic) {
      // A tenth is kept back from elastic budgets. 0: the daemon's default share of the machine.
      daemon.capacity_bytes = options.most_bytes == 0 ? 0 : options.most_bytes / 9 * 10 + (1 << 20);
    }
    daemon.chunk_bytes = options.chunk_bytes;
    daemon.emulated = options.emulated;
    daemon.deadline_seconds = options.deadline_seconds;
    private_ = PrivateDaemon::Start(daemon, &error);
    if (!private_) return error;
    info_.private_daemon = true;
    info_.daemon_pid = private_->pid();
    error = lease_.Connect(private_->runtime_directory(), options.deadline_seconds, &absent);
    if (!error.empty()) return error;
    return Attach(private_->runtime_directory());
  }

  const SessionInfo& info() const override { return info_; }

  int TakeChunks() override { return std::exchange(chunks_, -1); }

  std::string Register(const std::vector<ModuleDescription>& modules, uint64_t disk_bytes, int* disk_fd) override {
    *disk_fd = -1;
    v1::RegisterModulesRequest request;
    disk_bytes_ = std::max(disk_bytes_, disk_bytes);
    request.set_disk_bytes(disk_bytes);
    for (const ModuleDescription& m : modules) {
      v1::Module* out = request.add_modules();
      out->set_name(m.name);
      out->set_kind(m.kind);
      out->set_parameter_count(m.parameter_count);
      out->set_samplable(m.samplable);
      out->set_pinned(m.pinned);
      for (const auto& f : m.facets) {
        v1::Facet* facet = out->add_facets();
        facet->set_id(f.id);
        facet->set_kind(static_cast<v1::FacetKind>(f.kind));
        facet->set_device_bytes(f.device_bytes);
      }
    }
    v1::RegisterModulesResponse response;
    grpc::ClientContext context;
    Prepare(&context, options_.deadline_seconds);
    const grpc::Status status = stub_->RegisterModules(&context, request, &response);
    if (!status.ok()) return Sentence("The modules could not be registered", status);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      for (const ModuleDescription& m : modules) {
        for (const auto& f : m.facets) registered_.insert(f.id);
      }
    }
    if (!have_disk_) {
      const std::string error = lease_.TakeFd(info_.below, disk_fd);
      if (!error.empty()) return error;
      have_disk_ = true;
    }
    return "";
  }

  std::string ResumeSampler(const std::string& state) override {
    if (!alive_) return "";
    v1::RegisterModulesRequest request;
    request.set_disk_bytes(disk_bytes_);
    request.set_sampler_state(state);
    v1::RegisterModulesResponse response;
    grpc::ClientContext context;
    Prepare(&context, options_.deadline_seconds);
    const grpc::Status status = stub_->RegisterModules(&context, request, &response);
    // A daemon that is gone checks no draws; that costs nothing.
    if (status.ok() || status.error_code() == grpc::StatusCode::UNAVAILABLE) return "";
    return Sentence("The daemon did not take the sampler's state", status);
  }

  void StartTraining(std::function<std::string(const OfferedPlan&)> on_plan, std::function<void(uint64_t, uint64_t)> on_budget,
                     std::function<void(const std::string&)> on_notice) override {
    on_plan_ = std::move(on_plan);
    on_budget_ = std::move(on_budget);
    on_notice_ = std::move(on_notice);
    context_ = std::make_unique<grpc::ClientContext>();
    context_->AddMetadata(kTokenMetadata, lease_.token());
    stream_ = stub_->Train(context_.get());
    alive_ = true;
    reader_ = std::thread([this] { Read(); });
    writer_ = std::thread([this] { Write(); });
  }

  void Report(StepReport report) override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!alive_) return;
    if (queue_.size() >= kMaxReports) queue_.pop_front();
    queue_.push_back(std::move(report));
    filled_.notify_one();
  }

  void AskForBudget(uint64_t bytes) override {
    if (!alive_) return;
    v1::TrainRequest request;
    request.mutable_budget_request()->set_bytes(bytes);
    std::lock_guard<std::mutex> lock(write_mutex_);
    stream_->Write(request);
  }

  bool daemon_alive() const override { return alive_; }

  void Close() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (closed_) return;
      closed_ = true;
      filled_.notify_all();
    }
    if (writer_.joinable()) {
      if (alive_) {
        v1::DetachResponse response;
        grpc::ClientContext context;
        Prepare(&context, kDetachSeconds);
        stub_->Detach(&context, v1::DetachRequest(), &response);
      }
      context_->TryCancel();
      writer_.join();
      reader_.join();
    }
    alive_ = false;
    if (chunks_ >= 0) close(std::exchange(chunks_, -1));
    lease_.Close();
    if (private_) private_->Stop();
  }

  void ForgetInChild() override {
    // Only the descriptor: threads and channels do not exist in a forked child and must not be touched.
    if (lease_.fd() >= 0) close(lease_.fd());
  }

 private:
  void Prepare(grpc::ClientContext* context, double seconds) {
    context->AddMetadata(kTokenMetadata, lease_.token());
    context->set_deadline(std::chrono::system_clock::now() +
                          std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000)));
  }

  static std::string Sentence(const std::string& what, const grpc::Status& status) {
    return what + ": " + status.error_message() +
           (status.error_code() == grpc::StatusCode::UNAVAILABLE ? " (misad does not answer)" : "");
  }

  std::string Attach(const std::string& directory) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    auto channel = grpc::CreateCustomChannel("unix://" + directory + "/" + kControlSocketName,
                                             grpc::InsecureChannelCredentials(), arguments);
    stub_ = v1::ControlService::NewStub(channel);
    v1::AttachRequest request;
    request.set_protocol_version(kProtocolVersion);
    request.set_client_version(kVersion);
    request.set_job(options_.job);
    if (options_.elastic) {
      request.mutable_elastic()->set_least_bytes(options_.least_bytes);
      request.mutable_elastic()->set_most_bytes(options_.most_bytes);
    } else {
      request.set_budget_bytes(options_.budget_bytes);
    }
    request.set_weight(options_.weight);
    request.set_mode(static_cast<v1::Mode>(options_.mode));
    Fill(request.mutable_sampling(), options_.sampling);
    request.set_command(CommandLine());
    v1::AttachResponse response;
    grpc::ClientContext context;
    Prepare(&context, options_.deadline_seconds);
    context.set_wait_for_ready(true);
    const grpc::Status status = stub_->Attach(&context, request, &response);
    if (!status.ok()) return Sentence("misad did not take this trainer", status);
    info_.session = response.session();
    info_.budget_bytes = response.budget_bytes();
    info_.chunks_bytes = response.chunks_bytes();
    info_.chunk_bytes = response.chunk_bytes();
    info_.block_bytes = response.disk_block_bytes();
    info_.device_kind = response.device_kind();
    info_.device_name = response.device_name();
    info_.device_uuid = response.device_uuid();
    info_.device_capacity_bytes = response.device_capacity_bytes();
    info_.link = FromProto(response.link());
    if (!response.below().empty()) info_.below = response.below();
    info_.link_modelled = response.link_modelled();
    info_.link_latency_seconds = response.link_latency_seconds();
    info_.runtime_directory = directory;
    return lease_.TakeFd("chunks", &chunks_);
  }

  void Read() {
    v1::TrainResponse message;
    while (stream_->Read(&message)) {
      if (message.has_plan()) {
        TakePlan(message.plan());
      } else if (message.has_budget()) {
        on_budget_(message.budget().budget_bytes(), message.budget().serial());
      } else if (message.has_drain()) {
        on_notice_("misad drains (" + message.drain().reason() + "): this trainer goes on with what it holds.");
      }
    }
    bool closed;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed = closed_;
      alive_ = false;
      filled_.notify_all();
    }
    if (!closed) {
      on_notice_("misad is gone: training goes on with its plan and memory; new sessions need a new daemon.");
    }
  }

  void TakePlan(const v1::Plan& message) {
    auto plan = std::make_shared<policy::Plan>();
    plan->step_seconds = message.predicted_step_seconds();
    plan->periods = std::max(message.periods(), 1u);
    plan->actions.reserve(static_cast<size_t>(message.actions_size()));
    for (const v1::PlanAction& action : message.actions()) {
      plan->actions.push_back({action.position(),
                               action.kind() == v1::ACTION_KIND_LOAD ? policy::Action::kLoad : policy::Action::kUnload,
                               action.facet()});
    }
    OfferedPlan offered;
    offered.plan = std::move(plan);
    offered.version = message.version();
    offered.trace_digest = message.trace_digest();
    offered.bound.step_seconds = message.bound_step_seconds();
    offered.bound.load_bytes = message.bound_load_bytes();
    offered.bound.unload_bytes = message.bound_unload_bytes();
    const std::string refused = on_plan_(offered);
    v1::TrainRequest request;
    request.mutable_acknowledgement()->set_version(offered.version);
    request.mutable_acknowledgement()->set_accepted(refused.empty());
    request.mutable_acknowledgement()->set_reason(refused);
    std::lock_guard<std::mutex> lock(write_mutex_);
    stream_->Write(request);
  }

  void Write() {
    for (;;) {
      StepReport report;
      std::set<uint32_t> registered;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        filled_.wait(lock, [this] { return !queue_.empty() || closed_ || !alive_; });
        if (queue_.empty() || !alive_) return;
        report = std::move(queue_.front());
        queue_.pop_front();
        registered = registered_;
      }
      const v1::TrainRequest request = ToMessage(report, registered, info_.below == "host");
      std::lock_guard<std::mutex> lock(write_mutex_);
      if (!stream_->Write(request)) return;
    }
  }

  static v1::TrainRequest ToMessage(const StepReport& report, const std::set<uint32_t>& registered, bool host) {
    v1::TrainRequest request;
    v1::StepReport* out = request.mutable_report();
    const StepSummary& s = report.summary;
    out->set_step(s.step);
    out->set_step_seconds(s.step_seconds);
    out->set_stall_seconds(s.counters.stall_seconds);
    out->set_loaded_bytes(s.counters.loaded_bytes_demand + s.counters.loaded_bytes_prefetch);
    out->set_unloaded_bytes(s.counters.unloaded_bytes);
    out->set_demand_loads(s.counters.loads_demand);
    out->set_prefetch_loads(s.counters.loads_prefetch);
    out->set_prefetch_hits(s.counters.prefetch_hits);
    out->set_demand_loaded_bytes(s.counters.loaded_bytes_demand);
    out->set_prefetch_loaded_bytes(s.counters.loaded_bytes_prefetch);
    out->set_unloads(s.counters.unloads);
    out->set_device_peak_bytes(s.device_peak_bytes);
    out->set_device_bytes(report.device_bytes);
    out->set_departures(s.counters.departures);
    out->set_plan_version(s.plan_version);
    for (const ModuleStatistics& m : report.statistics) {
      v1::ModuleStatistics* statistics = out->add_statistics();
      statistics->set_module(m.module);
      statistics->set_sum(m.statistics.sum);
      statistics->set_sum_squares(m.statistics.sum_squares);
      statistics->set_count(m.statistics.count);
    }
    for (size_t i = 0; i < report.states.size(); ++i) {
      if (!registered.contains(static_cast<uint32_t>(i))) continue;  // of a model under construction, and gone
      v1::FacetResidency* residency = out->add_residency();
      residency->set_facet(static_cast<uint32_t>(i));
      residency->set_residency(ToProto(report.states[i], host));
    }
    if (report.send_trace && s.trace) Fill(out->mutable_trace(), *s.trace, s.trace_digest);
    for (const trace::Section& section : report.mode_traces) {
      v1::ModeTrace* mode_trace = out->add_mode_traces();
      mode_trace->set_mode(static_cast<v1::TraceMode>(section.mode));
      Fill(mode_trace->mutable_trace(), section.trace, policy::Digest(section.trace));
    }
    v1::LinkRates* rates = out->mutable_measured_link();
    rates->set_load_bytes_per_second(s.measured.load);
    rates->set_unload_bytes_per_second(s.measured.unload);
    rates->set_duplex_load_bytes_per_second(s.measured.duplex_load);
    rates->set_duplex_unload_bytes_per_second(s.measured.duplex_unload);
    out->set_round(report.round);
    for (uint32_t module : report.active_modules) out->add_active_modules(module);
    out->set_sampler_digest(report.sampler_digest);
    out->set_counted_steps(report.counted_steps);
    out->set_sampling_waits(report.sampling_waits);
    if (report.loss) out->set_loss(*report.loss);
    out->set_rows(report.rows);
    out->set_problem(report.problem);
    out->set_pool_backed_bytes(report.pool_backed_bytes);
    out->set_budget_serial(report.budget_serial);
    if (!report.task.empty()) {
      out->set_task(report.task);
      out->set_task_weight(report.task_weight);
    }
    return request;
  }

  SessionOptions options_;
  SessionInfo info_;
  Lease lease_;
  std::unique_ptr<PrivateDaemon> private_;
  int chunks_ = -1;
  bool have_disk_ = false;
  uint64_t disk_bytes_ = 0;
  std::set<uint32_t> registered_;  // ids of facets; guarded by mutex_
  std::unique_ptr<v1::ControlService::Stub> stub_;

  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::TrainRequest, v1::TrainResponse>> stream_;
  std::function<std::string(const OfferedPlan&)> on_plan_;
  std::function<void(uint64_t, uint64_t)> on_budget_;
  std::function<void(const std::string&)> on_notice_;
  std::thread reader_;
  std::thread writer_;
  std::mutex write_mutex_;  // the stream takes one writer at a time
  std::mutex mutex_;
  std::condition_variable filled_;
  std::deque<StepReport> queue_;
  std::atomic<bool> alive_{false};
  bool closed_ = false;
};

}  // namespace

std::unique_ptr<Session> Session::Open(const SessionOptions& options, std::string* error) {
  auto session = std::make_unique<GrpcSession>();
  *error = session->Start(options);
  if (!error->empty()) return nullptr;
  return session;
}

}  // namespace misa
