#include "runtime/capacity/predict.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "runtime/memory/byte_size.h"
#include "runtime/policy/session_plan.h"

namespace misa::capacity {
namespace {

// A step that stalls for less than this share is as fast as its compute.
constexpr double kNoStall = 0.02;
constexpr uint64_t kMostBatch = 4096;
// A sequence cut to less than this share is another training, not a near change.
constexpr double kNearSequence = 0.5;

uint64_t SumOf(const std::vector<uint64_t>& bytes) {
  uint64_t sum = 0;
  for (const uint64_t b : bytes) {
    sum += b;
  }
  return sum;
}

void AddPart(trace::FacetKind kind, uint64_t bytes, Parts* parts) {
  switch (kind) {
    case trace::FacetKind::kWeights: parts->weights_bytes += bytes; break;
    case trace::FacetKind::kGradients: parts->gradients_bytes += bytes; break;
    case trace::FacetKind::kOptimizer: parts->optimizer_bytes += bytes; break;
    case trace::FacetKind::kUnknown: break;
  }
}

// What is on the device where that is most: the plan followed for two periods, the first of them to get into step.
Parts PeakOf(const Workload& workload, const policy::PlanInput& input, const policy::Plan& plan) {
  std::vector<uint8_t> present(input.facet_bytes.size(), 0);
  Parts held;
  const auto set = [&](uint32_t facet, bool there) {
    if ((present[facet] != 0) == there) {
      return;
    }
    present[facet] = there ? 1 : 0;
    const uint64_t bytes = input.facet_bytes[facet];
    AddPart(workload.facets[facet].kind, there ? bytes : 0 - bytes, &held);  // unsigned: adding 0 - b takes b away
  };
  Parts peak;
  for (int period = 0; period < 2; ++period) {
    size_t next = 0;
    const auto follow = [&](uint64_t position, bool all) {
      for (; next < plan.actions.size(); ++next) {
        const policy::Action& action = plan.actions[next];
        const bool load = action.kind == policy::Action::kLoad;
        if (!all && (load ? action.position > position : action.position >= position)) {
          break;
        }
        set(action.facet, load);
      }
    };
    for (uint64_t p = 0; p < input.trace.entries.size(); ++p) {
      const policy::TraceEntry& entry = input.trace.entries[p];
      follow(p, false);
      for (const policy::Use& use : entry.uses) {
        set(use.facet, true);
      }
      held.activations_bytes = entry.other_bytes;
      if (period == 1 && held.total() > peak.total()) {
        peak = held;
      }
      for (const policy::Use& use : entry.uses) {
        if ((use.access & policy::kDiscard) != 0) {
          set(use.facet, false);
        }
      }
    }
    follow(0, true);
  }
  return peak;
}

// The position that needs most at once: what it holds.
Parts FullestOf(const Workload& workload, const policy::PlanInput& input) {
  Parts fullest;
  for (const policy::TraceEntry& entry : input.trace.entries) {
    Parts parts;
    for (const policy::Use& use : entry.uses) {
      AddPart(workload.facets[use.facet].kind, input.facet_bytes[use.facet], &parts);
    }
    parts.activations_bytes = entry.other_bytes;
    if (parts.total() >= fullest.total()) {
      fullest = parts;
    }
  }
  return fullest;
}

// Everything at once: no facet ever goes, gradients come and go as the trace says.
uint64_t PlainOf(const policy::PlanInput& input) {
  uint64_t held = 0;
  std::vector<uint8_t> present(input.facet_bytes.size(), 0);
  // What no use creates is there from the beginning.
  std::vector<uint8_t> created(input.facet_bytes.size(), 0);
  for (const policy::TraceEntry& entry : input.trace.entries) {
    for (const policy::Use& use : entry.uses) {
      created[use.facet] |= (use.access & policy::kCreate) != 0 ? 1 : 0;
    }
  }
  uint64_t peak = 0;
  for (size_t f = 0; f < present.size(); ++f) {
    present[f] = created[f] == 0 ? 1 : 0;
    held += present[f] != 0 ? input.facet_bytes[f] : 0;
  }
  for (int period = 0; period < 2; ++period) {
    for (const policy::TraceEntry& entry : input.trace.entries) {
      for (const policy::Use& use : entry.uses) {
        if (std::exchange(present[use.facet], 1) == 0) {
          held += input.facet_bytes[use.facet];
        }
      }
      peak = std::max(peak, held + entry.other_bytes);
      for (const policy::Use& use : entry.uses) {
        if ((use.access & policy::kDiscard) != 0 && std::exchange(present[use.facet], 0) != 0) {
          held -= input.facet_bytes[use.facet];
        }
      }
    }
  }
  return peak;
}

// What is known without a plan: whether it fits.
policy::Result<Prediction> Measure(const Question& question, Workload* workload) {
  policy::Result<Prediction> result;
  policy::Result<Workload> made = MakeWorkload(question.model, question.device, question.training);
  if (!made.ok()) {
    result.error = made.error;
    return result;
  }
  *workload = std::move(made.value);
  policy::PlanInput& input = workload->input;
  const DeviceProfile& device = question.device;
  const uint64_t most = device.capacity_bytes - device.base_line_bytes;
  input.budget_bytes = question.budget_bytes == 0 ? DefaultBudget(device) : question.budget_bytes;
  if (input.budget_bytes > most) {
    result.error = "A budget of " + FormatByteSize(input.budget_bytes) + " is more than " + device.name + " has: " +
                   FormatByteSize(device.capacity_bytes) + ", of which " + FormatByteSize(device.base_line_bytes) +
                   " go to the driver and libraries.";
    return result;
  }
  input.reserve_bytes = policy::SessionReserve(input.budget_bytes);
  Prediction& prediction = result.value;
  prediction.budget_bytes = input.budget_bytes;
  prediction.smallest_budget_bytes = policy::SmallestBudget(input);
  prediction.host_bytes = SumOf(input.facet_bytes);
  prediction.plain_bytes = PlainOf(input) + device.base_line_bytes;
  prediction.state = workload->state;
  prediction.trained_parameters = workload->trained_parameters;
  prediction.tokens = workload->tokens;
  prediction.compute_seconds = workload->compute_seconds;
  prediction.fits = true;
  if (prediction.smallest_budget_bytes > input.budget_bytes) {
    prediction.fits = false;
    prediction.limited_by = "memory";
    prediction.reason = "Its largest moment needs " + FormatByteSize(prediction.smallest_budget_bytes) +
                        " on the device at once, and the budget is " + FormatByteSize(input.budget_bytes) + ".";
  } else if (device.host_bytes > 0 && prediction.host_bytes > device.host_bytes) {
    prediction.fits = false;
    prediction.limited_by = "host memory";
    prediction.reason = "Its training state of " + FormatByteSize(prediction.host_bytes) +
                        " has to find room in the tier below, which has " + FormatByteSize(device.host_bytes) + ".";
  }
  return result;
}

// With a plan, where it fits.
policy::Result<Prediction> Plan(const Question& question) {
  Workload workload;
  policy::Result<Prediction> result = Measure(question, &workload);
  if (!result.ok()) {
    return result;
  }
  Prediction& prediction = result.value;
  const policy::PlanInput& input = workload.input;
  if (!prediction.fits) {
    prediction.parts = FullestOf(workload, input);
  } else {
    const policy::Result<policy::Plan> plan = policy::MakePlan(input);
    const policy::Result<policy::Bound> bound = policy::LowerBound(input);
    if (!plan.ok() || !bound.ok()) {
      result.error = plan.ok() ? bound.error : plan.error;
      return result;
    }
    prediction.step_seconds = plan.value.step_seconds;
    prediction.stall_seconds = plan.value.stall_seconds;
    prediction.loaded_bytes = plan.value.loaded_bytes;
    prediction.unloaded_bytes = plan.value.unloaded_bytes;
    prediction.bound_step_seconds = bound.value.step_seconds;
    prediction.bound_load_bytes = bound.value.load_bytes;
    prediction.bound_unload_bytes = bound.value.unload_bytes;
    prediction.tokens_per_second = static_cast<double>(workload.tokens) / plan.value.step_seconds;
    prediction.limited_by = plan.value.stall_seconds <= kNoStall * plan.value.step_seconds ? "compute" : "link";
    prediction.parts = PeakOf(workload, input, plan.value);
  }
  prediction.parts.reserve_bytes = input.reserve_bytes;
  prediction.parts.base_line_bytes = question.device.base_line_bytes;
  prediction.peak_bytes = prediction.parts.total();
  return result;
}

bool Fits(const Question& question) {
  Workload workload;
  const policy::Result<Prediction> measured = Measure(question, &workload);
  return measured.ok() && measured.value.fits;
}

// The largest number of at most `most` that `holds`, where what is smaller holds too; 0 where 1 does not.
uint64_t Largest(uint64_t most, const std::function<bool(uint64_t)>& holds) {
  uint64_t low = 0;
  uint64_t high = most + 1;
  while (high - low > 1) {
    const uint64_t middle = low + (high - low) / 2;
    (holds(middle) ? low : high) = middle;
  }
  return low;
}

class Adviser {
 public:
  explicit Adviser(const Question& question) : asked_(question) {}

