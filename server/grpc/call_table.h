// Calls that wait for the core's answer.
#pragma once

#include <absl/base/thread_annotations.h>
#include <absl/synchronization/mutex.h>

#include <functional>
#include <unordered_map>

#include "server/core/effect.h"
#include "server/scheduler/scheduler.h"

namespace misa::server {

class CallTable {
 public:
  using Finish = std::function<void(const Error& error, Response&& response)>;

  explicit CallTable(Scheduler* scheduler) : scheduler_(scheduler) {}

  // Offers make(call) to the scheduler; `finish` is called exactly once: with the answer, or with why there is none.
  void Start(Finish finish, const std::function<Event(CallId)>& make) ABSL_LOCKS_EXCLUDED(mutex_);
  void Complete(Reply&& reply) ABSL_LOCKS_EXCLUDED(mutex_);
  // Nothing answers any more: every call that waits, and every later one, ends with UNAVAILABLE.
  void Close() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  Scheduler* const scheduler_;
  absl::Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  CallId next_ ABSL_GUARDED_BY(mutex_) = 1;
  std::unordered_map<CallId, Finish> waiting_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace misa::server
