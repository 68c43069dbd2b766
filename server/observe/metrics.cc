#include "server/observe/metrics.h"

#include <prometheus/client_metric.h>
#include <prometheus/metric_family.h>
#include <prometheus/metric_type.h>

#include <cmath>
#include <limits>
#include <set>
#include <utility>

namespace misa::server {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<std::pair<std::string, std::string>>;

// Sessions that have series of their own; a slot is used again, so this bounds the series for good.
constexpr uint32_t kSessionSeries = 32;

constexpr const char* kFacetNames[] = {"weights", "gradients", "optimizer"};
constexpr const char* kResidencyNames[] = {"unknown", "empty", "disk", "host", "loading", "device", "unloading", "quantized"};

class Builder {
 public:
  MetricFamily* Start(const char* name, const char* help, MetricType type) {
    families_.push_back({name, help, type, {}});
    return &families_.back();
  }

  void Add(double value, const Labels& labels = {}) {
    ClientMetric metric;
    for (const auto& [name, label] : labels) metric.label.push_back({name, label});
    if (families_.back().type == MetricType::Counter) {
      metric.counter.value = value;
    } else {
      metric.gauge.value = value;
    }
    families_.back().metric.push_back(std::move(metric));
  }

  void Gauge(const char* name, const char* help, double value) {
    Start(name, help, MetricType::Gauge);
    Add(value);
  }
  void Counter(const char* name, const char* help, double value) {
    Start(name, help, MetricType::Counter);
    Add(value);
  }

  std::vector<MetricFamily> Take() { return std::move(families_); }

 private:
  std::vector<MetricFamily> families_;
};

double D(uint64_t value) { return static_cast<double>(value); }

}  // namespace

