#include "client/torch/manage.h"

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <errno.h>  // program_invocation_short_name
#include <openssl/evp.h>
#include <torch/nn/module.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <typeinfo>
#include <unordered_map>

#include "client/core/timeline.h"
#include "runtime/modules/grouping.h"
#include "client/torch/manager.h"
#include "client/torch/metering_allocator.h"
#include "runtime/memory/byte_size.h"

namespace misa {
namespace {

namespace optim = torch::optim;
using torch_client::Manager;

void Check(const std::string& error) {
  if (!error.empty()) throw std::runtime_error(error);
}

std::string SentenceOf(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error != nullptr ? torch_error->what_without_backtrace() : error.what();
}

// ---------------------------------------------------------------------------------------------------------- optimizers

// Those whose step of one parameter depends on nothing but that parameter, its gradient, its state and its group's options.
enum class Rule : uint8_t { kAdam, kAdamW, kSgd, kRmsprop, kAdagrad };

// Exact types only: a subclass may do anything in its step.
std::optional<Rule> RuleOf(const optim::Optimizer& optimizer) {
  const std::type_info& type = typeid(optimizer);
  if (type == typeid(optim::Adam)) return Rule::kAdam;
  if (type == typeid(optim::AdamW)) return Rule::kAdamW;
  if (type == typeid(optim::SGD)) return Rule::kSgd;
  if (type == typeid(optim::RMSprop)) return Rule::kRmsprop;
  if (type == typeid(optim::Adagrad)) return Rule::kAdagrad;
  return std::nullopt;
}

Rule RequireRule(const optim::Optimizer& optimizer) {
  const std::optional<Rule> rule = RuleOf(optimizer);
  if (!rule) {
    throw std::runtime_error(
        "This optimizer is none of torch's Adam, AdamW, SGD, RMSprop and Adagrad, so it is not known to step each parameter "
        "by itself: it cannot be managed. Nothing was changed.");
  }
  return *rule;
}

// Tensors of a parameter's own size that the optimizer keeps for it.
uint64_t StateCopies(Rule rule, const optim::OptimizerOptions& options) {
  switch (rule) {
    case Rule::kAdam: return static_cast<const optim::AdamOptions&>(options).amsgrad() ? 3 : 2;
    case Rule::kAdamW: return static_cast<const optim::AdamWOptions&>(options).amsgrad() ? 3 : 2;
    case Rule::kSgd: return static_cast<const optim::SGDOptions&>(options).momentum() != 0 ? 1 : 0;
    case Rule::kRmsprop: {
      const auto& rmsprop = static_cast<const optim::RMSpropOptions&>(options);
      return 1 + (rmsprop.momentum() != 0 ? 1 : 0) + (rmsprop.centered() ? 1 : 0);
    }
    case Rule::kAdagrad: return 1;
  }
  return 0;
}

// Temporary tensors of a parameter's own size that live at once in a step.
uint64_t StepCopies(Rule rule, const optim::OptimizerOptions& options) {
  switch (rule) {
    case Rule::kAdam: return 2 + (static_cast<const optim::AdamOptions&>(options).weight_decay() != 0 ? 1 : 0);
    case Rule::kAdamW: return 2;
    case Rule::kSgd: {
      const auto& sgd = static_cast<const optim::SGDOptions&>(options);
      return (sgd.weight_decay() != 0 ? 1 : 0) + (sgd.nesterov() ? 1 : 0);
    }
    case Rule::kRmsprop: return 1 + (static_cast<const optim::RMSpropOptions&>(options).weight_decay() != 0 ? 1 : 0);
    case Rule::kAdagrad: return 1 + (static_cast<const optim::AdagradOptions&>(options).weight_decay() != 0 ? 1 : 0);
  }
  return 0;
}

// The state of one parameter under the names that the Python optimizers use.
struct State {
  std::optional<int64_t> step;
  std::vector<std::pair<const char*, at::Tensor>> tensors;
};

State StateOf(Rule rule, const optim::Optimizer& optimizer, const at::Tensor& parameter) {
  State state;
  const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
  if (found == optimizer.state().end() || found->second == nullptr) return state;
  const auto add = [&](const char* name, const at::Tensor& tensor) {
    if (tensor.defined()) state.tensors.emplace_back(name, tensor);
  };
  const auto adam = [&](const auto& s) {
    state.step = s.step();
    add("exp_avg", s.exp_avg());
    add("exp_avg_sq", s.exp_avg_sq());
    add("max_exp_avg_sq", s.max_exp_avg_sq());
  };
  switch (rule) {
    case Rule::kAdam: adam(static_cast<const optim::AdamParamState&>(*found->second)); break;
    case Rule::kAdamW: adam(static_cast<const optim::AdamWParamState&>(*found->second)); break;
    case Rule::kSgd: add("momentum_buffer", static_cast<const optim::SGDParamState&>(*found->second).momentum_buffer()); break;
    case Rule::kRmsprop: {
      const auto& s = static_cast<const optim::RMSpropParamState&>(*found->second);
      state.step = s.step();
      add("square_avg", s.square_avg());
      add("momentum_buffer", s.momentum_buffer());
      add("grad_avg", s.grad_avg());
      break;
    }
    case Rule::kAdagrad: {
      const auto& s = static_cast<const optim::AdagradParamState&>(*found->second);
      state.step = s.step();
      add("sum", s.sum());
      break;
    }
  }
  return state;
}

// Each parameter once, under its first name.
std::vector<std::pair<std::string, at::Tensor>> NamedParameters(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> named;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters(/*recurse=*/true)) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) named.emplace_back(item.key(), item.value());
  }
  return named;
}

