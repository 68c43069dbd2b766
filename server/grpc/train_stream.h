// The open Train streams: messages in, at most the newest plan, budget and notice waiting to go out.
#pragma once

#include <absl/base/thread_annotations.h>
#include <absl/synchronization/mutex.h>
#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <unordered_map>

#include "misa/v1/control.grpc.pb.h"
#include "server/core/effect.h"
#include "server/scheduler/scheduler.h"

namespace misa::server {

class TrainStreams {
 public:
  TrainStreams(Scheduler* scheduler, size_t limit) : scheduler_(scheduler), limit_(limit) {}

  grpc::ServerBidiReactor<v1::TrainRequest, v1::TrainResponse>* Open(std::string token) ABSL_LOCKS_EXCLUDED(mutex_);

  // The core's effects.
  void Send(SendTrain&& effect) ABSL_LOCKS_EXCLUDED(mutex_);
  void Read(StreamId stream) ABSL_LOCKS_EXCLUDED(mutex_);
  void Finish(StreamId stream, const Error& error) ABSL_LOCKS_EXCLUDED(mutex_);
  // Ends every stream, and every later one at once.
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  class Reactor;
  std::shared_ptr<Reactor> Find(StreamId stream) ABSL_LOCKS_EXCLUDED(mutex_);
  void Remove(StreamId stream) ABSL_LOCKS_EXCLUDED(mutex_);

  Scheduler* const scheduler_;
  const size_t limit_;
  absl::Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  StreamId next_ ABSL_GUARDED_BY(mutex_) = 1;
  std::unordered_map<StreamId, std::shared_ptr<Reactor>> open_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace misa::server