  std::vector<Suggestion> Suggest(const Prediction& prediction) {
    Budget(prediction);
    HostMemory(prediction);
    for (const Change& change : changes_) {
      Try({change});
    }
    Batch({});
    // More often than not what a batch too large needs as well.
    const Change& checkpointing = changes_.front();
    const auto alone = [&](const Suggestion& suggestion) { return suggestion.change == checkpointing.name; };
    if (std::none_of(found_.begin(), found_.end(), alone)) {
      Batch({checkpointing});
    }
    Sequence({}, kNearSequence);
    // Where no one change does, pairs of them, and with the largest batch that fits.
    if (found_.empty()) {
      for (size_t i = 0; i < changes_.size(); ++i) {
        for (size_t j = i + 1; j < changes_.size() && found_.empty(); ++j) {
          Try({changes_[i], changes_[j]});
        }
      }
    }
    if (found_.empty()) {
      std::vector<Change> all;
      for (const Change& change : changes_) {
        all.push_back(change);
        Batch(all);
        if (!found_.empty()) {
          break;
        }
      }
      if (found_.empty()) {
        Sequence(all, 0);
      }
    }
    if (found_.empty()) {
      Device();
    }
    return std::move(found_);
  }

 private:
  struct Change {
    std::string name;
    std::function<bool(Question*)> apply;  // false where it changes nothing
  };