// -------------------------------------------------------------------------------------------------------------- guards

// A deferred step must run as if it stood where the user called Step(): without the autograd, autocast or inference mode
// of the operator whose touch it precedes.
class PlainDispatch {
 public:
  explicit PlainDispatch(const at::ThreadLocalState& plain) { at::ThreadLocalState::setThreadLocalState(plain); }
  ~PlainDispatch() { at::ThreadLocalState::setThreadLocalState(saved_); }
  PlainDispatch(const PlainDispatch&) = delete;
  PlainDispatch& operator=(const PlainDispatch&) = delete;

 private:
  const at::ThreadLocalState saved_;
};

using Gradients = std::vector<std::pair<at::Tensor, at::Tensor>>;  // parameter, gradient

// Gives the parameters these gradients while it lives.
class WithGradients {
 public:
  explicit WithGradients(const Gradients& gradients) {
    for (const auto& [parameter, gradient] : gradients) {
      before_.emplace_back(parameter, parameter.grad());
      Set(parameter, gradient);
    }
  }
  ~WithGradients() {
    for (const auto& [parameter, gradient] : before_) Set(parameter, gradient);
  }
  WithGradients(const WithGradients&) = delete;
  WithGradients& operator=(const WithGradients&) = delete;

 private:
  static void Set(const at::Tensor& parameter, const at::Tensor& gradient) {
    if (!parameter.grad().is_same(gradient)) parameter.mutable_grad() = gradient;
  }
  Gradients before_;
};

// Gives the optimizer these groups while it lives. Swapped, not copied: iterators into the user's groups stay good, for
// the step may run inside a loop over them.
class WithGroups {
 public:
  WithGroups(optim::Optimizer& optimizer, std::vector<optim::OptimizerParamGroup>& groups)
      : optimizer_(optimizer), groups_(groups) {
    optimizer_.param_groups().swap(groups_);
  }
  ~WithGroups() { optimizer_.param_groups().swap(groups_); }
  WithGroups(const WithGroups&) = delete;
  WithGroups& operator=(const WithGroups&) = delete;

 private:
  optim::Optimizer& optimizer_;
  std::vector<optim::OptimizerParamGroup>& groups_;
};

