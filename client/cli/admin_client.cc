#include "client/cli/admin_client.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "health.grpc.pb.h"
#include "runtime/memory/lease_protocol.h"

namespace misa::cli {

namespace {

// A stream that follows events is renewed after this long, so that even it has a deadline.
constexpr absl::Duration kFollowDeadline = absl::Hours(24);
// Events read from the daemon and not yet shown.
constexpr size_t kMaxQueuedEvents = 10000;

constexpr char kStartHint[] =
    "Start the daemon (systemctl start misad, or misad --config FILE), or name its folder with --runtime-dir or "
    "MISA_RUNTIME_DIR.";

std::string NoDaemonSentence(const std::string& socket_path) {
  struct stat information;
  if (stat(socket_path.c_str(), &information) != 0) {
    if (errno == EACCES) {
      return absl::StrCat("you may not look at ", socket_path,
                          ". Run misactl as root or as a member of the group misa.");
    }
    return absl::StrCat("no misad runs here: the socket ", socket_path, " does not exist. ", kStartHint);
  }
  if (access(socket_path.c_str(), W_OK) != 0) {
    return absl::StrCat("you may not connect to ", socket_path,
                        ". Run misactl as root or as a member of the group misa.");
  }
  return absl::StrCat("no misad answers at the socket ", socket_path, ", although it exists. ", kStartHint);
}

}  // namespace

AdminClient::AdminClient(std::string runtime_directory, absl::Duration timeout)
    : socket_path_(absl::StrCat(runtime_directory, "/", kControlSocketName)), timeout_(timeout) {
  grpc::ChannelArguments arguments;
  // A daemon that was just restarted is found at once, not after gRPC's default of up to two minutes.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  // A snapshot, or the modules of many sessions, outgrow gRPC's default of 4 MiB.
  arguments.SetMaxReceiveMessageSize(256 << 20);
  channel_ =
      grpc::CreateCustomChannel(absl::StrCat("unix://", socket_path_), grpc::InsecureChannelCredentials(), arguments);
  stub_ = v1::AdminService::NewStub(channel_);
}

std::string AdminClient::RuntimeDirectory(const std::string& option) {
  const char* variable = std::getenv(kRuntimeDirectoryVariable);
  const std::string chosen = !option.empty()                              ? option
                             : variable != nullptr && variable[0] != '\0' ? std::string(variable)
                                                                          : kDefaultRuntimeDirectory;
  return std::filesystem::absolute(chosen).lexically_normal().string();
}

std::unique_ptr<grpc::ClientContext> AdminClient::NewContext() const {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(absl::ToChronoTime(absl::Now() + timeout_));
  return context;
}

absl::Status AdminClient::ToStatus(const grpc::Status& status) const {
  if (status.ok()) return absl::OkStatus();
  // A socket's path has to fit into sockaddr_un; gRPC calls the consequence an internal error.
  if (socket_path_.size() >= sizeof(sockaddr_un::sun_path)) {
    return absl::UnavailableError(absl::StrCat("the socket's path is too long (", socket_path_.size(),
                                               " characters, at most ", sizeof(sockaddr_un::sun_path) - 1,
                                               " are possible): ", socket_path_));
  }
  switch (status.error_code()) {
    case grpc::StatusCode::UNAVAILABLE:
      // Over a connection that stands it is the daemon's own word, for example that it is going away.
      if (channel_->GetState(/*try_to_connect=*/false) == GRPC_CHANNEL_READY) {
        return absl::UnavailableError(status.error_message());
      }
      return absl::UnavailableError(NoDaemonSentence(socket_path_));
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return absl::UnavailableError(absl::StrCat("misad at ", socket_path_, " did not answer within ",
                                                 absl::FormatDuration(timeout_),
                                                 ". See its log, or wait longer with --timeout."));
    case grpc::StatusCode::UNIMPLEMENTED:
      return absl::UnimplementedError(
          absl::StrCat("misad at ", socket_path_, " does not know this command; it is older than this misactl."));
    default:
      return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  }
}

absl::StatusOr<v1::GetNodeResponse> AdminClient::GetNode() {
  v1::GetNodeResponse response;
  absl::Status status = ToStatus(stub_->GetNode(NewContext().get(), v1::GetNodeRequest(), &response));
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<v1::ListSessionsResponse> AdminClient::ListSessions() {
  v1::ListSessionsResponse response;
  absl::Status status = ToStatus(stub_->ListSessions(NewContext().get(), v1::ListSessionsRequest(), &response));
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<v1::ListModulesResponse> AdminClient::ListModules(const std::string& session) {
  v1::ListModulesRequest request;
  request.set_session(session);
  v1::ListModulesResponse response;
  absl::Status status = ToStatus(stub_->ListModules(NewContext().get(), request, &response));
  if (!status.ok()) return status;
  return response;
}

absl::StatusOr<std::string> AdminClient::CaptureSnapshot() {
  v1::CaptureSnapshotResponse response;
  absl::Status status = ToStatus(stub_->CaptureSnapshot(NewContext().get(), v1::CaptureSnapshotRequest(), &response));
  if (!status.ok()) return status;
  return response.json();
}

absl::StatusOr<std::string> AdminClient::GetTrace(const std::string& session) {
  v1::GetTraceRequest request;
  request.set_session(session);
  v1::GetTraceResponse response;
  absl::Status status = ToStatus(stub_->GetTrace(NewContext().get(), request, &response));
  if (!status.ok()) return status;
  return std::move(*response.mutable_file());
}

absl::Status AdminClient::SetBudget(const std::string& session, std::optional<uint64_t> budget_bytes) {
  v1::SetBudgetRequest request;
  request.set_session(session);
  request.set_budget_bytes(budget_bytes.value_or(0));
  request.set_automatic(!budget_bytes.has_value());
  v1::SetBudgetResponse response;
  return ToStatus(stub_->SetBudget(NewContext().get(), request, &response));
}

absl::Status AdminClient::Drain(const std::string& reason) {
  v1::DrainRequest request;
  request.set_reason(reason);
  v1::DrainResponse response;
  return ToStatus(stub_->Drain(NewContext().get(), request, &response));
}

absl::StatusOr<bool> AdminClient::IsServing() {
  grpc::health::v1::HealthCheckResponse response;
  absl::Status status = ToStatus(grpc::health::v1::Health::NewStub(channel_)->Check(
      NewContext().get(), grpc::health::v1::HealthCheckRequest(), &response));
  if (!status.ok()) return status;
  return response.status() == grpc::health::v1::HealthCheckResponse::SERVING;
}

absl::Status AdminClient::WatchEvents(uint32_t backlog, absl::Duration idle_limit,
                                      const std::function<bool(const v1::Event&)>& on_event) {
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kFollowDeadline));
  v1::WatchEventsRequest request;
  request.set_backlog(backlog);
  auto reader = stub_->WatchEvents(&context, request);

  // A blocking read cannot be given up after a silence, so a thread reads and this one waits.
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<v1::Event> queue;
  bool ended = false;
  std::thread reading([&] {
    v1::Event event;
    while (reader->Read(&event)) {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return queue.size() < kMaxQueuedEvents || ended; });
      if (ended) break;
      queue.push_back(std::move(event));
      changed.notify_all();
    }
    std::lock_guard lock(mutex);
    ended = true;
    changed.notify_all();
  });

  bool given_up = false;
  for (;;) {
    std::unique_lock lock(mutex);
    const auto ready = [&] { return !queue.empty() || ended; };
    if (idle_limit == absl::InfiniteDuration()) {
      changed.wait(lock, ready);
    } else if (!changed.wait_for(lock, absl::ToChronoMilliseconds(idle_limit), ready)) {
      given_up = true;
      break;
    }
    if (queue.empty()) break;
    const v1::Event event = std::move(queue.front());
    queue.pop_front();
    changed.notify_all();
    lock.unlock();
    if (!on_event(event)) {
      given_up = true;
      break;
    }
  }
  if (given_up) {
    context.TryCancel();
    std::lock_guard lock(mutex);
    ended = true;
    changed.notify_all();
  }
  reading.join();
  const grpc::Status status = reader->Finish();
  if (given_up || status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) return absl::OkStatus();
  return ToStatus(status);
}

}  // namespace misa::cli
