#include "runtime/policy/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <limits>

#include "runtime/policy/fnv.h"
#include "runtime/policy/portable_math.h"
#include "runtime/policy/split_mix.h"

namespace misa::policy {
namespace {

constexpr uint64_t kMagic = 0x31504d415341494dull;  // "MIASAMP1", little end first
// With tasks: theirs follow what a state without any has, which is that of steps of no task.
constexpr uint64_t kMagicWithTasks = 0x32504d415341494dull;
constexpr double kNotObserved = -1;                 // a scaled squared norm is never negative

// Parameters that may be trained in a round. Products of doubles round alike on every machine.
uint64_t Allowance(double delta, uint64_t total) {
  return delta >= 1 ? total : static_cast<uint64_t>(delta * static_cast<double>(total));
}

uint64_t TotalParameters(const std::vector<SamplerModule>& modules) {
  uint64_t total = 0;
  for (const SamplerModule& module : modules) {
    total += module.parameter_count;
  }
  return total;
}

// Of a module and all it needs, without those that are taken already.
uint64_t UnitParameters(const std::vector<SamplerModule>& modules, size_t module, const std::vector<bool>& taken) {
  uint64_t count = taken[module] ? 0 : modules[module].parameter_count;
  for (const uint32_t other : modules[module].needs) {
    if (!taken[other]) count += modules[other].parameter_count;
  }
  return count;
}

uint64_t ModulesDigest(const std::vector<SamplerModule>& modules) {
  Fnv hash;
  for (const SamplerModule& module : modules) {
    hash.Add64(module.name.size());
    for (const char c : module.name) {
      hash.AddByte(static_cast<uint8_t>(c));
    }
    hash.Add64(module.parameter_count);
    // A state saved without dependencies is one of modules without them.
    for (const std::vector<uint32_t>* others : {&module.needs, &module.apart}) {
      if (module.needs.empty() && module.apart.empty()) break;
      hash.Add64(others->size());
      for (const uint32_t other : *others) hash.Add64(other);
    }
  }
  return hash.value();
}

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", value);
  return text;
}

// The share as a short decimal number, rounded up so that it does work as a delta.
std::string WorkingDelta(uint64_t count, uint64_t total) {
  double delta = static_cast<double>(count) / static_cast<double>(total);
  for (int digits = 4; digits <= 17; ++digits) {
    const double unit = std::pow(10.0, std::floor(std::log10(delta)) - digits + 1);
    const double rounded = std::min(1.0, std::ceil(delta / unit) * unit);
    char text[40];
    std::snprintf(text, sizeof text, "%.*g", digits, rounded);
    if (Allowance(std::strtod(text, nullptr), total) >= count) {
      return text;
    }
  }
  return "1";
}

class Writer {
 public:
  void Word(uint64_t word) {
    for (int shift = 0; shift < 64; shift += 8) {
      bytes.push_back(static_cast<uint8_t>(word >> shift));
    }
  }
  void Real(double value) { Word(std::bit_cast<uint64_t>(value)); }
  // Its length, then its bytes, eight to a word.
  void Text(const std::string& text) {
    Word(text.size());
    bytes.insert(bytes.end(), text.begin(), text.end());
    bytes.resize((bytes.size() + 7) / 8 * 8, 0);
  }

  std::vector<uint8_t> bytes;
};

class Reader {
 public:
  explicit Reader(const std::vector<uint8_t>& bytes) : bytes_(bytes) {}
  uint64_t Word() {
    if (bytes_.size() - at_ < 8) {
      good_ = false;
      return 0;
    }
    uint64_t word = 0;
    for (int i = 0; i < 8; ++i) {
      word |= static_cast<uint64_t>(bytes_[at_ + i]) << (8 * i);
    }
    at_ += 8;
    return word;
  }
  double Real() { return std::bit_cast<double>(Word()); }
  std::string Text() {
    const uint64_t size = Word();
    if (size > left()) {
      good_ = false;
      return "";
    }
    std::string text(bytes_.begin() + static_cast<std::ptrdiff_t>(at_),
                     bytes_.begin() + static_cast<std::ptrdiff_t>(at_ + size));
    at_ = std::min(bytes_.size(), (at_ + size + 7) / 8 * 8);
    return text;
  }
  bool good() const { return good_; }
  size_t left() const { return bytes_.size() - at_; }

