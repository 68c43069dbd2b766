#include "runtime/policy/importance.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace misa::policy {
namespace {

constexpr uint32_t kMostWindow = 10000;

void Add(const GradientStatistics& from, GradientStatistics* to) {
  to->sum += from.sum;
  to->sum_squares += from.sum_squares;
  to->count += from.count;
}

std::string CheckOptions(const ImportanceTracker::Options& options) {
  if (!(options.alpha > 0 && options.alpha <= 1)) {
    return "The smoothing factor alpha must be above 0 and at most 1, and is " + std::to_string(options.alpha) + ".";
  }
  if (!(options.cold >= 0 && options.cold <= options.hot && options.hot <= 1)) {
    return "The thresholds must be 0 <= cold <= hot <= 1, and are cold " + std::to_string(options.cold) + ", hot " +
           std::to_string(options.hot) + ".";
  }
  if (options.window == 0 || options.window > kMostWindow) {
    return "The window of the importance must be from 1 to " + std::to_string(kMostWindow) + " steps, and is " +
           std::to_string(options.window) + ".";
  }
  return "";
}

}  // namespace

void PooledStatistics::Push(const GradientStatistics& statistics, uint32_t window) {
  newer_.push_back(statistics);
  Add(statistics, &newer_sum_);
  while (size() > std::max(window, 1u)) {
    if (older_.empty()) {
      GradientStatistics sum;
      for (; !newer_.empty(); newer_.pop_back()) {
        Add(newer_.back(), &sum);
        older_.push_back(sum);
      }
      newer_sum_ = {};
    }
    older_.pop_back();
  }
}

GradientStatistics PooledStatistics::pooled() const {
  GradientStatistics sum = newer_sum_;
  if (!older_.empty()) Add(older_.back(), &sum);
  return sum;
}

double Variance(const GradientStatistics& statistics) {
  if (statistics.count == 0) {
    return 0;
  }
  const double count = static_cast<double>(statistics.count);
  const double mean = statistics.sum / count;
  // The difference of two near-equal numbers may round below zero.
  return std::max(0.0, statistics.sum_squares / count - mean * mean);
}

double ScaledSquaredNorm(const GradientStatistics& statistics) {
  return statistics.count == 0 ? 0 : statistics.sum_squares / static_cast<double>(statistics.count);
}

std::string CheckStatistics(const GradientStatistics& statistics) {
  if (!std::isfinite(statistics.sum) || !std::isfinite(statistics.sum_squares) || statistics.sum_squares < 0) {
    return "The gradient statistics are not finite (sum " + std::to_string(statistics.sum) + ", sum of squares " +
           std::to_string(statistics.sum_squares) + "), so they were left out.";
  }
  return "";
}

ImportanceTracker::ImportanceTracker(size_t modules, Options options) {
  SetOptions(options);
  Resize(modules);
}

std::string ImportanceTracker::SetOptions(Options options) {
  std::string error = CheckOptions(options);
  if (error.empty()) {
    options_ = options;
  }
  return error;
}

std::string ImportanceTracker::BeginStep(const std::string& task, double weight) {
  task_ = 0;
  std::string error = tasks_.Enter(task, weight, &task_);
  while (of_task_.size() < tasks_.size()) {
    of_task_.push_back({std::vector<double>(heat_.size(), 0), std::vector<PooledStatistics>(heat_.size()),
                        std::vector<bool>(heat_.size(), false)});
  }
  tasks_.CountStep(task_);
  return error;
}

double ImportanceTracker::importance(size_t module) const {
  if (of_task_.size() == 1) {
    return of_task_[0].importance[module];
  }
  std::vector<double> values;
  for (const OfTask& task : of_task_) {
    values.push_back(task.importance[module]);
  }
  return WeightedMean(tasks_.Shares(), values);
}

std::string ImportanceTracker::Observe(size_t module, const GradientStatistics& statistics) {
  auto& [importance, pooled_statistics, observed] = of_task_[task_];
  if (module >= importance.size()) {
    return "There is no module " + std::to_string(module) + " among " + std::to_string(importance.size()) + ".";
  }
  if (std::string error = CheckStatistics(statistics); !error.empty()) {
    return error;
  }
  if (statistics.count == 0) {
    return "";  // no gradient says nothing about importance: a frozen module keeps what it had
  }
  pooled_statistics[module].Push(statistics, windows_[module] == 0 ? options_.window : windows_[module]);
  const GradientStatistics pooled = pooled_statistics[module].pooled();
  const double signal = options_.signal == Signal::kVariance ? Variance(pooled) : ScaledSquaredNorm(pooled);
  if (!std::isfinite(signal)) {
    return "The gradient statistics overflow, so they were left out.";
  }
  if (observed[module]) {
    importance[module] = options_.alpha * signal + (1 - options_.alpha) * importance[module];
  } else {
    // Starting from 0 would make a module look unimportant for the first 1/alpha steps.
    importance[module] = signal;
    observed[module] = true;
  }
  return "";
}

void ImportanceTracker::Resize(size_t modules) {
  for (OfTask& task : of_task_) {
    task.importance.resize(modules, 0);
    task.pooled.resize(modules);
    task.observed.resize(modules, false);
  }
  windows_.resize(modules, 0);
  heat_.resize(modules, Heat::kWarm);
}

void ImportanceTracker::SetWindow(size_t module, uint32_t window) {
  if (module < windows_.size()) windows_[module] = std::min(window, kMostWindow);
}

std::vector<double> ImportanceTracker::Ranks() const {
  const size_t count = heat_.size();
  std::vector<double> ranks(count, 0.5);
  if (count < 2) {
    return ranks;  // alone, a module is neither above nor below anything
  }
  std::vector<double> values(count);
  for (size_t i = 0; i < count; ++i) {
    values[i] = importance(i);
  }
  std::vector<size_t> order(count);
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return values[a] < values[b]; });
  for (size_t first = 0; first < count;) {
    size_t last = first;
    while (last + 1 < count && values[order[last + 1]] == values[order[first]]) {
      ++last;
    }
    const double rank = static_cast<double>(first + last) / 2 / static_cast<double>(count - 1);
    for (size_t i = first; i <= last; ++i) {
      ranks[order[i]] = rank;
    }
    first = last + 1;
  }
  return ranks;
}

const std::vector<ImportanceTracker::Heat>& ImportanceTracker::UpdateHeat() {
  const std::vector<double> ranks = Ranks();
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] >= options_.hot) {
      heat_[i] = Heat::kHot;
    } else if (ranks[i] <= options_.cold) {
      heat_[i] = Heat::kCold;
    }
  }
  return heat_;
}

}  // namespace misa::policy
