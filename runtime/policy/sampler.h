// Module-wise importance sampling as in the paper (arXiv 2511.00056): softmax over importance, drawn without
// replacement up to a share delta of the parameters, kept for T optimizer steps.
// Deterministic: equal options and equal statistics give equal draws on every machine, and Serialize/Restore resumes
// exactly, in the middle of a round too.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/guard/dependencies.h"
#include "runtime/policy/importance.h"
#include "runtime/policy/tasks.h"

namespace misa::policy {

struct SamplerOptions {
  double delta = 0.03;       // share of the samplable parameters trained in a round, (0, 1]
  double eta = 1.0;          // softmax(eta * G); 0 draws uniformly
  double alpha = 0.1;        // G <- (1 - alpha) * G + alpha * mean over the round of the scaled squared norm (beta = 1 - alpha)
  uint32_t inner_steps = 50; // T, at least 1
  uint64_t seed = 0;
  // Between modules by name: what is drawn with what, and what never in one round.
  std::vector<guard::Dependency> dependencies = {};
};

struct SamplerModule {
  std::string name;
  uint64_t parameter_count = 0;
  // Of the options' dependencies, by the sampler: indices of all modules that are drawn with this one, and of all that are
  // not drawn in a round with it, ascending.
  std::vector<uint32_t> needs = {};
  std::vector<uint32_t> apart = {};
};

// An empty string, or a sentence: options out of range, no modules, a module without parameters, dependencies that cannot be
// (guard::Resolve), or delta under the smallest module's share, with what it needs (the sentence names that module, its
// share, and the smallest delta that works).
std::string CheckSampler(const SamplerOptions& options, const std::vector<SamplerModule>& modules);

class ModuleSampler {
 public:
  // CheckSampler must have returned "". Draws the first round's set at once.
  ModuleSampler(SamplerOptions options, std::vector<SamplerModule> modules);

  // Indices into `modules` that are trained in this round, ascending. Never empty: modules are drawn until the next one
  // would take the share past delta, but as long as none was taken, one that is larger than delta by itself is put aside
  // and the draw goes on among the rest. A module counts with what it needs, and one that is to be apart from what was
  // taken is put aside as well.
  const std::vector<uint32_t>& active() const { return active_; }
  uint64_t round() const { return round_; }
  // Optimizer steps done in this round, 0 … inner_steps - 1.
  uint32_t step_in_round() const { return step_in_round_; }

  // Gradient statistics of one active module of the present step. Several calls for one module in a step (accumulation)
  // keep the last. A sentence for a module that is not active or for non-finite statistics; nothing changes then.
  // Statistics of no elements count as not observed. The mean over the round is taken over the steps observed, which is
  // the paper's (1/T) * sum when every step was; a module not observed in the whole round keeps its G.
  std::string Observe(uint32_t module, const GradientStatistics& statistics);

  // The number of a task, for EndStep, and its weight from now on. Each task has a G of its own, which its steps alone
  // change; draws go by their mean, weighted by task. A sentence as TaskTable::Enter's; nothing changes then.
  std::string EnterTask(const std::string& name, double weight, uint32_t* task) {
    std::string error = tasks_.Enter(name, weight, task);
    of_task_.resize(tasks_.size(), OfTask(modules_.size()));
    return error;
  }

  // Ends an optimizer step, of this task. True when that ended the round: G is updated and the next set drawn; `active()`
  // is then the new set. The step counts as so many inner steps (guard::CountedSteps), at least 1.
  bool EndStep(uint32_t counted_steps = 1, uint32_t task = 0);

  // Over the whole state (generator, G, round, active set, sums): equal digests mean equal future draws.
  uint64_t Digest() const;
  std::vector<uint8_t> Serialize() const;
  // A sentence for damaged bytes, or bytes of other modules or other options (the seed apart: the saved generator goes
  // on); nothing changes then.
  std::string Restore(const std::vector<uint8_t>& bytes);

  // G as the present set was drawn with.
  const std::vector<double>& importance() const { return g_; }
  const std::vector<Task>& tasks() const { return tasks_.tasks(); }

 private:
  struct OfTask {
    explicit OfTask(size_t modules) : g(modules, 0), round_sum(modules, 0), round_count(modules, 0) {}
    std::vector<double> g;
    std::vector<double> round_sum;      // of the scaled squared norm, this round
    std::vector<uint32_t> round_count;  // steps of this round in which the module was observed
  };

  void MixTasks();
  void Draw();
  double Uniform();  // [0, 1), from the counter-based generator

  SamplerOptions options_;
  std::vector<SamplerModule> modules_;
  uint64_t total_parameters_ = 0;
  TaskTable tasks_;  // of their steps only whether there were any counts
  std::vector<OfTask> of_task_;
  std::vector<double> g_;           // mean of the tasks'
  std::vector<double> step_value_;  // this step's, negative where none
  std::vector<uint32_t> active_;
  uint64_t round_ = 0;
  uint32_t step_in_round_ = 0;
  uint64_t generator_[2] = {0, 0};     // key and counter
};

}  // namespace misa::policy
