// Samples the bytes on the device over time, for plots and for the standard deviation.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "client/core/meter.h"

namespace misa {

class Timeline {
 public:
  // Seconds since the start, bytes.
  using Sample = std::pair<double, uint64_t>;

  explicit Timeline(DeviceMeter* meter) : meter_(meter) {}
  ~Timeline() { Stop(); }
  void Start(double interval_seconds);
  void Stop();
  // At most kMaxSamples: when there are more, every second one is dropped and the interval doubles.
  std::vector<Sample> samples();
  // Population standard deviation over all samples taken, in bytes.
  double stddev_bytes();

 private:
  static constexpr size_t kMaxSamples = 4096;
  void Run(double interval_seconds);

  DeviceMeter* const meter_;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopping_ = false;
  std::vector<Sample> samples_;
  uint64_t count_ = 0;
  double mean_ = 0;
  double squares_ = 0;
};

}  // namespace misa