  // Applies what can be applied; "" where nothing could.
  static std::string Apply(const std::vector<Change>& changes, Question* question) {
    std::string name;
    for (const Change& change : changes) {
      if (!change.apply(question)) {
        return "";
      }
      name += (name.empty() ? "" : ", ") + change.name;
    }
    return name;
  }

  void Add(const std::string& change, const Question& question) {
    const policy::Result<Prediction> plan = Plan(question);
    if (!plan.ok() || !plan.value.fits) {
      return;
    }
    const Prediction& p = plan.value;
    found_.push_back({change, p.smallest_budget_bytes, p.host_bytes, p.step_seconds, p.tokens_per_second});
  }

  void Try(const std::vector<Change>& changes) {
    Question question = asked_;
    const std::string name = Apply(changes, &question);
    if (!name.empty()) {
      Add(name, question);
    }
  }

  void Budget(const Prediction& prediction) {
    if (prediction.limited_by != "memory") {
      return;
    }
    Question question = asked_;
    question.budget_bytes = asked_.device.capacity_bytes - asked_.device.base_line_bytes;
    // The reserve grows with the budget, so that the smallest one is asked for anew; whole MiB are easier to type.
    constexpr uint64_t kMiB = uint64_t{1} << 20;
    Workload workload;
    const policy::Result<Prediction> largest = Measure(question, &workload);
    if (!largest.ok() || !largest.value.fits) {
      return;
    }
    question.budget_bytes =
        std::min(question.budget_bytes, (largest.value.smallest_budget_bytes + kMiB - 1) / kMiB * kMiB);
    Add("budget " + FormatByteSize(question.budget_bytes), question);
  }

  void HostMemory(const Prediction& prediction) {
    if (prediction.limited_by != "host memory") {
      return;
    }
    Question question = asked_;
    question.device.host_bytes = prediction.host_bytes;
    Add("host memory " + FormatByteSize(prediction.host_bytes), question);
  }

