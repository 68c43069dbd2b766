#include "server/grpc/train_stream.h"

#include <optional>
#include <utility>
#include <vector>

namespace misa::server {

// Kept alive by itself until gRPC is done with it (OnDone), and by whoever is sending to it at that moment.
class TrainStreams::Reactor : public grpc::ServerBidiReactor<v1::TrainRequest, v1::TrainResponse> {
 public:
  Reactor(TrainStreams* streams, StreamId id) : streams_(streams), id_(id) {}

  void Hold(std::shared_ptr<Reactor> self) {
    absl::MutexLock lock(&mutex_);
    self_ = std::move(self);
  }

  void Send(v1::TrainResponse&& response) {
    absl::MutexLock lock(&mutex_);
    if (finished_) return;
    // A newer message of a kind replaces one that is still waiting: nothing grows when a trainer does not read.
    switch (response.body_case()) {
      case v1::TrainResponse::kBudget: budget_ = std::move(response); break;
      case v1::TrainResponse::kPlan: plan_ = std::move(response); break;
      default: drain_ = std::move(response); break;
    }
    WriteNext();
  }

  void Read() {
    absl::MutexLock lock(&mutex_);
    if (finished_ || reading_) return;
    reading_ = true;
    StartRead(&request_);
  }

  void End(const Error& error) {
    absl::MutexLock lock(&mutex_);
    FinishLocked(ToStatus(error));
  }

  void OnReadDone(bool ok) override {
    TrainMessage message;
    {
      absl::MutexLock lock(&mutex_);
      reading_ = false;
      if (finished_) return;
      if (!ok) {
        // The trainer closed its side: no more reports.
        FinishLocked(grpc::Status::OK);
        return;
      }
      message.stream = id_;
      message.request = std::move(request_);
      request_.Clear();
    }
    // The next read starts once the core has folded this one in, so a stream has one message in the queue at most.
    streams_->scheduler_->Deliver(std::move(message));
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (finished_) return;
    if (!ok) {
      FinishLocked(grpc::Status(grpc::StatusCode::UNAVAILABLE, "the trainer's stream broke"));
      return;
    }
    WriteNext();
  }

  void OnCancel() override {
    absl::MutexLock lock(&mutex_);
    FinishLocked(grpc::Status(grpc::StatusCode::CANCELLED, "the stream was cancelled"));
  }

  void OnDone() override {
    streams_->scheduler_->Deliver(TrainClosed{id_});
    streams_->Remove(id_);
    std::shared_ptr<Reactor> self;
    {
      absl::MutexLock lock(&mutex_);
      self = std::move(self_);
    }
  }

 private:
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (writing_) return;
    for (std::optional<v1::TrainResponse>* slot : {&budget_, &plan_, &drain_}) {
      if (!slot->has_value()) continue;
      writing_message_ = std::move(**slot);
      slot->reset();
      writing_ = true;
      StartWrite(&writing_message_);
      return;
    }
  }

  void FinishLocked(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (finished_) return;
    finished_ = true;
    grpc::ServerBidiReactor<v1::TrainRequest, v1::TrainResponse>::Finish(status);
  }

  TrainStreams* const streams_;
  const StreamId id_;
  absl::Mutex mutex_;
  std::shared_ptr<Reactor> self_ ABSL_GUARDED_BY(mutex_);
  v1::TrainRequest request_ ABSL_GUARDED_BY(mutex_);
  v1::TrainResponse writing_message_ ABSL_GUARDED_BY(mutex_);
  std::optional<v1::TrainResponse> budget_ ABSL_GUARDED_BY(mutex_);
  std::optional<v1::TrainResponse> plan_ ABSL_GUARDED_BY(mutex_);
  std::optional<v1::TrainResponse> drain_ ABSL_GUARDED_BY(mutex_);
  bool reading_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

grpc::ServerBidiReactor<v1::TrainRequest, v1::TrainResponse>* TrainStreams::Open(std::string token) {
  std::shared_ptr<Reactor> reactor;
  StreamId id = 0;
  Error refusal;
  {
    absl::MutexLock lock(&mutex_);
    id = next_++;
    reactor = std::make_shared<Reactor>(this, id);
    if (closed_) {
      refusal = {Code::kUnavailable, "misad is stopping; sessions keep what they hold"};
    } else if (open_.size() >= limit_) {
      refusal = {Code::kExhausted, "misad has too many Train streams open; close some and try again"};
    } else {
      open_.emplace(id, reactor);
    }
  }
  reactor->Hold(reactor);
  if (refusal.ok() && !scheduler_->Offer(TrainOpened{id, std::move(token)})) {
    refusal = {Code::kExhausted, "misad's queue is full; open the stream again in a moment"};
  }
  if (!refusal.ok()) reactor->End(refusal);
  return reactor.get();
}

std::shared_ptr<TrainStreams::Reactor> TrainStreams::Find(StreamId stream) {
  absl::MutexLock lock(&mutex_);
  const auto found = open_.find(stream);
  return found == open_.end() ? nullptr : found->second;
}

void TrainStreams::Remove(StreamId stream) {
  absl::MutexLock lock(&mutex_);
  open_.erase(stream);
}

void TrainStreams::Send(SendTrain&& effect) {
  if (const auto reactor = Find(effect.stream)) reactor->Send(std::move(effect.response));
}

void TrainStreams::Read(StreamId stream) {
  if (const auto reactor = Find(stream)) reactor->Read();
}

void TrainStreams::Finish(StreamId stream, const Error& error) {
  if (const auto reactor = Find(stream)) reactor->End(error);
}

void TrainStreams::Close() {
  std::vector<std::shared_ptr<Reactor>> all;
  {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
    for (const auto& [id, reactor] : open_) all.push_back(reactor);
  }
  for (const auto& reactor : all) {
    reactor->End({Code::kUnavailable, "misad is stopping; go on with the plan and the memory the session holds"});
  }
}

}  // namespace misa::server
