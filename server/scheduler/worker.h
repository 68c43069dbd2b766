// A thread that does work for the scheduler which may block: reserving disk, scrubbing memory, making plans.
#pragma once

#include <absl/base/thread_annotations.h>
#include <absl/synchronization/mutex.h>

#include <cstddef>
#include <deque>
#include <functional>
#include <thread>

namespace misa::server {

// Jobs run one after another, in the order of Post.
class Worker {
 public:
  explicit Worker(size_t limit);
  ~Worker();

  // False when `limit` jobs wait already, or after Stop.
  bool Post(std::function<void()> job) ABSL_LOCKS_EXCLUDED(mutex_);

  // Runs what was posted, then ends the thread. Idempotent.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  bool Ready() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || !jobs_.empty(); }

  const size_t limit_;
  absl::Mutex mutex_;
  std::deque<std::function<void()>> jobs_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace misa::server
