// One connection to a daemon's control socket. Every call has a deadline; a failure is a status whose message is a
// sentence for the person at the terminal.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/grpcpp.h"
#include "misa/v1/admin.grpc.pb.h"

namespace misa::cli {

class AdminClient {
 public:
  // `runtime_directory` holds the daemon's sockets. Connects with the first call.
  AdminClient(std::string runtime_directory, absl::Duration timeout);

  // The one directory to use: `option` if given, else $MISA_RUNTIME_DIR, else /run/misa. Always absolute.
  static std::string RuntimeDirectory(const std::string& option);

  absl::StatusOr<v1::GetNodeResponse> GetNode();
  absl::StatusOr<v1::ListSessionsResponse> ListSessions();
  absl::StatusOr<v1::ListModulesResponse> ListModules(const std::string& session);
  absl::StatusOr<std::string> CaptureSnapshot();
  // The bytes of a trace file.
  absl::StatusOr<std::string> GetTrace(const std::string& session);
  // Without one, the daemon chooses.
  absl::Status SetBudget(const std::string& session, std::optional<uint64_t> budget_bytes);
  absl::Status Drain(const std::string& reason);

  // True when the daemon says that it serves.
  absl::StatusOr<bool> IsServing();

  // Hands events to `on_event`, first up to `backlog` of the past ones, until it returns false, the daemon ends, or
  // nothing came for `idle_limit`. Returns OK in all cases but a failed call.
  absl::Status WatchEvents(uint32_t backlog, absl::Duration idle_limit,
                           const std::function<bool(const v1::Event&)>& on_event);

 private:
  absl::Status ToStatus(const grpc::Status& status) const;
  std::unique_ptr<grpc::ClientContext> NewContext() const;

  const std::string socket_path_;
  const absl::Duration timeout_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::AdminService::Stub> stub_;
};

}  // namespace misa::cli
