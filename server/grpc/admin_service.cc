#include "server/grpc/admin_service.h"

#include <deque>
#include <utility>
#include <vector>

#include "server/grpc/unary.h"

namespace misa::server {
namespace {

// Events that wait for a slow watcher; what comes beyond is dropped and counted.
constexpr size_t kWatcherBuffer = 1024;
constexpr size_t kMaxWatchers = 32;

}  // namespace

class AdminService::Watcher : public grpc::ServerWriteReactor<v1::Event> {
 public:
  explicit Watcher(AdminService* service) : service_(service) {}

  void Begin(const std::shared_ptr<Watcher>& self, size_t backlog) {
    {
      absl::MutexLock lock(&mutex_);
      self_ = self;
    }
    // Weak: the log may still hold the function for a moment after the stream has ended.
    const uint64_t id = service_->events_->Watch(backlog, [weak = std::weak_ptr<Watcher>(self)](const v1::Event& event) {
      const std::shared_ptr<Watcher> watcher = weak.lock();
      return watcher == nullptr || watcher->Push(event);
    });
    absl::MutexLock lock(&mutex_);
    watch_ = id;
  }

  void End(const grpc::Status& status) {
    absl::MutexLock lock(&mutex_);
    FinishLocked(status);
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok) {
      FinishLocked(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the watcher's stream broke"));
      return;
    }
    WriteNext();
  }

  void OnCancel() override { End(grpc::Status(grpc::StatusCode::CANCELLED, "the watcher went away")); }

  void OnDone() override {
    std::shared_ptr<Watcher> self;
    uint64_t watch = 0;
    {
      absl::MutexLock lock(&mutex_);
      self = std::move(self_);
      watch = watch_;
    }
    service_->events_->Unwatch(watch);
    absl::MutexLock lock(&service_->mutex_);
    service_->watchers_.erase(self);
  }

 private:
  bool Push(const v1::Event& event) {
    absl::MutexLock lock(&mutex_);
    if (finished_) return true;
    if (waiting_.size() >= kWatcherBuffer) return false;
    waiting_.push_back(event);
    WriteNext();
    return true;
  }

  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_ || finished_ || waiting_.empty()) return;
    current_ = std::move(waiting_.front());
    waiting_.pop_front();
    writing_ = true;
    StartWrite(&current_);
  }

  void FinishLocked(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (finished_) return;
    finished_ = true;
    grpc::ServerWriteReactor<v1::Event>::Finish(status);
  }

  AdminService* const service_;
  absl::Mutex mutex_;
  std::shared_ptr<Watcher> self_ ABSL_GUARDED_BY(mutex_);
  uint64_t watch_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<v1::Event> waiting_ ABSL_GUARDED_BY(mutex_);
  v1::Event current_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

grpc::ServerUnaryReactor* AdminService::GetNode(grpc::CallbackServerContext* context, const v1::GetNodeRequest* request,
                                                v1::GetNodeResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  calls_->Start(
      [this, reactor, response](const Error& error, Response&& answer) {
        if (v1::GetNodeResponse* node = std::get_if<v1::GetNodeResponse>(&answer)) {
          *response = std::move(*node);
          // The core emits events and does not know which of them the log had no room for.
          response->set_events_dropped(events_->dropped());
        }
        reactor->Finish(ToStatus(error));
      },
      [&](CallId call) { return Event(AdminCall{call, *request}); });
  return reactor;
}

grpc::ServerUnaryReactor* AdminService::ListSessions(grpc::CallbackServerContext* context,
                                                     const v1::ListSessionsRequest* request,
                                                     v1::ListSessionsResponse* response) {
  return Unary(context, calls_, response, [&](CallId call) { return AdminCall{call, *request}; });
}

grpc::ServerUnaryReactor* AdminService::ListModules(grpc::CallbackServerContext* context,
                                                    const v1::ListModulesRequest* request,
                                                    v1::ListModulesResponse* response) {
  return Unary(context, calls_, response, [&](CallId call) { return AdminCall{call, *request}; });
}

grpc::ServerWriteReactor<v1::Event>* AdminService::WatchEvents(grpc::CallbackServerContext*,
                                                               const v1::WatchEventsRequest* request) {
  auto watcher = std::make_shared<Watcher>(this);
  grpc::Status refusal;
  {
    absl::MutexLock lock(&mutex_);
    if (closed_) {
      refusal = grpc::Status(grpc::StatusCode::UNAVAILABLE, "misad is stopping");
    } else if (watchers_.size() >= kMaxWatchers) {
      refusal = ToStatus({Code::kExhausted, "misad has " + std::to_string(kMaxWatchers) +
                                                " event watchers already; end one, or read the event file"});
    } else {
      watchers_.insert(watcher);
    }
  }
  watcher->Begin(watcher, std::min<size_t>(request->backlog(), kWatcherBuffer));
  if (!refusal.ok()) watcher->End(refusal);
  return watcher.get();
}

grpc::ServerUnaryReactor* AdminService::CaptureSnapshot(grpc::CallbackServerContext* context,
                                                        const v1::CaptureSnapshotRequest* request,
                                                        v1::CaptureSnapshotResponse* response) {
  return Unary(context, calls_, response, [&](CallId call) { return AdminCall{call, *request}; });
}

grpc::ServerUnaryReactor* AdminService::GetTrace(grpc::CallbackServerContext* context, const v1::GetTraceRequest* request,
                                                 v1::GetTraceResponse* response) {
  return Unary(context, calls_, response, [&](CallId call) { return AdminCall{call, *request}; });
}

grpc::ServerUnaryReactor* AdminService::SetBudget(grpc::CallbackServerContext* context, const v1::SetBudgetRequest* request,
                                                  v1::SetBudgetResponse* response) {
  return Unary(context, calls_, response, [&](CallId call) { return AdminCall{call, *request}; });
}

grpc::ServerUnaryReactor* AdminService::SetPolicy(grpc::CallbackServerContext* context, const v1::SetPolicyRequest* request,
                                                  v1::SetPolicyResponse* response) {
  return Unary(context, calls_, response, [&](CallId call) { return AdminCall{call, *request}; });
}

grpc::ServerUnaryReactor* AdminService::Drain(grpc::CallbackServerContext* context, const v1::DrainRequest* request,
                                              v1::DrainResponse* response) {
  return Unary(context, calls_, response, [&](CallId call) { return AdminCall{call, *request}; });
}

void AdminService::Close() {
  std::vector<std::shared_ptr<Watcher>> all;
  {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
    all.assign(watchers_.begin(), watchers_.end());
  }
  for (const auto& watcher : all) watcher->End(grpc::Status(grpc::StatusCode::UNAVAILABLE, "misad is stopping"));
}

}  // namespace misa::server