std::vector<MetricFamily> MakeFamilies(const Figures& figures, const ProcessFigures& process) {
  Builder b;
  b.Start("misa_build_info", "Version of the running misad; always 1.", MetricType::Gauge);
  b.Add(1, {{"version", process.version}});

  b.Start("misa_pool_bytes", "Bytes of a tier's pool by state; the states add up to its capacity.", MetricType::Gauge);
  for (const auto& [tier, pool] : {std::pair{std::string("device"), figures.device}, std::pair{figures.below, figures.disk}}) {
    b.Add(D(pool.free), {{"tier", tier}, {"state", "free"}});
    b.Add(D(pool.leased), {{"tier", tier}, {"state", "leased"}});
    b.Add(D(pool.reclaiming), {{"tier", tier}, {"state", "reclaiming"}});
    b.Add(D(pool.orphaned), {{"tier", tier}, {"state", "orphaned"}});
  }
  b.Gauge("misa_sessions", "Attached sessions.", figures.sessions);
  b.Gauge("misa_orphaned_sessions", "Trainers of an earlier misad that still hold memory.", figures.orphans);

  b.Start("misa_facets", "Facets of all sessions by kind and residency.", MetricType::Gauge);
  for (size_t kind = 0; kind < figures.facets.size(); ++kind) {
    for (size_t residency = 0; residency < figures.facets[kind].size(); ++residency) {
      b.Add(D(figures.facets[kind][residency]), {{"facet", kFacetNames[kind]}, {"residency", kResidencyNames[residency]}});
    }
  }
  b.Start("misa_facet_bytes", "Bytes of all sessions' facets by residency.", MetricType::Gauge);
  for (size_t residency = 0; residency < figures.facet_bytes.size(); ++residency) {
    b.Add(D(figures.facet_bytes[residency]), {{"residency", kResidencyNames[residency]}});
  }

  const Totals& t = figures.totals;
  b.Start("misa_loads_total", "Facets brought to the device, on demand (the compute waited) or ahead of their use.",
          MetricType::Counter);
  b.Add(D(t.demand_loads), {{"cause", "demand"}});
  b.Add(D(t.prefetch_loads), {{"cause", "prefetch"}});
  b.Start("misa_loaded_bytes_total", "Bytes brought to the device.", MetricType::Counter);
  b.Add(D(t.demand_loaded_bytes), {{"cause", "demand"}});
  b.Add(D(t.prefetch_loaded_bytes), {{"cause", "prefetch"}});
  b.Counter("misa_unloads_total", "Facets that left the device.", D(t.unloads));
  b.Counter("misa_unloaded_bytes_total", "Bytes copied from the device to the tier below it.", D(t.unloaded_bytes));
  b.Counter("misa_prefetch_hits_total", "Uses that found their facet present because of a prefetch.", D(t.prefetch_hits));
  b.Counter("misa_departures_total", "Uses that did not follow the trace the plan was made for.", D(t.departures));
  b.Counter("misa_stall_seconds_total", "Time the compute waited for loads.", t.stall_seconds);
  b.Counter("misa_steps_total", "Training steps of all sessions.", D(t.steps));

  MetricFamily* histogram = b.Start("misa_step_seconds", "Duration of training steps.", MetricType::Histogram);
  ClientMetric step;
  uint64_t cumulative = 0;
  for (size_t i = 0; i < t.step_seconds_counts.size(); ++i) {
    cumulative += t.step_seconds_counts[i];
    const double bound = i < kStepSecondsBuckets.size() ? kStepSecondsBuckets[i] : std::numeric_limits<double>::infinity();
    step.histogram.bucket.push_back({cumulative, bound});
  }
  step.histogram.sample_count = cumulative;
  step.histogram.sample_sum = t.step_seconds_sum;
  histogram->metric.push_back(std::move(step));

  b.Start("misa_bound_step_seconds", "Step time that no schedule can beat, by session slot.", MetricType::Gauge);
  for (const SessionFigures& session : figures.session_figures) {
    if (session.slot < kSessionSeries) b.Add(session.bound_step_seconds, {{"session", std::to_string(session.slot)}});
  }
  b.Start("misa_plan_version", "Version of the plan in force, by session slot.", MetricType::Gauge);
  for (const SessionFigures& session : figures.session_figures) {
    if (session.slot < kSessionSeries) b.Add(D(session.plan_version), {{"session", std::to_string(session.slot)}});
  }
  b.Start("misa_session_budget_bytes", "Device bytes that a session may hold, by session slot.", MetricType::Gauge);
  for (const SessionFigures& session : figures.session_figures) {
    if (session.slot < kSessionSeries) b.Add(D(session.budget_bytes), {{"session", std::to_string(session.slot)}});
  }
  b.Start("misa_session_leased_bytes",
          "Device bytes that the pool counts for a session, by session slot; above its budget until it has shrunk.",
          MetricType::Gauge);
  for (const SessionFigures& session : figures.session_figures) {
    if (session.slot < kSessionSeries) b.Add(D(session.leased_bytes), {{"session", std::to_string(session.slot)}});
  }
  b.Start("misa_session_weight", "How much a session counts where budgets are shared, by session slot.", MetricType::Gauge);
  for (const SessionFigures& session : figures.session_figures) {
    if (session.slot < kSessionSeries) b.Add(session.weight, {{"session", std::to_string(session.slot)}});
  }
  b.Start("misa_session_tasks", "Tasks that a session's trainer has named, by session slot.", MetricType::Gauge);
  for (const SessionFigures& session : figures.session_figures) {
    if (session.slot < kSessionSeries) b.Add(D(session.tasks), {{"session", std::to_string(session.slot)}});
  }
  b.Start("misa_module_importance", "Smoothed importance of the most important modules, by session slot.", MetricType::Gauge);
  for (const ModuleFigure& module : figures.modules) {
    if (module.slot >= kSessionSeries) continue;
    b.Add(module.importance, {{"session", std::to_string(module.slot)}, {"module", module.module}});
  }

  b.Start("misa_events_total", "Events by kind.", MetricType::Counter);
  for (const auto& [kind, count] : t.events) b.Add(D(count), {{"kind", kind}});
  b.Counter("misa_events_dropped_total", "Events that the file or a watcher had no room for.", D(process.events_dropped));
  b.Gauge("misa_queue_events", "Events that wait for the scheduler.", D(process.queue_events));
  b.Gauge("misa_open_fds", "Open file descriptors of misad.", D(process.open_fds));
  return b.Take();
}

std::vector<MetricFamily> MetricsCollector::Collect() const {
  Figures figures;
  const bool fresh = figures_(&figures);
  absl::MutexLock lock(&mutex_);
  if (fresh) last_ = std::move(figures);
  return MakeFamilies(last_, process_());
}

}  // namespace misa::server