template <typename T>
double SettledMedian(std::vector<T> values) {
  values.erase(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(torch_client::FirstSettled(values.size())));
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  if (values.size() % 2 == 1) return static_cast<double>(values[half]);
  return (static_cast<double>(values[half - 1]) + static_cast<double>(values[half])) / 2;
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------------- Run

class Run {
 public:
  Run(torch::nn::Module& module, optim::Optimizer& optimizer, const ManageOptions& options);
  ~Run() { EndSampling(); }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  // The run that has storages of this process now. Leaked at exit on purpose: what is still managed then is not worth
  // reading back.
  static std::shared_ptr<Run>& Current() {
    static auto* current = new std::shared_ptr<Run>;
    return *current;
  }

  bool open() const { return manager_ != nullptr; }
  bool ended() const { return report_.has_value(); }
  Manager& manager() const {
    if (manager_ == nullptr) throw std::runtime_error("This run has ended: its model is no longer managed by misa.");
    return *manager_;
  }
  void Step();
  void Flush() {
    if (manager_ != nullptr && !ended()) Check(manager_->Flush());
  }
  void Close(AtEnd end);
  // The optimizer may go now: nothing steps any more.
  void Abandon();
  RunReport Report() const { return report_ ? *report_ : MakeReport(); }
  const SessionInfo& info() const { return info_; }

 private:
  // What a module's step needs: the gradients and the options of the moment of Step().
  struct Pending {
    std::vector<optim::OptimizerParamGroup> groups;
    Gradients gradients;
    std::vector<std::function<void()>> actions;  // after the optimizer's step
  };
  struct Moments {
    double learning_rate = 0, beta1 = 0, epsilon = 0;
  };

  uint32_t ModuleOf(const at::Tensor& parameter) const;
  std::string RunStep(uint32_t module, std::vector<at::Tensor>* state);
  std::string GradientComplete(uint32_t module);
  std::vector<at::Tensor> StateTensors(uint32_t module) const;
  RunReport MakeReport() const;

  void BeginSampling();
  void EndSampling();
  void ApplyActive();
  std::vector<uint32_t> ActiveModules() const;
  void EndSampledStep(const std::vector<ModuleStatistics>& statistics);
  void EndRound(uint32_t module, bool leaves, const std::map<const void*, Moments>& moments);
  std::map<const void*, Moments> MomentsOf(uint32_t module) const;
  void Publish();

  optim::Optimizer& optimizer_;
  const ManageOptions options_;
  const Rule rule_;
  const at::ThreadLocalState plain_;
  std::unordered_map<const c10::TensorImpl*, uint32_t> module_of_;
  std::vector<Pending> pending_;
  std::set<const c10::TensorImpl*> stepped_early_;  // in this step's backward
  // One step at a time: they share the optimizer.
  std::recursive_mutex stepping_;
  uint64_t steps_ = 0;
  SessionInfo info_;
  std::optional<RunReport> report_;
  mutable Timeline timeline_{&DeviceMeter::Get()};

  // Mode kSampled. Places in the sampler are places in samplable_.
  std::unique_ptr<policy::ModuleSampler> sampler_;
  std::vector<uint32_t> samplable_;
  std::vector<uint32_t> always_;
  std::vector<std::pair<at::Tensor, bool>> requires_grad_before_;
  std::set<const c10::TensorImpl*> trainable_;

  std::unique_ptr<Manager> manager_;  // last: its end may still need the rest
};

Run::Run(torch::nn::Module& module, optim::Optimizer& optimizer, const ManageOptions& options)
    : optimizer_(optimizer), options_(options), rule_(RequireRule(optimizer)) {
  const std::vector<std::pair<std::string, at::Tensor>> named = NamedParameters(module);
  std::set<const c10::TensorImpl*> known;
  for (const auto& [name, parameter] : named) known.insert(parameter.unsafeGetTensorImpl());
  std::unordered_map<const c10::TensorImpl*, std::pair<uint64_t, uint64_t>> needs;  // bytes of state, of a step
  for (const optim::OptimizerParamGroup& group : optimizer_.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (!known.contains(parameter.unsafeGetTensorImpl())) {
        throw std::runtime_error("The optimizer trains a tensor of shape " + c10::str(parameter.sizes()) +
                                 " that is not in the module given to misa::Manage: give it the module that holds all of "
                                 "them. Nothing was changed.");
      }
      needs[parameter.unsafeGetTensorImpl()] = {StateCopies(rule_, group.options()) * parameter.nbytes(),
                                                StepCopies(rule_, group.options()) * parameter.nbytes()};
    }
  }
  std::vector<torch_client::ParameterInput> inputs;
  std::vector<torch_client::ParameterShape> shapes;
  bool existing_state = false;  // a resumed run's, or Adagrad's from its construction
  for (const auto& [name, parameter] : named) {
    const auto& [state_bytes, step_bytes] = needs[parameter.unsafeGetTensorImpl()];
    inputs.push_back({name, parameter, state_bytes, step_bytes});
    if (!StateOf(rule_, optimizer_, parameter).tensors.empty()) existing_state = true;
    shapes.push_back({name, parameter.dim(), static_cast<uint64_t>(parameter.numel()),
                      parameter.has_storage() ? parameter.storage().nbytes() : 0});
  }
  if (options_.mode == Mode::kSampled) {
    // Asked before anything is moved, so that impossible options change nothing.
    if (rule_ == Rule::kAdagrad) {
      throw std::runtime_error(
          "Mode sampled clears the optimizer state of modules that leave the active set, but Adagrad makes its state only "
          "once, when it is constructed: use another optimizer or mode exact. Nothing was changed.");
    }
    std::vector<policy::SamplerModule> modules;
    for (const torch_client::ModuleGroup& group : torch_client::GroupParameters(shapes)) {
      if (!group.samplable) continue;
      uint64_t count = 0;
      for (size_t i : group.parameters) count += shapes[i].elements;
      modules.push_back({group.name, count});
    }
    if (modules.empty()) {
      throw std::runtime_error(
          "Mode sampled found no matrices inside numbered blocks (like \"blocks.3.ffn.up.weight\") to choose from. Nothing "
          "was changed.");
    }
    Check(policy::CheckSampler(options_.sampling, modules));
  }

  torch_client::ManagerOptions manager;
  manager.session.runtime_directory = options_.runtime_directory;
  manager.session.daemon = options_.daemon;
  manager.session.job = options_.job.empty() ? program_invocation_short_name : options_.job;
  manager.session.budget_bytes = options_.budget.bytes();
  manager.session.elastic = options_.budget.elastic();
  manager.session.least_bytes = options_.budget.least_bytes();
  manager.session.most_bytes = options_.budget.bytes();
  manager.session.weight = options_.weight;
  manager.session.mode = options_.mode;
  manager.session.sampling = options_.sampling;
  manager.session.daemon_binary = options_.daemon_binary;
  manager.session.disk_directory = options_.disk_directory;
  manager.session.chunk_bytes = options_.chunk_bytes;
  manager.executor = options_.executor;
  manager.existing_state = existing_state;
  manager.pins = options_.pins;
  switch (options_.step) {
    case StepTime::kDeferred: manager.step = torch_client::StepMode::kDeferred; break;
    case StepTime::kInBackward: manager.step = torch_client::StepMode::kInBackward; break;
    case StepTime::kEager: manager.step = torch_client::StepMode::kEager; break;
  }
  std::string error;
  manager_ = Manager::Create(std::move(inputs), std::move(manager), &error);
  Check(error);
  info_ = manager_->session();
  if (info_.private_daemon && options_.daemon == DaemonChoice::kAuto) {
    std::fprintf(stderr, "misa: no daemon runs on this node; a private one was started for this trainer.\n");
  }
  for (size_t i = 0; i < manager_->parameter_count(); ++i) {
    const Manager::Parameter& parameter = manager_->parameter(i);
    module_of_[parameter.tensor.unsafeGetTensorImpl()] = parameter.module;
  }
  pending_.resize(manager_->module_count());
  manager_->SetStepper([this](uint32_t m, std::vector<at::Tensor>* state) { return RunStep(m, state); });
  manager_->SetGradientComplete([this](uint32_t m) { return GradientComplete(m); });
  try {
    if (options_.mode == Mode::kSampled) BeginSampling();
    manager_->WatchGradients();
    if (existing_state) {
      for (uint32_t m = 0; m < pending_.size(); ++m) Check(manager_->AdoptExisting(m));
      Check(manager_->FinishAdoption());
    }
  } catch (...) {
    EndSampling();
    throw;
  }
  timeline_.Start(0.005);
}

