// misa.v1.AdminService: questions to the core, and the live event stream.
#pragma once

#include <absl/base/thread_annotations.h>
#include <absl/synchronization/mutex.h>
#include <grpcpp/grpcpp.h>

#include <memory>
#include <unordered_set>

#include "misa/v1/admin.grpc.pb.h"
#include "server/grpc/call_table.h"
#include "server/observe/event_log.h"

namespace misa::server {

class AdminService final : public v1::AdminService::CallbackService {
 public:
  AdminService(CallTable* calls, EventLog* events) : calls_(calls), events_(events) {}

  grpc::ServerUnaryReactor* GetNode(grpc::CallbackServerContext* context, const v1::GetNodeRequest* request,
                                    v1::GetNodeResponse* response) override;
  grpc::ServerUnaryReactor* ListSessions(grpc::CallbackServerContext* context, const v1::ListSessionsRequest* request,
                                         v1::ListSessionsResponse* response) override;
  grpc::ServerUnaryReactor* ListModules(grpc::CallbackServerContext* context, const v1::ListModulesRequest* request,
                                        v1::ListModulesResponse* response) override;
  grpc::ServerWriteReactor<v1::Event>* WatchEvents(grpc::CallbackServerContext* context,
                                                   const v1::WatchEventsRequest* request) override;
  grpc::ServerUnaryReactor* CaptureSnapshot(grpc::CallbackServerContext* context, const v1::CaptureSnapshotRequest* request,
                                            v1::CaptureSnapshotResponse* response) override;
  grpc::ServerUnaryReactor* GetTrace(grpc::CallbackServerContext* context, const v1::GetTraceRequest* request,
                                     v1::GetTraceResponse* response) override;
  grpc::ServerUnaryReactor* SetBudget(grpc::CallbackServerContext* context, const v1::SetBudgetRequest* request,
                                      v1::SetBudgetResponse* response) override;
  grpc::ServerUnaryReactor* SetPolicy(grpc::CallbackServerContext* context, const v1::SetPolicyRequest* request,
                                      v1::SetPolicyResponse* response) override;
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context, const v1::DrainRequest* request,
                                  v1::DrainResponse* response) override;

  // Ends every event stream, and every later one at once.
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  class Watcher;

  CallTable* const calls_;
  EventLog* const events_;
  absl::Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::unordered_set<std::shared_ptr<Watcher>> watchers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace misa::server