 private:
  const std::vector<uint8_t>& bytes_;
  size_t at_ = 0;
  bool good_ = true;
};

uint64_t Checksum(const std::vector<uint8_t>& bytes, size_t count) {
  Fnv hash;
  for (size_t i = 0; i < count; ++i) {
    hash.AddByte(bytes[i]);
  }
  return hash.value();
}

// The options' dependencies in the modules.
std::string Tie(const std::vector<guard::Dependency>& dependencies, std::vector<SamplerModule>* modules) {
  if (dependencies.empty()) return "";
  std::vector<std::string> names;
  for (const SamplerModule& module : *modules) names.push_back(module.name);
  guard::ResolvedDependencies resolved;
  std::string error = guard::Resolve(names, dependencies, &resolved);
  if (!error.empty()) return error;
  for (size_t i = 0; i < modules->size(); ++i) {
    (*modules)[i].needs = std::move(resolved.needs[i]);
    (*modules)[i].apart = std::move(resolved.apart[i]);
  }
  return "";
}

}  // namespace

std::string CheckSampler(const SamplerOptions& options, const std::vector<SamplerModule>& untied) {
  std::vector<SamplerModule> modules = untied;
  if (!(options.delta > 0 && options.delta <= 1)) {
    return "The share delta must be above 0 and at most 1, and is " + Number(options.delta) + ".";
  }
  if (!(options.eta >= 0) || !std::isfinite(options.eta)) {
    return "The sharpness eta must be a finite number of at least 0, and is " + Number(options.eta) + ".";
  }
  if (!(options.alpha > 0 && options.alpha <= 1)) {
    return "The smoothing factor alpha must be above 0 and at most 1, and is " + Number(options.alpha) + ".";
  }
  if (options.inner_steps == 0) {
    return "A round needs at least 1 inner step, and inner_steps is 0.";
  }
  if (modules.empty()) {
    return "There are no modules to sample from.";
  }
  if (modules.size() > std::numeric_limits<uint32_t>::max()) {
    return "There are more modules than a 32-bit index can name.";
  }
  uint64_t total = 0;
  for (const SamplerModule& module : modules) {
    if (module.parameter_count == 0) {
      return "Module \"" + module.name + "\" has no parameters, so it cannot be sampled.";
    }
    // Doubles hold whole numbers exactly up to here; the shares below count on it.
    if (module.parameter_count > (uint64_t{1} << 53) - total) {
      return "The modules have more than 2^53 parameters together.";
    }
    total += module.parameter_count;
  }
  if (std::string error = Tie(options.dependencies, &modules); !error.empty()) {
    return error;
  }
  const std::vector<bool> none(modules.size(), false);
  size_t smallest = 0;
  uint64_t least = UnitParameters(modules, 0, none);
  for (size_t i = 1; i < modules.size(); ++i) {
    const uint64_t count = UnitParameters(modules, i, none);
    if (count < least) {
      least = count;
      smallest = i;
    }
  }
  if (least > Allowance(options.delta, total)) {
    const double share = static_cast<double>(least) / static_cast<double>(total);
    return "With delta " + Number(options.delta) + " no module could ever be trained: the smallest, \"" +
           modules[smallest].name + "\"" + (modules[smallest].needs.empty() ? "" : " with what it needs") +
           ", has a share of " + Number(share) + " (" + std::to_string(least) + " of " + std::to_string(total) +
           " parameters); the smallest delta that works is " + WorkingDelta(least, total) + ".";
  }
  return "";
}