uint32_t Run::ModuleOf(const at::Tensor& parameter) const {
  const auto found = module_of_.find(parameter.unsafeGetTensorImpl());
  if (found == module_of_.end()) {
    throw std::runtime_error("The optimizer was given a tensor of shape " + c10::str(parameter.sizes()) +
                             " after misa::Manage, which does not know it. Nothing was changed by this step: end the run "
                             "and manage the module anew.");
  }
  return found->second;
}

// ------------------------------------------------------------------------------------------------------------ stepping

void Run::Step() {
  Manager& manager = this->manager();
  if (ended()) throw std::runtime_error("This run has ended: step the optimizer itself from here on.");
  stepped_early_.clear();
  const std::vector<ModuleStatistics> statistics = manager.TakeStatistics();
  std::map<uint32_t, Pending> due;
  for (const optim::OptimizerParamGroup& group : optimizer_.param_groups()) {
    std::map<uint32_t, std::vector<at::Tensor>> parts;
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      const uint32_t module = ModuleOf(parameter);
      parts[module].push_back(parameter);
      due[module].gradients.emplace_back(parameter, parameter.grad());
    }
    for (auto& [module, parameters] : parts) {
      due[module].groups.emplace_back(std::move(parameters), group.options().clone());
    }
  }
  for (auto& [module, step] : due) {
    // A second Step() before the module was touched after the first.
    if (manager.IsPending(module)) Check(manager.StepModule(module));
    pending_[module] = std::move(step);
    Check(manager.MarkPending(module));
  }
  if (options_.step != StepTime::kDeferred) Check(manager.Flush());
  ++steps_;
  if (sampler_ != nullptr) {
    EndSampledStep(statistics);
    Publish();
    manager.WatchGradients();
  }
  manager.EndStep();
}

// What is due for one module; called with its facets present.
std::string Run::RunStep(uint32_t module, std::vector<at::Tensor>* state) {
  try {
    std::lock_guard<std::recursive_mutex> lock(stepping_);
    const PlainDispatch plain(plain_);
    const at::NoGradGuard no_grad;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    // Done or failed half-way: never twice.
    Pending pending = std::exchange(pending_[module], {});
    if (!pending.groups.empty()) {
      const WithGradients gradients(pending.gradients);
      const WithGroups groups(optimizer_, pending.groups);
      optimizer_.step();
    }
    for (const std::function<void()>& action : pending.actions) action();
    *state = StateTensors(module);
    return "";
  } catch (const std::exception& error) {
    return "the optimizer's step failed: " + SentenceOf(error);
  }
}

