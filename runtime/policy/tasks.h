// Tasks: named parts of one training that take turns. Each has an importance of its own for every module; what is decided
// for the whole training goes by their mean, weighted by task.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace misa::policy {

inline constexpr size_t kMostTasks = 16;  // with a name
inline constexpr size_t kMostTaskNameBytes = 64;
inline constexpr double kMostTaskWeight = 1000;

struct Task {
  std::string name;  // "": of steps that belong to no task
  double weight = 1;
  uint64_t steps = 0;

  bool operator==(const Task&) const = default;
};

// "", or a sentence: a name that is empty, too long or has control characters in it, or a weight that is no number above 0
// and up to kMostTaskWeight.
std::string CheckTask(const std::string& name, double weight);

// The tasks of one training, by number in the order in which they came. Number 0 is what belongs to no task.
class TaskTable {
 public:
  // The number of the task of this name, a new one perhaps, whose weight is this from now on. "" is number 0, whose weight
  // is 1 whatever is said. A sentence as CheckTask's, or for one task too many; nothing changes then.
  std::string Enter(const std::string& name, double weight, uint32_t* task);
  // Each Enter that comes is an error now unless its name is known.
  void Close() { closed_ = true; }
  void CountStep(uint32_t task) { ++tasks_[task].steps; }
  // In place of all that there were; they must be what a table can have.
  void Assign(std::vector<Task> tasks) { tasks_ = std::move(tasks); }

  const std::vector<Task>& tasks() const { return tasks_; }
  size_t size() const { return tasks_.size(); }
  // Each task's part of the whole by weight, among those that have made a step; all 0 before the first step.
  std::vector<double> Shares() const;

 private:
  std::string Known() const;

  std::vector<Task> tasks_ = std::vector<Task>(1);
  bool closed_ = false;
};

// The sum of share times value. Not above the largest value, so that finite values have a finite mean; one task with all of
// it gives its value, to the bit.
double WeightedMean(const std::vector<double>& shares, const std::vector<double>& values);

}  // namespace misa::policy
