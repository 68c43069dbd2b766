// A loss that swings to and fro with a period, and what is done about it while it does.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace misa::guard {

struct SwingOptions {
  uint32_t window = 96;           // losses that are looked at, at least 12; periods of up to a third of them are found
  double correlation = 0.5;       // autocorrelation that a period needs, in (0, 1)
  double least_amplitude = 0.01;  // standard deviation around the trend, as a share of the loss: less is no trouble

  bool operator==(const SwingOptions&) const = default;
};

struct Swing {
  bool periodic = false;
  uint32_t period_steps = 0;
  double correlation = 0;
  double amplitude = 0;  // standard deviation around the trend, as a share of the loss
};

// "" or a sentence for options that are impossible.
std::string CheckSwings(const SwingOptions& options);

// The period of the losses, if they have one. The straight trend is taken out; then the autocorrelation must first go
// below 0, peak at the period with at least `correlation`, and still have half of that at twice the period. One bad
// step, or two, has no such second peak, and a loss that merely falls, however bent, has not the first.
Swing FindSwing(const std::vector<double>& losses, const SwingOptions& options);

struct Thresholds {
  double alpha = 0;
  double hot = 0;

  bool operator==(const Thresholds&) const = default;
};

// What is raised, a level at a time. Seed: alpha from 0.1 to 0.15, the hot threshold from 0.85 to 0.9.
struct SwingResponse {
  double alpha_factor = 1.5;  // at least 1
  double hot_step = 0.05;     // at least 0
  double most_alpha = 0.9;
  double most_hot = 0.95;
  uint32_t most_levels = 4;
  uint32_t calm_steps = 200;  // without a swing before all is undone; twice as many after each relapse, up to 16 times

  bool operator==(const SwingResponse&) const = default;
};

std::string CheckResponse(const SwingResponse& response);

// A larger alpha takes out the lag by which importance follows the gradients, which is what makes modules take turns; a
// higher hot threshold widens the hysteresis, so that fewer modules change sides for a while.
class SwingGuard {
 public:
  enum class Change : uint8_t { kNone, kRaised, kUndone };

  // Impossible options are left out in favour of the defaults.
  explicit SwingGuard(SwingOptions options = {}, SwingResponse response = {});

  // A loss that is not finite is left out.
  Change Observe(double loss);
  uint32_t level() const { return level_; }
  const Swing& swing() const { return swing_; }
  // `base` raised by the present level; never below base.
  Thresholds Apply(const Thresholds& base) const;

 private:
  SwingOptions options_;
  SwingResponse response_;
  std::vector<double> losses_;  // since the last change, at most `window`: the effect of a change is judged by itself
  Swing swing_;
  uint32_t level_ = 0;
  uint32_t calm_ = 0;
  uint32_t relapses_ = 0;
};

}  // namespace misa::guard