// In-backward stepping: the module's gradients are there, so it steps and they go.
std::string Run::GradientComplete(uint32_t module) {
  try {
    Pending pending;
    for (const optim::OptimizerParamGroup& group : optimizer_.param_groups()) {
      std::vector<at::Tensor> parameters;
      for (const at::Tensor& parameter : group.params()) {
        if (!parameter.grad().defined() || ModuleOf(parameter) != module) continue;
        if (!stepped_early_.insert(parameter.unsafeGetTensorImpl()).second) {
          return "A second gradient came for " + manager_->module(module).name +
                 " before Step(), but with StepTime::kInBackward it has stepped with the first already, so this step is not "
                 "the one of plain training. Use StepTime::kDeferred for gradient accumulation and several backward() calls "
                 "before a Step().";
        }
        parameters.push_back(parameter);
        pending.gradients.emplace_back(parameter, parameter.grad());
      }
      if (!parameters.empty()) pending.groups.emplace_back(std::move(parameters), group.options().clone());
    }
    for (const auto& [parameter, gradient] : pending.gradients) parameter.mutable_grad().reset();
    pending.actions = std::move(pending_[module].actions);
    pending_[module] = std::move(pending);
  } catch (const std::exception& error) {
    return SentenceOf(error);
  }
  return manager_->StepModule(module);
}

std::vector<at::Tensor> Run::StateTensors(uint32_t module) const {
  std::vector<at::Tensor> tensors;
  for (uint32_t i : manager_->module(module).parameters) {
    for (const auto& [name, tensor] : StateOf(rule_, optimizer_, manager_->parameter(i).tensor).tensors) {
      tensors.push_back(tensor);
    }
  }
  return tensors;
}

// ------------------------------------------------------------------------------------------------------------ sampling

void Run::BeginSampling() {
  std::vector<policy::SamplerModule> modules;
  for (uint32_t m = 0; m < manager_->module_count(); ++m) {
    const Manager::Module& module = manager_->module(m);
    if (module.samplable) {
      samplable_.push_back(m);
      modules.push_back({module.name, module.parameter_count});
    }
    if (std::find(options_.always.begin(), options_.always.end(), module.kind) != options_.always.end()) {
      always_.push_back(m);
    }
  }
  Check(policy::CheckSampler(options_.sampling, modules));
  sampler_ = std::make_unique<policy::ModuleSampler>(options_.sampling, std::move(modules));
  for (size_t i = 0; i < manager_->parameter_count(); ++i) {
    const at::Tensor& parameter = manager_->parameter(i).tensor;
    requires_grad_before_.emplace_back(parameter, parameter.requires_grad());
    if (parameter.requires_grad()) trainable_.insert(parameter.unsafeGetTensorImpl());
  }
  ApplyActive();
  Publish();
}

void Run::EndSampling() {
  for (const auto& [parameter, required] : requires_grad_before_) parameter.requires_grad_(required);
  requires_grad_before_.clear();
}

std::vector<uint32_t> Run::ActiveModules() const {
  std::set<uint32_t> active(always_.begin(), always_.end());
  for (uint32_t place : sampler_->active()) active.insert(samplable_[place]);
  return {active.begin(), active.end()};
}

void Run::ApplyActive() {
  const std::vector<uint32_t> active = ActiveModules();
  for (size_t i = 0; i < manager_->parameter_count(); ++i) {
    const Manager::Parameter& parameter = manager_->parameter(i);
    if (!trainable_.contains(parameter.tensor.unsafeGetTensorImpl())) continue;
    parameter.tensor.requires_grad_(std::binary_search(active.begin(), active.end(), parameter.module));
  }
}

void Run::Publish() { manager_->SetSampling(sampler_->round(), ActiveModules(), sampler_->Digest()); }

void Run::EndSampledStep(const std::vector<ModuleStatistics>& statistics) {
  const std::vector<uint32_t> before = sampler_->active();
  for (const ModuleStatistics& s : statistics) {
    for (uint32_t place : before) {
      if (samplable_[place] == s.module) Check(sampler_->Observe(place, s.statistics));
    }
  }
  if (!sampler_->EndStep()) return;
  const std::vector<uint32_t> after = ActiveModules();
  const auto stays = [&](uint32_t module) { return std::binary_search(after.begin(), after.end(), module); };
  for (uint32_t place : before) {
    const uint32_t module = samplable_[place];
    pending_[module].actions.push_back([this, module, leaves = !stays(module), moments = MomentsOf(module)] {
      EndRound(module, leaves, moments);
    });
    Check(manager_->MarkPending(module));
    if (options_.step != StepTime::kDeferred) Check(manager_->StepModule(module));
  }
  ApplyActive();
  for (uint32_t place : before) {
    if (stays(samplable_[place])) continue;
    for (uint32_t i : manager_->module(samplable_[place]).parameters) {
      manager_->parameter(i).tensor.mutable_grad().reset();
    }
  }
}