ModuleSampler::ModuleSampler(SamplerOptions options, std::vector<SamplerModule> modules)
    : options_(options),
      modules_(std::move(modules)),
      total_parameters_(TotalParameters(modules_)),
      of_task_(1, OfTask(modules_.size())),
      g_(modules_.size(), 0),
      step_value_(modules_.size(), kNotObserved) {
  Tie(options_.dependencies, &modules_);
  // Seeds that differ in one bit get unrelated keys.
  generator_[0] = SplitMix(options_.seed + kSplitMixStep);
  Draw();
}

std::string ModuleSampler::Observe(uint32_t module, const GradientStatistics& statistics) {
  if (!std::binary_search(active_.begin(), active_.end(), module)) {
    const std::string name = module < modules_.size() ? "\"" + modules_[module].name + "\"" : std::to_string(module);
    return "Module " + name + " is not trained in this round, so its gradient statistics were left out.";
  }
  if (std::string error = CheckStatistics(statistics); !error.empty()) {
    return error;
  }
  step_value_[module] = statistics.count == 0 ? kNotObserved : ScaledSquaredNorm(statistics);
  return "";
}

bool ModuleSampler::EndStep(uint32_t counted_steps, uint32_t task) {
  OfTask& mine = of_task_[task];
  tasks_.CountStep(task);
  for (const uint32_t module : active_) {
    if (step_value_[module] >= 0) {
      mine.round_sum[module] += step_value_[module];
      ++mine.round_count[module];
      step_value_[module] = kNotObserved;
    }
  }
  const uint32_t left = options_.inner_steps - step_in_round_;
  if (std::max(counted_steps, 1u) < left) {
    step_in_round_ += std::max(counted_steps, 1u);
    return false;
  }
  for (OfTask& each : of_task_) {
    for (const uint32_t module : active_) {
      if (each.round_count[module] > 0) {
        const double mean = each.round_sum[module] / each.round_count[module];
        // A sum of finite values may overflow; G stays finite, or the softmax would have no meaning.
        if (std::isfinite(mean)) {
          each.g[module] = (1 - options_.alpha) * each.g[module] + options_.alpha * mean;
        }
      }
      each.round_sum[module] = 0;
      each.round_count[module] = 0;
    }
  }
  MixTasks();
  step_in_round_ = 0;
  ++round_;
  Draw();
  return true;
}

void ModuleSampler::MixTasks() {
  const std::vector<double> shares = tasks_.Shares();
  std::vector<double> values(of_task_.size());
  for (size_t i = 0; i < modules_.size(); ++i) {
    for (size_t task = 0; task < values.size(); ++task) {
      values[task] = of_task_[task].g[i];
    }
    g_[i] = WeightedMean(shares, values);
  }
}

void ModuleSampler::Draw() {
  const uint64_t allowance = Allowance(options_.delta, total_parameters_);
  const size_t count = modules_.size();
  std::vector<double> weights(count, 0);
  std::vector<bool> present(count, true);
  uint64_t taken = 0;
  active_.clear();
  double largest = -1;
  std::vector<bool> taken_modules(count, false);
  const auto conflicts = [&](size_t module) {
    const std::vector<uint32_t>& apart = modules_[module].apart;
    return std::any_of(apart.begin(), apart.end(), [&](uint32_t other) { return taken_modules[other]; });
  };
  for (size_t left = count; left > 0;) {
    // The exponents are taken relative to the largest one still present, so that neither a large eta * G overflows nor
    // the weights of all that is left vanish once the heaviest are drawn.
    double present_largest = -1;
    for (size_t i = 0; i < count; ++i) {
      if (present[i]) {
        present_largest = std::max(present_largest, g_[i]);
      }
    }
    if (present_largest != largest) {
      largest = present_largest;
      for (size_t i = 0; i < count; ++i) {
        weights[i] = present[i] ? PortableExp(options_.eta * (g_[i] - largest)) : 0;
      }
    }
    double total = 0;
    for (size_t i = 0; i < count; ++i) {
      total += weights[i];
    }
    const double threshold = Uniform() * total;
    size_t drawn = count;
    double below = 0;
    for (size_t i = 0; i < count && drawn == count; ++i) {
      below += weights[i];
      // Rounding may leave threshold at the very end; then the last module with a weight is the drawn one.
      if (weights[i] > 0 && below > threshold) {
        drawn = i;
      }
    }
    for (size_t i = count; drawn == count && i-- > 0;) {
      if (weights[i] > 0) {
        drawn = i;
      }
    }
    const auto leave = [&](size_t module) {
      left -= present[module];
      present[module] = false;
      weights[module] = 0;
    };
    leave(drawn);
    if (conflicts(drawn)) {
      continue;
    }
    const uint64_t unit = UnitParameters(modules_, drawn, taken_modules);
    if (unit > allowance - taken) {
      if (!active_.empty()) {
        break;
      }
      continue;
    }
    taken += unit;
    const auto take = [&](size_t module) {
      if (taken_modules[module]) return;
      taken_modules[module] = true;
      leave(module);
      active_.push_back(static_cast<uint32_t>(module));
    };
    take(drawn);
    for (const uint32_t other : modules_[drawn].needs) take(other);
  }
  std::sort(active_.begin(), active_.end());
}

