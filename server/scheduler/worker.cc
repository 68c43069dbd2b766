#include "server/scheduler/worker.h"

#include <utility>

namespace misa::server {

Worker::Worker(size_t limit) : limit_(limit), thread_([this] { Run(); }) {}

Worker::~Worker() { Stop(); }

bool Worker::Post(std::function<void()> job) {
  absl::MutexLock lock(&mutex_);
  if (stopping_ || jobs_.size() >= limit_) return false;
  jobs_.push_back(std::move(job));
  return true;
}

void Worker::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void Worker::Run() {
  while (true) {
    std::function<void()> job;
    {
      absl::MutexLock lock(&mutex_);
      mutex_.Await(absl::Condition(this, &Worker::Ready));
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    job();
  }
}

}  // namespace misa::server