// The options of this moment, for the parameters of a module that Adam's rules train.
std::map<const void*, Run::Moments> Run::MomentsOf(uint32_t module) const {
  std::map<const void*, Moments> moments;
  if (rule_ != Rule::kAdam && rule_ != Rule::kAdamW) return moments;
  for (const optim::OptimizerParamGroup& group : optimizer_.param_groups()) {
    const auto of = [](const auto& o) { return Moments{o.lr(), std::get<0>(o.betas()), o.eps()}; };
    const Moments m = rule_ == Rule::kAdam ? of(static_cast<const optim::AdamOptions&>(group.options()))
                                           : of(static_cast<const optim::AdamWOptions&>(group.options()));
    for (const at::Tensor& parameter : group.params()) {
      if (ModuleOf(parameter) == module) moments[parameter.unsafeGetTensorImpl()] = m;
    }
  }
  return moments;
}

// The paper's last step of a round, theta -= lr * beta1 / (1 - beta1) * m / sqrt(v + eps) (arXiv 2511.00056), for
// optimizers that keep Adam's moments; then the state of a module that leaves is cleared.
void Run::EndRound(uint32_t module, bool leaves, const std::map<const void*, Moments>& moments) {
  for (uint32_t i : manager_->module(module).parameters) {
    const at::Tensor& parameter = manager_->parameter(i).tensor;
    const auto options = moments.find(parameter.unsafeGetTensorImpl());
    if (options != moments.end()) {
      at::Tensor first, second;
      for (const auto& [name, tensor] : StateOf(rule_, optimizer_, parameter).tensors) {
        const std::string_view which = name;
        if (which == "exp_avg") first = tensor;
        // The maximum comes last where there is one.
        if (which == "exp_avg_sq" || which == "max_exp_avg_sq") second = tensor;
      }
      if (first.defined() && second.defined()) {
        const auto& [rate, beta1, epsilon] = options->second;
        const at::Tensor denominator = second.add(epsilon).sqrt_();
        parameter.addcdiv_(first, denominator, -rate * beta1 / (1.0 - beta1));
      }
    }
    if (leaves) optimizer_.state().erase(parameter.unsafeGetTensorImpl());
  }
}

// ------------------------------------------------------------------------------------------------------- report and end

RunReport Run::MakeReport() const {
  const torch_client::RunTotals totals = manager().Totals();
  RunReport report;
  report.mode = options_.mode;
  report.step = options_.step;
  report.budget_bytes = manager().budget_bytes();
  report.steps = steps_;
  report.step_seconds_median = SettledMedian(totals.step_seconds);
  report.stall_seconds_median = SettledMedian(totals.stall_seconds);
  report.bound_step_seconds = totals.bound_step_seconds;
  report.h2d_bytes_per_step = SettledMedian(totals.loaded_bytes);
  report.d2h_bytes_per_step = SettledMedian(totals.unloaded_bytes);
  report.bound_h2d_bytes_per_step = static_cast<double>(totals.bound.load_bytes);
  report.bound_d2h_bytes_per_step = static_cast<double>(totals.bound.unload_bytes);
  report.device_peak_bytes = DeviceMeter::Get().peak_bytes();
  report.device_stddev_bytes = timeline_.stddev_bytes();
  report.demand_loads = totals.counters.loads_demand;
  report.prefetch_loads = totals.counters.loads_prefetch;
  report.prefetch_hits = totals.counters.prefetch_hits;
  report.unloads = totals.counters.unloads;
  report.drops = totals.counters.drops;
  report.departures = totals.counters.departures;
  report.plan_version = totals.plan_version;
  report.module_count = pending_.size();
  report.parameter_count = totals.parameter_count;
  report.weights_bytes = totals.weights_bytes;
  report.gradients_bytes = totals.gradients_bytes;
  report.optimizer_bytes = totals.optimizer_bytes;
  report.notices = totals.notices;
  report.batch_hint = totals.batch.sentence;
  report.step_seconds = totals.step_seconds;
  report.stall_seconds = totals.stall_seconds;
  report.device_kind = info_.device_kind;
  report.device_name = info_.device_name;
  report.device_capacity_bytes = info_.device_capacity_bytes;
  report.h2d_bytes_per_second = totals.link.load;
  report.d2h_bytes_per_second = totals.link.unload;
  report.total_bytes_per_second = totals.link.duplex_load + totals.link.duplex_unload;
  report.timeline = timeline_.samples();
  return report;
}