double ModuleSampler::Uniform() {
  // Counter-based: the n-th number is a function of key and n alone, so that a resume needs no history. The golden
  // ratio steps and the mixing are SplitMix64's; the upper 53 bits are what a double holds exactly.
  const uint64_t word = SplitMix(generator_[0] + kSplitMixStep * ++generator_[1]);
  return static_cast<double>(word >> 11) * 0x1p-53;
}

uint64_t ModuleSampler::Digest() const {
  const std::vector<uint8_t> bytes = Serialize();
  return Checksum(bytes, bytes.size() - 8);
}

std::vector<uint8_t> ModuleSampler::Serialize() const {
  Writer out;
  out.bytes.reserve(8 * (16 + 4 * modules_.size() * of_task_.size()));
  const bool with_tasks = of_task_.size() > 1;
  out.Word(with_tasks ? kMagicWithTasks : kMagic);
  out.Word(ModulesDigest(modules_));
  out.Word(modules_.size());
  out.Real(options_.delta);
  out.Real(options_.eta);
  out.Real(options_.alpha);
  out.Word(options_.inner_steps);
  out.Word(generator_[0]);
  out.Word(generator_[1]);
  out.Word(round_);
  out.Word(step_in_round_);
  out.Word(active_.size());
  for (const uint32_t module : active_) {
    out.Word(module);
  }
  for (size_t i = 0; i < modules_.size(); ++i) {
    out.Real(of_task_[0].g[i]);
    out.Real(of_task_[0].round_sum[i]);
    out.Word(of_task_[0].round_count[i]);
    out.Real(step_value_[i]);
  }
  if (with_tasks) {
    out.Word(of_task_.size());
    out.Word(tasks_.tasks()[0].steps > 0 ? 1 : 0);
    for (size_t task = 1; task < of_task_.size(); ++task) {
      const Task& named = tasks_.tasks()[task];
      out.Text(named.name);
      out.Real(named.weight);
      out.Word(named.steps > 0 ? 1 : 0);
      for (size_t i = 0; i < modules_.size(); ++i) {
        out.Real(of_task_[task].g[i]);
        out.Real(of_task_[task].round_sum[i]);
        out.Word(of_task_[task].round_count[i]);
      }
    }
  }
  out.Word(Checksum(out.bytes, out.bytes.size()));
  return std::move(out.bytes);
}

