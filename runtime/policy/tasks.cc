#include "runtime/policy/tasks.h"

#include <algorithm>
#include <cmath>

namespace misa::policy {

std::string CheckTask(const std::string& name, double weight) {
  if (name.empty()) {
    return "A task needs a name, and this one is empty.";
  }
  if (name.size() > kMostTaskNameBytes) {
    return "A task's name has at most " + std::to_string(kMostTaskNameBytes) + " bytes, and this one has " +
           std::to_string(name.size()) + ".";
  }
  if (std::any_of(name.begin(), name.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; })) {
    return "A task's name is one line of text; this one has control characters in it.";
  }
  if (!(weight > 0 && weight <= kMostTaskWeight)) {
    return "The weight of task \"" + name + "\" must be a number above 0 and at most " +
           std::to_string(static_cast<int>(kMostTaskWeight)) + ", and is " + std::to_string(weight) + ".";
  }
  return "";
}

std::string TaskTable::Known() const {
  std::string names;
  for (size_t i = 1; i < tasks_.size(); ++i) {
    names += (names.empty() ? "\"" : ", \"") + tasks_[i].name + "\"";
  }
  return names;
}

std::string TaskTable::Enter(const std::string& name, double weight, uint32_t* task) {
  if (name.empty()) {
    *task = 0;
    return "";
  }
  if (std::string error = CheckTask(name, weight); !error.empty()) {
    return error;
  }
  const auto known =
      std::find_if(tasks_.begin() + 1, tasks_.end(), [&](const Task& candidate) { return candidate.name == name; });
  if (known != tasks_.end()) {
    known->weight = weight;
    *task = static_cast<uint32_t>(known - tasks_.begin());
    return "";
  }
  if (closed_) {
    return "There is no task \"" + name + "\"; this training has " + Known() + ".";
  }
  if (tasks_.size() > kMostTasks) {
    return "A training has at most " + std::to_string(kMostTasks) + " tasks, and \"" + name + "\" is one too many beside " +
           Known() + ".";
  }
  tasks_.push_back({name, weight, 0});
  *task = static_cast<uint32_t>(tasks_.size() - 1);
  return "";
}

std::vector<double> TaskTable::Shares() const {
  double total = 0;
  for (const Task& task : tasks_) {
    total += task.steps > 0 ? task.weight : 0;
  }
  std::vector<double> shares(tasks_.size(), 0);
  for (size_t i = 0; i < tasks_.size(); ++i) {
    shares[i] = tasks_[i].steps > 0 ? tasks_[i].weight / total : 0;
  }
  return shares;
}

double WeightedMean(const std::vector<double>& shares, const std::vector<double>& values) {
  double mean = 0;
  double largest = 0;
  for (size_t i = 0; i < shares.size(); ++i) {
    mean += shares[i] * values[i];
    largest = shares[i] > 0 ? std::max(largest, values[i]) : largest;
  }
  // Shares may add up to a rounding error more than 1.
  return std::min(mean, largest);
}

}  // namespace misa::policy