void Run::Close(AtEnd end) {
  if (manager_ == nullptr) return;
  if (!ended()) {
    timeline_.Stop();
    // Without a budget to keep, what is due needs no room: it is done when the memory is given back.
    if (end != AtEnd::kGiveBack) Check(manager_->Flush());
    EndSampling();
    report_ = MakeReport();
  }
  switch (end) {
    case AtEnd::kKeepManaged: Abandon(); return;
    case AtEnd::kGiveBack: {
      const std::string error = manager_->ReleaseAll();
      // A step that failed is reported, and everything is given back all the same.
      if (!manager_->is_open()) {
        manager_.reset();
        if (Current().get() == this) Current().reset();
      }
      Check(error);
      return;
    }
    case AtEnd::kGiveBackIfFits: {
      std::string error;
      if (manager_->Release(&error)) break;
      Check(error);
      std::fprintf(stderr,
                   "misa: the model and its optimizer state do not fit the budget together; they stay managed and are "
                   "loaded on demand until the process ends.\n");
      Abandon();
      return;
    }
  }
  manager_.reset();
  if (Current().get() == this) Current().reset();
}

void Run::Abandon() {
  manager_->SetGradientComplete(nullptr);
  manager_->SetStepper([](uint32_t, std::vector<at::Tensor>*) -> std::string {
    return "the run has ended with a step undone, because it had failed: what it left is not a trained state";
  });
  manager_->LetGo();
}

// --------------------------------------------------------------------------------------------------------- user's side

uint64_t Budget::Checked(uint64_t bytes) {
  if (bytes == 0) throw std::runtime_error("A budget of no bytes holds nothing: it must be above 0.");
  return bytes;
}

Budget::Budget(std::string_view text) {
  if (text == "auto") {
    elastic_ = true;
    return;
  }
  uint64_t bytes = 0;
  Check(ParseByteSize(text, &bytes));
  bytes_ = Checked(bytes);
}

Budget Budget::Between(Budget least, Budget most) {
  if (least.elastic() || most.elastic() || least.bytes() > most.bytes()) {
    throw std::runtime_error("A budget between " + FormatByteSize(least.bytes()) + " and " + FormatByteSize(most.bytes()) +
                             " is no range.");
  }
  Budget range = most;
  range.elastic_ = true;
  range.least_bytes_ = least.bytes();
  return range;
}

Managed Manage(torch::nn::Module& module, optim::Optimizer& optimizer, const ManageOptions& options) {
  if (options.budget.bytes() == 0 && !options.budget.elastic()) {
    throw std::runtime_error("misa::Manage needs a budget, such as options.budget = \"24GiB\". Nothing was changed.");
  }
  std::shared_ptr<Run>& current = Run::Current();
  if (current != nullptr && current->open() && current->ended()) {
    // An ended run whose model did not fit the budget: over once nobody holds the model any more.
    const std::vector<FacetState> states = current->manager().States();
    if (std::all_of(states.begin(), states.end(), [](FacetState s) { return s == FacetState::kEmpty; })) {
      current->Close(AtEnd::kGiveBack);
    }
  }
  if (current != nullptr) {
    throw std::runtime_error(
        "misa already manages a model in this process: give misa::Manage one module that holds all. Nothing was changed.");
  }
  // A clean word to the daemon when the process exits in the middle; the memory itself goes with the process.
  static const int registered = std::atexit([] {
    if (Run::Current() != nullptr && Run::Current()->open()) Run::Current()->manager().CloseSession();
  });
  static_cast<void>(registered);
  current = std::make_shared<Run>(module, optimizer, options);
  return Managed(current);
}

void InstallMeter() { torch_client::InstallMeteringAllocator(); }

Managed::Managed(Managed&&) noexcept = default;

Managed& Managed::operator=(Managed&& other) noexcept {
  Managed ended(std::move(*this));
  run_ = std::move(other.run_);
  return *this;
}

Managed::~Managed() {
  // What Close() decided stays so.
  if (run_ == nullptr || run_->ended()) return;
  try {
    run_->Close(AtEnd::kGiveBackIfFits);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "misa: %s\n", SentenceOf(error).c_str());
    if (run_->open()) run_->Abandon();
  }
}

void Managed::Step() { run_->Step(); }

at::Tensor Managed::Step(const std::function<at::Tensor()>& closure) {
  at::Tensor loss;
  {
    const at::AutoGradMode enabled(true);
    loss = closure();
  }
  run_->Step();
  return loss;
}

void Managed::Flush() { run_->Flush(); }
void Managed::ReportLoss(double loss, uint64_t rows) {
  if (run_->open()) run_->manager().SetLoss(loss, rows);
}
RunReport Managed::Report() const { return run_->Report(); }
const SessionInfo& Managed::session() const { return run_->info(); }
bool Managed::daemon_alive() const { return run_->open() && run_->manager().daemon_alive(); }
void Managed::Close(AtEnd end) { run_->Close(end); }