std::string ModuleSampler::Restore(const std::vector<uint8_t>& bytes) {
  const std::string damaged = "The saved sampler state is damaged: ";
  if (bytes.size() < 16 || bytes.size() % 8 != 0) {
    return damaged + "it has " + std::to_string(bytes.size()) + " bytes.";
  }
  Reader in(bytes);
  const uint64_t magic = in.Word();
  if (magic != kMagic && magic != kMagicWithTasks) {
    return damaged + "it does not begin as one.";
  }
  const std::vector<uint8_t> last(bytes.end() - 8, bytes.end());
  if (Reader(last).Word() != Checksum(bytes, bytes.size() - 8)) {
    return damaged + "its checksum does not agree.";
  }
  const uint64_t digest = in.Word();
  const uint64_t count = in.Word();
  if (digest != ModulesDigest(modules_) || count != modules_.size()) {
    return "The saved sampler state belongs to other modules (" + std::to_string(count) + " of them; here are " +
           std::to_string(modules_.size()) + ").";
  }
  const double delta = in.Real();
  const double eta = in.Real();
  const double alpha = in.Real();
  const uint64_t inner_steps = in.Word();
  if (delta != options_.delta || eta != options_.eta || alpha != options_.alpha ||
      inner_steps != options_.inner_steps) {
    return "The saved sampler state was made with other options (delta " + Number(delta) + ", eta " + Number(eta) +
           ", alpha " + Number(alpha) + ", inner steps " + std::to_string(inner_steps) + "), so a resume would not " +
           "draw what the saved run would have drawn.";
  }
  const uint64_t key = in.Word();
  const uint64_t counter = in.Word();
  const uint64_t round = in.Word();
  const uint64_t step = in.Word();
  const uint64_t active_count = in.Word();
  if (!in.good() || step >= inner_steps || active_count == 0 || active_count > count ||
      (magic == kMagic ? in.left() != 8 * (active_count + 4 * count + 1)
                       : in.left() < 8 * (active_count + 4 * count + 3))) {
    return damaged + "its counts do not agree with its length.";
  }
  std::vector<uint32_t> active;
  for (uint64_t i = 0; i < active_count; ++i) {
    const uint64_t module = in.Word();
    if (module >= count || (!active.empty() && module <= active.back())) {
      return damaged + "its active set is not a set of modules.";
    }
    active.push_back(static_cast<uint32_t>(module));
  }
  std::vector<OfTask> of_task(1, OfTask(count));
  std::vector<double> step_value(count);
  std::string not_finite;
  const auto read_sums = [&](OfTask* of, uint64_t i) {
    of->g[i] = in.Real();
    of->round_sum[i] = in.Real();
    of->round_count[i] = static_cast<uint32_t>(in.Word());
    if (!std::isfinite(of->g[i]) || of->g[i] < 0) {
      not_finite = damaged + "the importance of module \"" + modules_[i].name + "\" is not a finite number.";
    }
  };
  for (uint64_t i = 0; i < count; ++i) {
    read_sums(&of_task[0], i);
    step_value[i] = in.Real();
  }
  std::vector<Task> tasks(1);
  tasks[0].steps = round > 0 || step > 0 ? 1 : 0;
  if (magic == kMagicWithTasks) {
    const uint64_t task_count = in.Word();
    tasks[0].steps = in.Word() != 0 ? 1 : 0;
    if (task_count < 2 || task_count > kMostTasks + 1) {
      return damaged + "it has an impossible number of tasks.";
    }
    while (tasks.size() < task_count) {
      Task task;
      task.name = in.Text();
      task.weight = in.Real();
      task.steps = in.Word() != 0 ? 1 : 0;
      const bool again = std::any_of(tasks.begin(), tasks.end(), [&](const Task& t) { return t.name == task.name; });
      if (!in.good() || again || !CheckTask(task.name, task.weight).empty()) {
        return damaged + "its tasks are not tasks.";
      }
      tasks.push_back(std::move(task));
      of_task.emplace_back(count);
      for (uint64_t i = 0; i < count; ++i) {
        read_sums(&of_task.back(), i);
      }
    }
    if (!in.good() || in.left() != 8) {
      return damaged + "its counts do not agree with its length.";
    }
  }
  if (!not_finite.empty()) {
    return not_finite;
  }
  generator_[0] = key;
  generator_[1] = counter;
  round_ = round;
  step_in_round_ = static_cast<uint32_t>(step);
  active_ = std::move(active);
  tasks_.Assign(std::move(tasks));
  of_task_ = std::move(of_task);
  step_value_ = std::move(step_value);
  MixTasks();
  return "";
}

}  // namespace misa::policy
