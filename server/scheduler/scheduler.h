// One bounded queue and the one thread that runs the core: events in, effects out, in order.
#pragma once

#include <absl/base/thread_annotations.h>
#include <absl/synchronization/mutex.h>

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <thread>

#include "server/core/core.h"
#include "server/scheduler/clock.h"

namespace misa::server {

class Scheduler {
 public:
  // `perform` carries out one effect on the scheduler's thread and must not block.
  Scheduler(size_t limit, const Clock* clock, std::function<void(Effect&&)> perform);
  ~Scheduler();

  // Takes over the core, whose first effects are done first.
  void Start(Core core, Effects first);

  // An event from outside. False when the queue is full or the scheduler has stopped: the caller says so to its peer.
  bool Offer(Event event) ABSL_LOCKS_EXCLUDED(mutex_);

  // An answer or an end that must not be lost. Their number is bounded by what is under way: one for each lease, stream
  // and operation.
  void Deliver(Event event) ABSL_LOCKS_EXCLUDED(mutex_);

  // Handles what is queued, then ends the thread. Idempotent.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

  size_t queued() const ABSL_LOCKS_EXCLUDED(mutex_);
  // When the last event was handled, on the clock's monotonic scale: a watchdog's question.
  double last_handled_seconds() const { return last_handled_.load(std::memory_order_relaxed); }

 private:
  void Run(Core core, Effects first) ABSL_LOCKS_EXCLUDED(mutex_);
  bool Ready() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopping_ || !queue_.empty(); }

  const size_t limit_;
  const Clock* const clock_;
  const std::function<void(Effect&&)> perform_;
  mutable absl::Mutex mutex_;
  std::deque<Event> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<double> last_handled_{0};
  std::thread thread_;
};

}  // namespace misa::server
