#include "server/grpc/call_table.h"

#include <utility>

namespace misa::server {

void CallTable::Start(Finish finish, const std::function<Event(CallId)>& make) {
  CallId call = 0;
  bool closed = false;
  {
    absl::MutexLock lock(&mutex_);
    closed = closed_;
    if (!closed) {
      call = next_++;
      waiting_.emplace(call, std::move(finish));
    }
  }
  if (closed) {
    finish({Code::kUnavailable, "misad is stopping; sessions keep what they hold, and can attach to the next daemon"}, {});
    return;
  }
  if (scheduler_->Offer(make(call))) return;
  Complete({call,
            {Code::kExhausted, "misad's queue is full; nothing was changed by this call. Try again in a moment, or raise "
                               "limits.queue in its configuration"},
            {}});
}

void CallTable::Complete(Reply&& reply) {
  Finish finish;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = waiting_.find(reply.call);
    if (found == waiting_.end()) return;
    finish = std::move(found->second);
    waiting_.erase(found);
  }
  finish(reply.error, std::move(reply.response));
}

void CallTable::Close() {
  std::unordered_map<CallId, Finish> waiting;
  {
    absl::MutexLock lock(&mutex_);
    closed_ = true;
    waiting.swap(waiting_);
  }
  for (auto& [call, finish] : waiting) {
    finish({Code::kUnavailable, "misad is stopping; sessions keep what they hold, and can attach to the next daemon"}, {});
  }
}

}  // namespace misa::server
