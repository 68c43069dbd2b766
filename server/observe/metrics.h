// /metrics: the core's figures in Prometheus's words.
#pragma once

#include <absl/base/thread_annotations.h>
#include <absl/synchronization/mutex.h>
#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "server/core/figures.h"

namespace misa::server {

// What the core does not know.
struct ProcessFigures {
  std::string version;
  uint64_t events_dropped = 0;
  uint64_t queue_events = 0;
  uint64_t open_fds = 0;
};

std::vector<prometheus::MetricFamily> MakeFamilies(const Figures& figures, const ProcessFigures& process);

class MetricsCollector : public prometheus::Collectable {
 public:
  // `figures` asks the core and gives up after a deadline (false).
  MetricsCollector(std::function<bool(Figures*)> figures, std::function<ProcessFigures()> process)
      : figures_(std::move(figures)), process_(std::move(process)) {}

  // The last known figures where the core does not answer in time: a scrape never hangs.
  std::vector<prometheus::MetricFamily> Collect() const override ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  const std::function<bool(Figures*)> figures_;
  const std::function<ProcessFigures()> process_;
  mutable absl::Mutex mutex_;
  mutable Figures last_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace misa::server