Resident::Resident(const std::vector<at::Tensor>& tensors) : run_(Run::Current()) {
  if (run_ == nullptr || !run_->open()) return;
  for (const at::Tensor& tensor : tensors) {
    const std::string error = run_->manager().Pin(tensor);
    if (!error.empty()) {
      for (const at::Tensor& pinned : pinned_) run_->manager().Unpin(pinned);
      throw std::runtime_error(error);
    }
    pinned_.push_back(tensor);
  }
}

Resident::~Resident() {
  if (run_ == nullptr || !run_->open()) return;
  for (const at::Tensor& tensor : pinned_) run_->manager().Unpin(tensor);
}

// --------------------------------------------------------------------------------------------------------------- digest

namespace {

class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new()) {
    if (context_ == nullptr || EVP_DigestInit_ex(context_, EVP_sha256(), nullptr) != 1) Fail();
  }
  ~Sha256() { EVP_MD_CTX_free(context_); }
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Add(const void* data, size_t bytes) {
    if (EVP_DigestUpdate(context_, data, bytes) != 1) Fail();
  }
  std::string Hex() {
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned int size = 0;
    if (EVP_DigestFinal_ex(context_, digest, &size) != 1) Fail();
    std::string text;
    for (unsigned int i = 0; i < size; ++i) {
      char two[3];
      std::snprintf(two, sizeof(two), "%02x", digest[i]);
      text += two;
    }
    return text;
  }

 private:
  [[noreturn]] static void Fail() { throw std::runtime_error("OpenSSL has no SHA-256 here: no digest was computed."); }
  EVP_MD_CTX* const context_;
};

// As Python prints it: "torch.float32".
std::string TypeName(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return "torch.float32";
    case at::kDouble: return "torch.float64";
    case at::kHalf: return "torch.float16";
    case at::kBFloat16: return "torch.bfloat16";
    case at::kByte: return "torch.uint8";
    case at::kChar: return "torch.int8";
    case at::kShort: return "torch.int16";
    case at::kInt: return "torch.int32";
    case at::kLong: return "torch.int64";
    case at::kBool: return "torch.bool";
    case at::kComplexFloat: return "torch.complex64";
    case at::kComplexDouble: return "torch.complex128";
    default: return std::string("torch.") + c10::toString(type);
  }
}

// As Python prints a tuple: "()", "(3,)", "(3, 4)".
std::string ShapeText(at::IntArrayRef sizes) {
  std::string text = "(";
  for (size_t i = 0; i < sizes.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
  return text + (sizes.size() == 1 ? ",)" : ")");
}

}  // namespace

std::string StateSha256(torch::nn::Module& module, optim::Optimizer& optimizer) {
  const Rule rule = RequireRule(optimizer);
  if (const std::shared_ptr<Run> run = Run::Current()) run->Flush();
  const at::NoGradGuard no_grad;
  std::vector<std::pair<std::string, at::Tensor>> all;
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& [name, parameter] : NamedParameters(module)) {
    names[parameter.unsafeGetTensorImpl()] = name;
    all.emplace_back("model." + name, parameter);
  }
  std::set<const c10::TensorImpl*> buffers;
  for (const auto& item : module.named_buffers(/*recurse=*/true)) {
    if (buffers.insert(item.value().unsafeGetTensorImpl()).second) all.emplace_back("model." + item.key(), item.value());
  }
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const std::vector<at::Tensor>& parameters = optimizer.param_groups()[g].params();
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto found = names.find(parameters[i].unsafeGetTensorImpl());
      const std::string prefix =
          "optimizer." +
          (found != names.end() ? found->second : "group" + std::to_string(g) + "." + std::to_string(i)) + ".";
      const State state = StateOf(rule, optimizer, parameters[i]);
      // Python's optimizers count steps in a scalar tensor of this type.
      if (state.step) all.emplace_back(prefix + "step", at::full({}, static_cast<double>(*state.step), at::kFloat));
      for (const auto& [name, tensor] : state.tensors) all.emplace_back(prefix + name, tensor);
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  Sha256 digest;
  for (const auto& [name, tensor] : all) {
    const std::string head = name + " " + TypeName(tensor.scalar_type()) + " " + ShapeText(tensor.sizes()) + "\n";
    digest.Add(head.data(), head.size());
    const Resident resident({tensor});
    const at::Tensor flat = tensor.detach().contiguous();
    if (flat.numel() > 0) digest.Add(flat.const_data_ptr(), flat.nbytes());
  }
  return digest.Hex();
}

}  // namespace misa
