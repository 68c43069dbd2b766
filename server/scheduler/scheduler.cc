#include "server/scheduler/scheduler.h"

#include <utility>

#include "server/log.h"

namespace misa::server {

Scheduler::Scheduler(size_t limit, const Clock* clock, std::function<void(Effect&&)> perform)
    : limit_(limit), clock_(clock), perform_(std::move(perform)) {}

Scheduler::~Scheduler() { Stop(); }

void Scheduler::Start(Core core, Effects first) {
  last_handled_ = clock_->now().monotonic_seconds;
  thread_ = std::thread([this, core = std::move(core), first = std::move(first)]() mutable {
    Run(std::move(core), std::move(first));
  });
}

bool Scheduler::Offer(Event event) {
  absl::MutexLock lock(&mutex_);
  if (stopping_ || queue_.size() >= limit_) return false;
  queue_.push_back(std::move(event));
  return true;
}

void Scheduler::Deliver(Event event) {
  absl::MutexLock lock(&mutex_);
  if (stopping_) return;
  queue_.push_back(std::move(event));
}

void Scheduler::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

size_t Scheduler::queued() const {
  absl::MutexLock lock(&mutex_);
  return queue_.size();
}

void Scheduler::Run(Core core, Effects first) {
  for (Effect& effect : first) perform_(std::move(effect));
  Effects effects;
  std::deque<Event> batch;
  while (true) {
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &Scheduler::Ready));
      if (queue_.empty()) return;
      batch.swap(queue_);
    }
    for (const Event& event : batch) {
      const Now now = clock_->now();
      effects.clear();
      core.Handle(event, now, &effects);
      for (Effect& effect : effects) perform_(std::move(effect));
      last_handled_.store(now.monotonic_seconds, std::memory_order_relaxed);
    }
    batch.clear();
    const std::string problem = core.CheckInvariants();
    if (!problem.empty()) Log(Level::kError, "the accounting is broken, which is a fault of misad's own: " + problem);
  }
}

}  // namespace misa::server
