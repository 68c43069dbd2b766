#include "runtime/guard/loss_swings.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

namespace misa::guard {
namespace {

constexpr uint32_t kLeastWindow = 12;
constexpr uint32_t kMostWindow = 1024;  // the work is its square
constexpr uint32_t kMostRelapses = 4;
constexpr double kAsHigh = 0.85;

// What is left of the values once their straight trend is taken out.
std::vector<double> WithoutTrend(const std::vector<double>& values) {
  const double count = static_cast<double>(values.size());
  const double middle = (count - 1) / 2;
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / count;
  double product = 0;
  double squares = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double at = static_cast<double>(i) - middle;
    product += at * (values[i] - mean);
    squares += at * at;
  }
  const double slope = product / squares;
  std::vector<double> rest(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    rest[i] = values[i] - mean - slope * (static_cast<double>(i) - middle);
  }
  return rest;
}

}  // namespace

std::string CheckSwings(const SwingOptions& options) {
  if (options.window < kLeastWindow || options.window > kMostWindow) {
    return "The window in which swings of the loss are looked for must be from 12 to 1024 steps, and is " +
           std::to_string(options.window) + ".";
  }
  if (!(options.correlation > 0 && options.correlation < 1)) {
    return "The autocorrelation of a swing must be above 0 and below 1, and is " + std::to_string(options.correlation) +
           ".";
  }
  if (!(options.least_amplitude >= 0) || !std::isfinite(options.least_amplitude)) {
    return "The least amplitude of a swing must be a finite number of at least 0, and is " +
           std::to_string(options.least_amplitude) + ".";
  }
  return "";
}

Swing FindSwing(const std::vector<double>& losses, const SwingOptions& options) {
  Swing swing;
  const size_t count = losses.size();
  if (count < kLeastWindow) return swing;
  const std::vector<double> rest = WithoutTrend(losses);
  const double squares = std::inner_product(rest.begin(), rest.end(), rest.begin(), 0.0);
  const double mean = std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(count);
  if (!(squares > 0) || !std::isfinite(squares)) return swing;
  swing.amplitude = std::sqrt(squares / static_cast<double>(count)) / std::max(std::abs(mean), 1e-300);
  if (swing.amplitude < options.least_amplitude) return swing;
  const size_t longest = count / 3;
  std::vector<double> correlation(2 * longest + 1, 0);
  for (size_t lag = 1; lag <= 2 * longest; ++lag) {
    double product = 0;
    for (size_t i = 0; i + lag < count; ++i) product += rest[i] * rest[i + lag];
    // The fewer pairs there are, the smaller the sum: the mean product counts.
    correlation[lag] = product / static_cast<double>(count - lag) * static_cast<double>(count) / squares;
  }
  size_t from = 1;
  while (from <= longest && correlation[from] >= 0) ++from;
  if (from > longest) return swing;
  const double highest = *std::max_element(correlation.begin() + static_cast<ptrdiff_t>(from),
                                           correlation.begin() + static_cast<ptrdiff_t>(longest) + 1);
  if (highest <= 0) return swing;
  // Twice the period correlates as well as the period: the first hill that is about as high is the one.
  size_t peak = from;
  while (correlation[peak] < kAsHigh * highest) ++peak;
  for (size_t lag = peak; lag <= longest && correlation[lag] >= kAsHigh * highest; ++lag) {
    if (correlation[lag] > correlation[peak]) peak = lag;
  }
  swing.period_steps = static_cast<uint32_t>(peak);
  swing.correlation = correlation[peak];
  // A whole number of steps is not the exact period: twice as far the peak may be one step aside.
  const size_t twice = 2 * swing.period_steps;
  double again = correlation[twice];
  if (twice + 1 < correlation.size()) again = std::max(again, correlation[twice + 1]);
  again = std::max(again, correlation[twice - 1]);
  swing.periodic = swing.correlation >= options.correlation && again >= options.correlation / 2;
  return swing;
}

std::string CheckResponse(const SwingResponse& response) {
  if (!(response.alpha_factor >= 1) || !(response.hot_step >= 0) || !std::isfinite(response.alpha_factor) ||
      !std::isfinite(response.hot_step)) {
    return "Against swings alpha_factor must be at least 1 and hot_step at least 0; they are " +
           std::to_string(response.alpha_factor) + " and " + std::to_string(response.hot_step) + ".";
  }
  if (!(response.most_alpha > 0 && response.most_alpha <= 1) || !(response.most_hot > 0 && response.most_hot <= 1)) {
    return "The most that alpha and the hot threshold are raised to lies above 0 and up to 1; they are " +
           std::to_string(response.most_alpha) + " and " + std::to_string(response.most_hot) + ".";
  }
  if (response.most_levels == 0 || response.calm_steps == 0) {
    return "Against swings there must be at least 1 level and 1 calm step.";
  }
  return "";
}

SwingGuard::SwingGuard(SwingOptions options, SwingResponse response) {
  if (CheckSwings(options).empty()) options_ = options;
  if (CheckResponse(response).empty()) response_ = response;
}

SwingGuard::Change SwingGuard::Observe(double loss) {
  if (!std::isfinite(loss)) return Change::kNone;
  if (losses_.size() == options_.window) losses_.erase(losses_.begin());
  losses_.push_back(loss);
  if (losses_.size() < options_.window) return Change::kNone;
  swing_ = FindSwing(losses_, options_);
  if (swing_.periodic) {
    calm_ = 0;
    if (level_ == response_.most_levels) return Change::kNone;
    ++level_;
    losses_.clear();
    return Change::kRaised;
  }
  if (level_ == 0) return Change::kNone;
  const uint64_t needed = static_cast<uint64_t>(response_.calm_steps) << relapses_;
  if (++calm_ < needed) return Change::kNone;
  // Whether they were over or only held down shows now; the next time it takes longer.
  relapses_ = std::min(relapses_ + 1, kMostRelapses);
  calm_ = 0;
  level_ = 0;
  losses_.clear();
  return Change::kUndone;
}

Thresholds SwingGuard::Apply(const Thresholds& base) const {
  Thresholds raised = base;
  for (uint32_t i = 0; i < level_; ++i) {
    raised.alpha = std::min(raised.alpha * response_.alpha_factor, std::max(base.alpha, response_.most_alpha));
    raised.hot = std::min(raised.hot + response_.hot_step, std::max(base.hot, response_.most_hot));
  }
  return raised;
}

}  // namespace misa::guard
