// Importance of modules from their gradient statistics: S <- alpha * G + (1 - alpha) * S, G of the last `window` steps.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/policy/tasks.h"

namespace misa::policy {

// Sums over one module's complete gradient, in double precision.
struct GradientStatistics {
  double sum = 0;
  double sum_squares = 0;
  uint64_t count = 0;  // number of elements; 0 where the module had no gradient
};

// sum_squares / count - (sum / count)^2, not below 0; 0 for count 0.
double Variance(const GradientStatistics& statistics);
// Squared norm scaled by the number of parameters: sum_squares / count; 0 for count 0.
double ScaledSquaredNorm(const GradientStatistics& statistics);
// An empty string, or a sentence for statistics that are not finite or whose sum of squares is negative.
std::string CheckStatistics(const GradientStatistics& statistics);

enum class Signal : uint8_t { kVariance, kSquaredNorm };

// Sums over the last observations. Nothing is subtracted when one leaves: what a huge value left behind by rounding would
// outlive it by far. Two stacks instead, of which the older one holds sums to its end.
class PooledStatistics {
 public:
  // At most `window` observations stay; at least 1.
  void Push(const GradientStatistics& statistics, uint32_t window);
  GradientStatistics pooled() const;
  size_t size() const { return older_.size() + newer_.size(); }

 private:
  std::vector<GradientStatistics> older_;  // the oldest last: the sum of it and of all that came into this stack after it
  std::vector<GradientStatistics> newer_;  // as they came
  GradientStatistics newer_sum_;
};

class ImportanceTracker {
 public:
  struct Options {
    double alpha = 0.25;  // seed: 0.2-0.3
    Signal signal = Signal::kVariance;
    double hot = 0.75;   // rank from which a module becomes hot
    double cold = 0.35;  // rank down to which it becomes cold; between them it stays what it was
    uint32_t window = 50;  // steps whose statistics are pooled into G; seed: 50-100
    bool operator==(const Options&) const = default;
  };
  enum class Heat : uint8_t { kCold, kWarm, kHot };

  // Impossible options are left out in favour of the defaults; ask SetOptions for the sentence.
  ImportanceTracker(size_t modules, Options options);
  // Replaces the options; keeps S. Returns a sentence when they are impossible, and changes nothing then.
  std::string SetOptions(Options options);
  // A step of this task begins: what is observed from here on is its; "" for a step of none. Each task has an S of its own.
  // A sentence as TaskTable::Enter's; the step belongs to no task then.
  std::string BeginStep(const std::string& task, double weight);
  // Folds one step's statistics of module in; the first observation sets S. Non-finite statistics are refused with a
  // sentence, and S stays. Statistics of no elements (no gradient in this step) leave S as it is.
  std::string Observe(size_t module, const GradientStatistics& statistics);
  void Resize(size_t modules);
  // A window of its own for one module, in place of the options'; 0: the options' again. From the next observation on.
  void SetWindow(size_t module, uint32_t window);

  const Options& options() const { return options_; }
  // S; of several tasks the weighted mean of theirs.
  double importance(size_t module) const;
  const std::vector<Task>& tasks() const { return tasks_.tasks(); }
  // By task, as in tasks().
  std::vector<double> shares() const { return tasks_.Shares(); }
  // Share of modules whose importance is below, in [0, 1]; ties share the mean rank.
  std::vector<double> Ranks() const;
  // With hysteresis: updates from the present ranks and returns every module's heat.
  const std::vector<Heat>& UpdateHeat();

 private:
  struct OfTask {
    std::vector<double> importance;
    std::vector<PooledStatistics> pooled;
    std::vector<bool> observed;
  };

  Options options_;
  TaskTable tasks_;
  std::vector<OfTask> of_task_ = std::vector<OfTask>(1);
  uint32_t task_ = 0;  // of the present step
  std::vector<uint32_t> windows_;  // 0: the options'
  std::vector<Heat> heat_;
};

}  // namespace misa::policy