  void Batch(const std::vector<Change>& changes) {
    Question question = asked_;
    const std::string name = Apply(changes, &question);
    if (name.empty() && !changes.empty()) {
      return;
    }
    const uint64_t batch = Largest(asked_.training.batch - 1, [&](uint64_t candidate) {
      question.training.batch = candidate;
      return Fits(question);
    });
    if (batch > 0) {
      question.training.batch = batch;
      Add(name + (name.empty() ? "" : ", ") + "batch " + std::to_string(batch), question);
    }
  }

  // The longest sequence that fits, where that is at least `least_share` of what was asked for.
  void Sequence(const std::vector<Change>& changes, double least_share) {
    Question question = asked_;
    const std::string name = Apply(changes, &question);
    if (name.empty() && !changes.empty()) {
      return;
    }
    Workload workload;
    const policy::Result<Prediction> asked = Measure(question, &workload);
    if (!asked.ok()) {
      return;
    }
    // Sequences of multiples of 128: what kernels and people use.
    constexpr uint64_t kStep = 128;
    const uint64_t now = asked.value.tokens / question.training.batch;
    const uint64_t steps = now > kStep ? (now - 1) / kStep : 0;
    const uint64_t sequence = kStep * Largest(steps, [&](uint64_t candidate) {
                                question.training.sequence = candidate * kStep;
                                return Fits(question);
                              });
    if (sequence > 0 && static_cast<double>(sequence) >= least_share * static_cast<double>(now)) {
      question.training.sequence = sequence;
      Add(name + (name.empty() ? "" : ", ") + "sequence " + std::to_string(sequence), question);
    }
  }

  void Device() {
    for (const DeviceProfile& device : KnownDevices()) {
      Question question = asked_;
      question.device = device;
      question.device.host_bytes = asked_.device.host_bytes;
      question.budget_bytes = 0;
      if (Fits(question)) {
        Add("device " + device.name, question);
        return;
      }
    }
  }

  const Question& asked_;
  std::vector<Suggestion> found_;
  const std::vector<Change> changes_ = {
      {"checkpointing", [](Question* q) { return !std::exchange(q->training.checkpointing, true); }},
      {"fused attention", [](Question* q) { return !std::exchange(q->training.fused_attention, true); }},
      {"step in_backward",
       [](Question* q) {
         return std::exchange(q->training.update, Update::kInBackward) != Update::kInBackward;
       }},
      {"mode sampled",
       [](Question* q) {
         const bool exact = q->training.mode == Mode::kExact;
         q->training.mode = exact ? Mode::kSampled : q->training.mode;
         return exact;
       }},
      {"half the delta",
       [](Question* q) {
         q->training.delta /= 2;
         return q->training.mode != Mode::kExact;
       }},
      {"8-bit adamw",
       [](Question* q) {
         const bool adam = q->training.optimizer == "adamw" || q->training.optimizer == "adam";
         q->training.optimizer = adam ? "adamw-8bit" : q->training.optimizer;
         return adam;
       }},
  };
};

// The least batch whose bound is its compute, and whose plan does not wait either.
std::optional<uint64_t> HiddenFrom(const Question& asked) {
  Question question = asked;
  for (uint64_t batch = asked.training.batch * 2; batch <= kMostBatch; batch *= 2) {
    question.training.batch = batch;
    if (!Fits(question)) {
      return std::nullopt;
    }
    const policy::Result<Prediction> plan = Plan(question);
    if (plan.ok() && plan.value.limited_by == "compute") {
      return batch;
    }
  }
  return std::nullopt;
}

}  // namespace

uint64_t DefaultBudget(const DeviceProfile& device) {
  const auto kept = static_cast<uint64_t>(static_cast<double>(device.capacity_bytes) * device.watermark);
  return device.capacity_bytes - kept - device.base_line_bytes;
}

policy::Result<Prediction> Predict(const Question& question) {
  policy::Result<Prediction> result = Plan(question);
  if (!result.ok()) {
    return result;
  }
  if (!result.value.fits) {
    result.value.suggestions = Adviser(question).Suggest(result.value);
  } else if (result.value.limited_by == "link") {
    result.value.hidden_from_batch = HiddenFrom(question);
  }
  return result;
}

}  // namespace misa::capacity
