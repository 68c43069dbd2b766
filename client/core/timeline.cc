#include "client/core/timeline.h"

#include <chrono>
#include <cmath>

namespace misa {

void Timeline::Start(double interval_seconds) {
  Stop();
  stopping_ = false;
  thread_ = std::thread([this, interval_seconds] { Run(interval_seconds); });
}

void Timeline::Stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Timeline::Run(double interval_seconds) {
  const auto start = std::chrono::steady_clock::now();
  uint64_t stride = 1;
  uint64_t turn = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stop_.wait_for(lock, std::chrono::duration<double>(interval_seconds), [this] { return stopping_; })) {
    const uint64_t bytes = meter_->total_bytes();
    // Welford's update: stable for long runs.
    ++count_;
    const double delta = static_cast<double>(bytes) - mean_;
    mean_ += delta / static_cast<double>(count_);
    squares_ += delta * (static_cast<double>(bytes) - mean_);
    if (turn++ % stride != 0) continue;
    samples_.emplace_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count(), bytes);
    if (samples_.size() >= kMaxSamples) {
      for (size_t i = 0; i < samples_.size() / 2; ++i) samples_[i] = samples_[2 * i];
      samples_.resize(samples_.size() / 2);
      stride *= 2;
    }
  }
}

std::vector<Timeline::Sample> Timeline::samples() {
  std::lock_guard<std::mutex> lock(mutex_);
  return samples_;
}

double Timeline::stddev_bytes() {
  std::lock_guard<std::mutex> lock(mutex_);
  return count_ == 0 ? 0 : std::sqrt(squares_ / static_cast<double>(count_));
}

}  // namespace misa
