#include "client/torch/manager.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <iterator>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "client/torch/metering_allocator.h"
#include "kernels/cpu/gradient_statistics.h"
#include "runtime/device/modelled_link.h"
#include "runtime/guard/pins.h"
#include "runtime/memory/byte_size.h"
#include "runtime/policy/batch_input.h"
#include "runtime/policy/session_plan.h"
#include "runtime/policy/step_bound.h"
#include "runtime/trace/modes.h"

namespace misa::torch_client {
namespace {

constexpr uint64_t kAlignment = 64;
// Optimizer state below this (step counters) stays where it is.
constexpr uint64_t kLeastStateBytes = 4096;
constexpr size_t kMaxNotices = 100;
constexpr size_t kMaxSteps = 1 << 20;
// The share of the budget that is freed of the model's first memory before the heap is looked through for it.
constexpr uint64_t kTrimShare = 64;

// An elastic budget in which a model is to be made begins with so much beside what is there already.
constexpr uint64_t kLeastForMaking = 16ull << 20;

// The module of a facet whose tensors belong to none yet.
constexpr uint32_t kNoModule = UINT32_MAX;
// Room for them is reserved once: other threads look modules and parameters up while later ones are added.
constexpr size_t kMostModules = 1 << 15;
constexpr size_t kMostParameters = 1 << 17;
constexpr char kAlreadyManaged[] =
    "misa already manages a model in this process: give all models and optimizers to one manage(...) call.";
// A trace whose times have moved by more than this share is worth a new plan; and how soon after the last one.
constexpr double kRefreshShare = 0.03;
constexpr uint64_t kFirstRefreshSteps = 2;
// A longer part of a step is not planned: it would take seconds.
constexpr size_t kMostSectionPositions = 1 << 15;

double ComputeSeconds(const policy::Trace& trace) {
  double seconds = 0;
  for (const policy::TraceEntry& entry : trace.entries) seconds += entry.compute_seconds;
  return seconds;
}

// At the daemon: a facet that no module of the model has.
std::string OutsideName(uint32_t facet) { return "outside the model " + std::to_string(facet); }

uint64_t Align(uint64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// The module whose optimizer step runs on this thread: its operators' uses are part of that step.
thread_local const Manager::Module* stepping = nullptr;

c10::StorageImpl* StorageOf(const at::Tensor& tensor) { return tensor.storage().unsafeGetStorageImpl(); }

bool ElementOf(const at::Tensor& tensor, kernels::Element* element) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      *element = kernels::Element::kFloat32;
      return true;
    case at::kDouble:
      *element = kernels::Element::kFloat64;
      return true;
    case at::kBFloat16:
      *element = kernels::Element::kBfloat16;
      return true;
    case at::kHalf:
      *element = kernels::Element::kFloat16;
      return true;
    default:
      return false;
  }
}

// Called by autograd when a parameter's gradient has been accumulated. Outlives the manager: nodes live as long as
// graphs.
class GradientHook final : public torch::autograd::FunctionPostHook {
 public:
  explicit GradientHook(std::function<void()> call) : call_(std::move(call)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list&) override {
    call_();
    return outputs;
  }

 private:
  std::function<void()> call_;
};

// The one manager that is open; hooks and the allocator go through it.
std::atomic<Manager*> open_manager{nullptr};

}  // namespace

// ----------------------------------------------------------------------------------------------------- beginning, end

std::unique_ptr<Manager> Manager::Create(std::vector<ParameterInput> parameters, ManagerOptions options,
                                         std::string* error) {
  std::unique_ptr<Manager> manager(new Manager);
  *error = manager->Start(std::move(parameters), std::move(options));
  if (!error->empty()) return nullptr;
  return manager;
}

std::unique_ptr<Manager> Manager::CreateEmpty(ManagerOptions options, std::string* error) {
  std::unique_ptr<Manager> manager(new Manager);
  InstallMeteringAllocator();
  manager->options_ = std::move(options);
  const uint64_t other = DeviceMeter::Get().other_bytes();
  SessionOptions& session = manager->options_.session;
  if (session.elastic) {
    // It grows with what turns out to be made.
    session.least_bytes = std::max(session.least_bytes, other + kLeastForMaking);
    if (session.most_bytes != 0) session.least_bytes = std::min(session.least_bytes, session.most_bytes);
  }
  *error = manager->Open();
  if (error->empty()) *error = manager->OpenDisk({}, 0, std::move(manager->space_));
  if (!error->empty()) return nullptr;
  const uint64_t budget = manager->session_->info().budget_bytes;
  if (other >= budget) {
    *error = "Other tensors of this process take " + FormatByteSize(other) + " already, and the budget is " +
             FormatByteSize(budget) + ": there is no room to make a model in. Nothing was changed.";
    return nullptr;
  }
  manager->growing_ = true;
  manager->OpenDoors();
  DeviceMeter::Get().SetBudget(budget);
  DeviceMeter::Get().ResetPeak();
  // Where the daemon chooses the budget, what is made may ask it for more.
  if (session.elastic) manager->Listen();
  return manager;
}

std::string Manager::Start(std::vector<ParameterInput> inputs, ManagerOptions options) {
  InstallMeteringAllocator();
  options_ = std::move(options);
  if (open_manager.load() != nullptr) return kAlreadyManaged;
  std::vector<uint32_t> made;
  std::string error = Group(inputs, &made);
  if (error.empty() && options_.session.elastic) AskForLeast();
  if (error.empty()) error = Open();
  if (!error.empty()) return error;

  // The disk is reserved, and the modules known, before anything moves.
  std::vector<Planned> planned;
  std::vector<ModuleDescription> descriptions;
  error = Plan(*space_, made, &planned, &descriptions);
  if (error.empty()) error = OpenDisk(descriptions, disk_bytes_, std::move(space_));
  if (error.empty()) error = MakeFacets(planned);
  if (!error.empty()) return error;
  NoteRegistered(descriptions);
  OpenDoors();
  error = AdoptWeights();
  if (!error.empty()) {
    ReleaseAll();
    return error;
  }
  Begin();
  return "";
}

std::string Manager::Take(std::vector<ParameterInput> inputs, StepMode step, bool existing_state) {
  options_.step = step;
  options_.existing_state = existing_state;
  std::vector<Planned> planned;
  std::vector<ModuleDescription> descriptions;
  const uint64_t disk_before = disk_bytes_;
  std::vector<uint32_t> made;
  std::string error = Group(inputs, &made);
  if (error.empty()) error = Plan(executor_->space(), made, &planned, &descriptions);
  if (error.empty()) {
    int unused = -1;
    error = session_->Register(descriptions, disk_bytes_, &unused);
  }
  if (error.empty()) error = MakeFacets(planned);
  if (!error.empty()) {
    ForgetModules();
    disk_bytes_ = disk_before;
    return error;
  }
  NoteRegistered(descriptions);
  reserved_disk_bytes_ = std::max(reserved_disk_bytes_, disk_bytes_);
  // What training needs at least is known only now. Where it is not to be had, the first step says so.
  if (options_.session.elastic && LeastNeeded() > budget_bytes()) GrowBudget(LeastNeeded());
  error = AdoptWeights();
  if (!error.empty()) return error;
  // Places on the disk are handed on: no block of their earlier owners may be under way any more.
  if (!executor_->Drain()) return "The tier below does not answer: the model stays as it was made.";
  growing_ = false;
  created_.clear();
  parameter_changed_.store(false);
  Begin();
  return "";
}

void Manager::ForgetModules() {
  parameters_.clear();
  modules_.clear();
  state_bytes_.clear();
  free_disk_.clear();
  registered_modules_ = 0;
  totals_.weights_bytes = totals_.gradients_bytes = totals_.parameter_count = 0;
}

std::string Manager::Group(const std::vector<ParameterInput>& inputs, std::vector<uint32_t>* made) {
  if (inputs.empty()) return "The model has no parameters: there is nothing to manage.";
  // Parameters, and the modules they make up. Parameters over one storage have one owner, the first.
  std::vector<ParameterShape> shapes;
  for (const ParameterInput& input : inputs) {
    const at::Tensor& t = input.tensor;
    if (t.device().type() != at::kCPU || t.layout() != at::kStrided || !t.has_storage()) {
      return "Parameter " + input.name +
             " is not a dense tensor in CPU memory: on the cpu device misa manages those only. "
             "Nothing was changed.";
    }
    shapes.push_back({input.name, t.dim(), static_cast<uint64_t>(t.numel()), StorageOf(t)->nbytes()});
  }
  const std::vector<ModuleGroup> groups = GroupParameters(shapes);
  const size_t first = parameters_.size();
  const size_t most_made = 4 * groups.size();  // each, and one for each facet that it may leave behind
  modules_.reserve(std::max(most_made, kMostModules));
  parameters_.reserve(std::max(inputs.size(), kMostParameters));
  if (modules_.size() + most_made > modules_.capacity() || first + inputs.size() > parameters_.capacity()) {
    return "A session manages at most " + std::to_string(kMostModules) + " modules and " + std::to_string(kMostParameters) +
           " parameters, those that are gone included. Nothing was changed.";
  }
  parameters_.resize(first + inputs.size());
  std::map<std::string, uint32_t> by_name;
  for (uint32_t i = 0; i < modules_.size(); ++i) by_name.emplace(modules_[i]->name, i);
  std::map<c10::StorageImpl*, uint32_t> owner;
  for (const ModuleGroup& group : groups) {
    uint32_t index = kNoModule;
    for (size_t i : group.parameters) {
      c10::StorageImpl* storage = StorageOf(inputs[i].tensor);
      auto found = owner.find(storage);
      if (found == owner.end()) {
        if (index == kNoModule) {
          index = AddModule(group, &by_name);
          made->push_back(index);
        }
        found = owner.emplace(storage, index).first;
      }
      Parameter& p = parameters_[first + i];
      p.name = inputs[i].name;
      p.tensor = inputs[i].tensor;
      p.module = found->second;
      p.storage = storage;
      Module& m = *modules_[found->second];
      m.parameters.push_back(static_cast<uint32_t>(first + i));
      m.parameter_count += static_cast<uint64_t>(p.tensor.numel());
      m.step_bytes += inputs[i].step_bytes;
      state_bytes_[found->second] += Align(inputs[i].expected_state_bytes);
    }
  }
  return "";
}

uint32_t Manager::AddModule(const ModuleGroup& group, std::map<std::string, uint32_t>* by_name) {
  std::string name = group.name;
  for (int number = 2;; ++number) {
    const auto [found, fresh] = by_name->emplace(name, static_cast<uint32_t>(modules_.size()));
    if (fresh) {
      modules_.push_back(std::make_unique<Module>());
      state_bytes_.push_back(0);
    } else if (!IsVacant(*modules_[found->second])) {
      name = group.name + "#" + std::to_string(number);
      continue;
    }
    // One that has come back (adapters of the same names) takes its old place, here and at the daemon.
    Module& module = *modules_[found->second];
    module.name = name;
    module.kind = group.kind;
    module.samplable = group.samplable && (!begun_ || options_.session.mode == Mode::kExact);
    module.parameter_count = module.step_bytes = 0;
    state_bytes_[found->second] = 0;
    return found->second;
  }
}

// It has lost all its parameters, and nothing of it is left in any tier.
bool Manager::IsVacant(const Module& module) const {
  if (!module.parameters.empty() || module.pending.load()) return false;
  for (const Facet* facet : {module.weights, module.gradients, module.optimizer}) {
    if (facet != nullptr && (facet->state.load() != FacetState::kEmpty || keeper_->UsedBytes(*facet) > 0)) return false;
  }
  return true;
}

std::string Manager::Open() {
  if (open_manager.load() != nullptr) return kAlreadyManaged;
  std::string error;
  session_ = Session::Open(options_.session, &error);
  if (!session_) return error;
  const SessionInfo& info = session_->info();
  budget_ = info.budget_bytes;
  space_ = std::make_unique<ChunkSpace>(session_->TakeChunks(), info.chunks_bytes, info.chunk_bytes);
  totals_.link = info.link;
  return "";
}

std::string Manager::OpenDisk(const std::vector<ModuleDescription>& modules, uint64_t disk_bytes,
                              std::unique_ptr<ChunkSpace> space) {
  int disk = -1;
  std::string error = session_->Register(modules, disk_bytes, &disk);
  if (!error.empty()) return error;
  reserved_disk_bytes_ = disk_bytes;
  const SessionInfo& info = session_->info();
  std::unique_ptr<Link> link = info.link_modelled
                                   ? MakeModelledLink(disk, {info.link, info.link_latency_seconds}, &error)
                                   : MakeUringLink(disk, &error);
  if (!link) return error;
  if (info.below == "host") options_.executor.below = "the host tier";
  keeper_ = std::make_unique<StorageKeeper>(&Manager::OnStorageGone, this);
  executor_ = std::make_unique<Executor>(std::move(space), std::move(link), &DeviceMeter::Get(), keeper_.get(),
                                         options_.executor);
  return "";
}

std::string Manager::Plan(const ChunkSpace& space, const std::vector<uint32_t>& made, std::vector<Planned>* planned,
                          std::vector<ModuleDescription>* descriptions) {
  const SessionInfo& info = session_->info();
  uint32_t next_id = executor_ ? static_cast<uint32_t>(executor_->facet_count()) : 0;
  uint64_t largest_step = 0;
  const Module* largest_module = nullptr;
  std::vector<std::set<c10::StorageImpl*>> storages(modules_.size());
  std::set<c10::StorageImpl*> taken;
  std::set<const Facet*> kept;
  for (uint32_t m : made) {
    for (uint32_t i : modules_[m]->parameters) storages[m].insert(parameters_[i].storage);
    taken.insert(storages[m].begin(), storages[m].end());
  }
  std::vector<Facet*> whole(modules_.size(), nullptr);
  for (uint32_t m : made) {
    if (!growing_) break;
    uint64_t weights = 0;
    for (c10::StorageImpl* storage : storages[m]) weights += Align(storage->nbytes());
    whole[m] = WholeCreated(storages[m], space.RoundUp(weights));
    if (whole[m] != nullptr) kept.insert(whole[m]);
  }
  // What was made in a facet that is not kept moves to its module's; the place on the disk is free then for what has no
  // content before the training begins.
  std::vector<const Facet*> left;
  for (const Facet* facet : created_) {
    if (kept.contains(facet)) continue;
    const std::vector<c10::StorageImpl*> in = keeper_->StoragesOf(*facet);
    if (std::all_of(in.begin(), in.end(), [&](c10::StorageImpl* s) { return taken.contains(s); })) {
      free_disk_.emplace(facet->bytes, facet->disk_offset);
    } else {
      left.push_back(facet);
    }
  }
  std::vector<Facet*> vacant = VacantFacets(made);
  for (uint32_t m : made) {
    Module& module = *modules_[m];
    uint64_t weights = 0;
    uint64_t gradients = 0;
    for (c10::StorageImpl* storage : storages[m]) weights += Align(storage->nbytes());
    for (uint32_t i : module.parameters) {
      Parameter& p = parameters_[i];
      p.gradient_offset = gradients;
      gradients += Align(static_cast<uint64_t>(p.tensor.numel()) * p.tensor.element_size());
    }
    module.pinned = guard::IsPinned(module.name, module.kind, options_.pins);
    ModuleDescription description{module.name, module.kind, module.parameter_count, module.samplable, {}, module.pinned};
    const std::pair<FacetKind, uint64_t> facets[] = {
        {FacetKind::kWeights, weights}, {FacetKind::kGradients, gradients}, {FacetKind::kOptimizer, state_bytes_[m]}};
    for (const auto& [kind, bytes] : facets) {
      if (bytes == 0) continue;
      const uint64_t rounded = space.RoundUp(bytes);
      if (kind == FacetKind::kWeights && whole[m] != nullptr) {
        planned->push_back({m, kind, rounded, whole[m]->disk_offset, whole[m]});
        description.facets.push_back({whole[m]->id, kind, rounded});
        continue;
      }
      // What earlier ones have left behind serves again; the module's own first, so that its trace stays as it was.
      const auto serves = [&](const Facet* f) { return f->kind == kind && f->bytes == rounded; };
      const Facet* own = kind == FacetKind::kWeights     ? module.weights
                         : kind == FacetKind::kGradients ? module.gradients
                                                         : module.optimizer;
      auto left_behind = std::find(vacant.begin(), vacant.end(), own);
      if (left_behind == vacant.end() || !serves(own)) left_behind = std::find_if(vacant.begin(), vacant.end(), serves);
      if (left_behind != vacant.end()) {
        planned->push_back({m, kind, rounded, (*left_behind)->disk_offset, *left_behind});
        description.facets.push_back({(*left_behind)->id, kind, rounded});
        vacant.erase(left_behind);
        continue;
      }
      uint64_t offset;
      const auto reused = kind == FacetKind::kWeights ? free_disk_.end() : free_disk_.find(rounded);
      if (reused != free_disk_.end()) {
        offset = reused->second;
        free_disk_.erase(reused);
      } else {
        offset = ReserveDisk(rounded);
      }
      planned->push_back({m, kind, rounded, offset, nullptr});
      description.facets.push_back({next_id++, kind, rounded});
    }
    if (options_.session.mode == Mode::kExact && module.step_bytes + state_bytes_[m] > 0) {
      // The first step makes the state in ordinary memory beside everything else, and then moves it.
      const uint64_t state = space.RoundUp(state_bytes_[m]);
      const uint64_t made = options_.existing_state ? module.step_bytes : state + std::max(module.step_bytes, state);
      const uint64_t needed =
          space.RoundUp(weights) + space.RoundUp(gradients) + made + (options_.existing_state ? state : 0);
      if (needed > largest_step) {
        largest_step = needed;
        largest_module = &module;
      }
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      totals_.weights_bytes += weights;
      totals_.gradients_bytes += gradients;
      totals_.parameter_count += module.parameter_count;
    }
    descriptions->push_back(std::move(description));
  }
  const uint64_t most = options_.session.elastic ? info.chunks_bytes : info.budget_bytes;
  if (largest_step > most) {
    return "The budget of " + FormatByteSize(most) + " is too small: the optimizer's step of " +
           largest_module->name + " alone takes " + FormatByteSize(largest_step) +
           " at once. The smallest budget that works here is above " + std::to_string(largest_step) + " bytes (" +
           FormatByteSize(largest_step) + "), by what forward and backward keep beside it. Nothing was changed.";
  }
  for (const Facet* facet : left) {
    // Made with the model and no part of it now: a frozen second model, say. It is known, for traces name it.
    descriptions->push_back({OutsideName(facet->id), "other", 0, false, {{facet->id, facet->kind, facet->bytes}}});
  }
  return "";
}

// Those of modules that have nothing left, and what the modules just made had at their places before.
std::vector<Facet*> Manager::VacantFacets(const std::vector<uint32_t>& made) const {
  std::vector<Facet*> vacant;
  if (!begun_) return vacant;
  const std::set<uint32_t> fresh(made.begin(), made.end());
  for (uint32_t m = 0; m < modules_.size(); ++m) {
    const Module& module = *modules_[m];
    if (!fresh.contains(m) && !IsVacant(module)) continue;
    for (Facet* facet : {module.weights, module.gradients, module.optimizer}) {
      if (facet != nullptr) vacant.push_back(facet);
    }
  }
  return vacant;
}

Facet* Manager::WholeCreated(const std::set<c10::StorageImpl*>& storages, uint64_t bytes) const {
  const Slot* slot = StorageTable::Get().Find(*storages.begin());
  if (slot == nullptr || slot->keeper != keeper_.get() || slot->facet->module != kNoModule || slot->facet->bytes != bytes) {
    return nullptr;
  }
  const std::vector<c10::StorageImpl*> in = keeper_->StoragesOf(*slot->facet);
  return std::set<c10::StorageImpl*>(in.begin(), in.end()) == storages ? slot->facet : nullptr;
}

std::string Manager::MakeFacets(const std::vector<Planned>& planned) {
  std::string error;
  for (const Planned& plan : planned) {
    static const char* const kNames[] = {"", " weights", " gradients", " optimizer state"};
    Module& module = *modules_[plan.module];
    const std::string name = module.name + kNames[static_cast<int>(plan.kind)];
    Facet* facet = plan.facet;
    if (facet != nullptr) {
      executor_->Describe(facet, plan.module, name);
    } else {
      facet = executor_->AddFacet(plan.module, plan.kind, plan.bytes, plan.offset, name, &error);
    }
    if (facet == nullptr) return error;
    if (plan.kind == FacetKind::kWeights) module.weights = facet;
    if (plan.kind == FacetKind::kGradients) module.gradients = facet;
    if (plan.kind == FacetKind::kOptimizer) module.optimizer = facet;
  }
  return "";
}

// From here on everything that reaches managed tensors, or asks for memory, comes by here.
void Manager::OpenDoors() {
  open_manager.store(this);
  open_ = true;
  ServeManaged();
  SetRoomMaker([this](uint64_t bytes) { return executor_->MakeRoom(bytes); });
  if (growing_) {
    SetTouchHandler(this);
    SetFaultServer(this);
  }
  data_door_ = {[this](const at::TensorBase& t) { BeforeReplace(t); },
                [this](const at::TensorBase& t) { AfterReplace(t); }};
  fork_door_ = {[this] { keeper_->Lock(); }, [this] { keeper_->Unlock(); }, [this] { InChild(); }};
  if (growing_) {
    SetDataDoor(&data_door_);
    SetForkDoor(&fork_door_);
  }
}

void Manager::Begin() {
  begun_ = true;
  executor_->on_step = [this](StepSummary summary) { OnStep(std::move(summary)); };
  if (!listening_) Listen();
  SetTouchHandler(this);
  SetFaultServer(this);
  SetDataDoor(&data_door_);
  SetForkDoor(&fork_door_);
}

// From here on the daemon's plans and budgets come in.
void Manager::Listen() {
  listening_ = true;
  session_->StartTraining(
      [this](const OfferedPlan& offered) {
        std::string refused = executor_->OfferPlan(offered.plan, offered.version, offered.trace_digest);
        if (refused.empty()) {
          std::lock_guard<std::mutex> lock(mutex_);
          totals_.bound = offered.bound;
          totals_.plan_version = offered.version;
          totals_.predicted_step_seconds = offered.plan->step_seconds;
        }
        return refused;
      },
      [this](uint64_t budget, uint64_t serial) {
        std::lock_guard<std::mutex> lock(mutex_);
        told_budget_ = {budget, serial};
        budget_told_.notify_all();
      },
      [this](const std::string& s) { Notice(s); });
  if (options_.session.elastic) executor_->on_need = [this](uint64_t bytes) { return GrowBudget(bytes); };
}

std::string Manager::AdoptCreated(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::StorageImpl*> fresh;
  uint64_t needed = 0;
  for (const at::Tensor& t : tensors) {
    if (!t.defined() || t.device().type() != at::kCPU || t.layout() != at::kStrided || !t.has_storage()) continue;
    c10::StorageImpl* storage = StorageOf(t);
    if (storage->nbytes() == 0 || StorageTable::Get().Find(storage) != nullptr ||
        std::find(fresh.begin(), fresh.end(), storage) != fresh.end()) {
      continue;
    }
    fresh.push_back(storage);
    needed += Align(storage->nbytes());
  }
  if (fresh.empty()) return "";
  const uint64_t bytes = executor_->space().RoundUp(needed);
  std::string error = EnsureDisk(disk_bytes_ + bytes);
  if (!error.empty()) return error;
  Facet* facet = executor_->AddFacet(kNoModule, FacetKind::kWeights, bytes, disk_bytes_, "A parameter just made", &error);
  if (facet == nullptr) return error;
  ReserveDisk(bytes);
  error = executor_->Create(facet);
  if (!error.empty()) return error;
  created_.push_back(facet);
  uint64_t offset = 0;
  for (c10::StorageImpl* storage : fresh) {
    error = keeper_->Bind(storage, facet, offset, "A parameter", /*copied=*/false);
    if (!error.empty()) break;
    offset += Align(storage->nbytes());
  }
  const policy::Use use{facet->id, 0};
  executor_->EndUse(&use, 1);
  return error;
}

// A call to the daemon for each parameter would be slow: room is reserved ahead, where there is any.
std::string Manager::EnsureDisk(uint64_t bytes) {
  if (bytes <= reserved_disk_bytes_) return "";
  constexpr uint64_t kLeastStep = 64ull << 20;
  int unused = -1;
  std::string error;
  for (const uint64_t wanted : {bytes + std::max(kLeastStep, bytes / 2), bytes}) {
    error = session_->Register({}, wanted, &unused);
    if (!error.empty()) continue;
    reserved_disk_bytes_ = wanted;
    return "";
  }
  return error;
}

// What the largest optimizer step needs beside what is there already, and a quarter for what forward and backward keep.
uint64_t Manager::LeastNeeded() const {
  constexpr uint64_t kRounding = 8 * (64 << 10);  // chunks may not be known yet
  uint64_t largest = 0;
  uint64_t outside = 0;  // weights that will move from ordinary memory to the pool
  for (size_t m = 0; m < modules_.size(); ++m) {
    uint64_t weights = 0, gradients = 0;
    std::set<c10::StorageImpl*> seen;
    for (uint32_t i : modules_[m]->parameters) {
      gradients += Align(static_cast<uint64_t>(parameters_[i].tensor.numel()) * parameters_[i].tensor.element_size());
      if (!seen.insert(parameters_[i].storage).second) continue;
      const uint64_t bytes = Align(parameters_[i].storage->nbytes());
      weights += bytes;
      if (StorageTable::Get().Find(parameters_[i].storage) == nullptr) outside += bytes;
    }
    largest =
        std::max(largest, weights + gradients + state_bytes_[m] + std::max(modules_[m]->step_bytes, state_bytes_[m]));
  }
  const uint64_t other = DeviceMeter::Get().other_bytes();
  const uint64_t needed = largest + kRounding + (other - std::min(other, outside));
  return needed + needed / 4;
}

// An elastic budget begins at that; the first steps tell the daemon what it really is.
void Manager::AskForLeast() {
  SessionOptions& session = options_.session;
  session.least_bytes = std::max(session.least_bytes, LeastNeeded());
  if (session.most_bytes != 0) session.least_bytes = std::min(session.least_bytes, session.most_bytes);
}

// A data-loader worker: it has neither the memory (the mappings are not inherited) nor the thread that moves bytes.
void Manager::InChild() {
  keeper_->PoisonAll(
      "This tensor is managed by misa in the process that was forked from; a child cannot reach it. Give it a "
      "copy instead.");
  keeper_->Unlock();
  session_->ForgetInChild();
}

// `tensor.data = other` is no operator. A step that is due belongs to the content of before.
void Manager::BeforeReplace(const at::TensorBase& tensor) {
  if (InForkedChild() || !tensor.has_storage()) return;
  Slot* slot = StorageTable::Get().Find(tensor.storage().unsafeGetStorageImpl());
  if (slot == nullptr || slot->facet->kind != FacetKind::kWeights) return;
  const uint32_t module = slot->facet->module;
  if (module == kNoModule) return;
  if (modules_[module].get() != stepping && modules_[module]->pending.load(std::memory_order_acquire)) {
    const std::string error = RunPending(module);
    TORCH_CHECK(error.empty(), "misa: ", error);
  }
  // The node that takes its gradient knows the shape of before; the next graph makes a new one.
  for (uint32_t i : modules_[module]->parameters) {
    Parameter& p = parameters_[i];
    if (p.tensor.defined() && p.tensor.unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl()) p.accumulator.reset();
  }
  parameter_changed_.store(true);
}

void Manager::AfterReplace(const at::TensorBase& tensor) {
  if (InForkedChild()) return;
  if (growing_) {
    // A model under construction that is cast to another type: its new storages go the way of the old ones.
    const std::string error = tensor.is_leaf() ? AdoptCreated({at::Tensor(tensor)}) : "";
    TORCH_CHECK(error.empty(), "misa: ", error);
    return;
  }
  for (Parameter& p : parameters_) {
    if (p.tensor.defined() && p.tensor.unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl()) {
      WatchGradients();
      return;
    }
  }
}

uint64_t Manager::ReserveDisk(uint64_t bytes) {
  const uint64_t offset = disk_bytes_;
  disk_bytes_ += bytes;
  return offset;
}

std::string Manager::AdoptWeights() {
  DeviceMeter& meter = DeviceMeter::Get();
  const uint64_t budget = budget_bytes();
  uint64_t largest = 0;
  for (const auto& module : modules_) largest = std::max(largest, module->weights->bytes);
  uint64_t freed = 0;
  for (auto& module : modules_) {
    if (module->weights->state.load() != FacetState::kEmpty) continue;  // it was made there
    // The model may have been made larger than the budget; it shrinks to it as its modules are taken over, and two
    // copies exist of no more than one module at a time.
    if (!growing_) meter.SetBudget(std::max(budget, meter.other_bytes() + 2 * largest));
    std::string error = AdoptModule(*module, /*position=*/true, &freed);
    if (!error.empty()) return error;
    if (freed >= budget / kTrimShare) {
      freed = 0;
      TrimFreed();
    }
  }
  TrimFreed();
  return options_.existing_state ? "" : FinishAdoption();
}

// Moves the module's parameters into its facet of weights, which is empty; *freed grows by what they had outside.
std::string Manager::AdoptModule(const Module& module, bool position, uint64_t* freed) {
  const policy::Use use{module.weights->id, policy::kCreate | policy::kWrite};
  std::string error = executor_->Use(&use, 1, position);
  if (!error.empty()) return error;
  uint64_t offset = 0;
  std::set<c10::StorageImpl*> seen;
  for (uint32_t i : module.parameters) {
    Parameter& p = parameters_[i];
    if (!seen.insert(p.storage).second) continue;
    const Slot* made = StorageTable::Get().Find(p.storage);
    const policy::Use from{made == nullptr ? 0 : made->facet->id, policy::kRead};
    if (made != nullptr) error = executor_->Use(&from, 1, /*position=*/false);
    if (!error.empty()) break;
    const bool shared = MayHaveArrays(p.tensor, 1) && MayHaveArrays(p.tensor, TensorsOver(p.storage));
    if (shared) {
      Notice("A NumPy array was made over parameter " + p.name +
             " before misa managed it, and something shares its memory still. Where that is the array, it goes on showing the "
             "values of this moment; make it again to see the parameter.");
    }
    error = keeper_->Bind(p.storage, module.weights, offset, "Parameter " + p.name, /*copied=*/false,
                          /*keep_before=*/shared);
    if (made != nullptr) executor_->EndUse(&from, 1);
    if (!error.empty()) break;
    offset += Align(p.storage->nbytes());
  }
  executor_->EndUse(&use, 1);
  *freed += offset;
  return error;
}

// ---------------------------------------------------------------------------------------------- parameters that come and go

std::string Manager::AdoptLater(const std::vector<ParameterInput>& inputs, std::vector<int64_t>* modules) {
  modules->assign(inputs.size(), -1);
  if (!open_ || growing_ || releasing_.load()) return "The run has ended.";
  const size_t first = parameters_.size();
  const uint64_t disk_before = disk_bytes_;
  std::vector<uint32_t> made;
  std::vector<Planned> planned;
  std::vector<ModuleDescription> descriptions;
  std::string error = Group(inputs, &made);
  if (!error.empty()) return error;
  std::vector<uint32_t> all(inputs.size());
  std::iota(all.begin(), all.end(), static_cast<uint32_t>(first));
  error = Plan(executor_->space(), made, &planned, &descriptions);
  if (error.empty()) {
    DescribeLosses(made, planned, &descriptions);
    int unused = -1;
    error = session_->Register(descriptions, disk_bytes_, &unused);
  }
  if (!error.empty()) {
    disk_bytes_ = disk_before;
    Forget(all);
    return error;
  }
  reserved_disk_bytes_ = std::max(reserved_disk_bytes_, disk_bytes_);
  TakeFromVacant(made, planned);
  error = MakeFacets(planned);
  NoteRegistered(descriptions);
  uint64_t freed = 0;
  for (uint32_t m : made) {
    const Module& module = *modules_[m];
    // What comes later keeps to the budget from the first byte on, and leaves the plan of the step alone.
    if (error.empty()) error = AdoptModule(module, /*position=*/false, &freed);
    if (error.empty() || (module.weights != nullptr && keeper_->UsedBytes(*module.weights) > 0)) continue;
    Forget(std::vector(module.parameters));
  }
  if (freed >= budget_bytes() / kTrimShare) TrimFreed();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Parameter& p = parameters_[first + i];
    if (p.tensor.defined()) (*modules)[i] = p.module;
  }
  return error;
}

// Facets change hands: what vacant modules have left, and those that nobody has now.
void Manager::DescribeLosses(const std::vector<uint32_t>& made, const std::vector<Planned>& planned,
                             std::vector<ModuleDescription>* descriptions) const {
  std::map<const Facet*, uint32_t> taken;
  for (const Planned& plan : planned) {
    if (plan.facet != nullptr) taken.emplace(plan.facet, plan.module);
  }
  const std::set<uint32_t> fresh(made.begin(), made.end());
  std::vector<ModuleDescription> losses;
  for (uint32_t m = 0; m < modules_.size(); ++m) {
    const Module& module = *modules_[m];
    ModuleDescription rest{module.name, module.kind, 0, module.samplable, {}};
    bool loses = false;
    for (const Facet* facet : {module.weights, module.gradients, module.optimizer}) {
      if (facet == nullptr) continue;
      if (taken.contains(facet)) {
        loses = true;
      } else if (fresh.contains(m)) {
        losses.push_back({OutsideName(facet->id), "other", 0, false, {{facet->id, facet->kind, facet->bytes}}});
      } else {
        rest.facets.push_back({facet->id, facet->kind, facet->bytes});
      }
    }
    if (loses && !fresh.contains(m)) losses.push_back(std::move(rest));
  }
  descriptions->insert(descriptions->end(), std::make_move_iterator(losses.begin()), std::make_move_iterator(losses.end()));
}

// The same, done here.
void Manager::TakeFromVacant(const std::vector<uint32_t>& made, const std::vector<Planned>& planned) {
  std::set<const Facet*> taken;
  for (const Planned& plan : planned) taken.insert(plan.facet);
  const std::set<uint32_t> fresh(made.begin(), made.end());
  const size_t count = modules_.size();
  for (uint32_t m = 0; m < count; ++m) {
    for (Facet* Module::*kind : {&Module::weights, &Module::gradients, &Module::optimizer}) {
      Facet* facet = (*modules_[m]).*kind;
      if (facet == nullptr || (!taken.contains(facet) && !fresh.contains(m))) continue;
      (*modules_[m]).*kind = nullptr;
      if (taken.contains(facet)) continue;
      // It waits for one of its size, in a module that has no parameters.
      const std::string name = OutsideName(facet->id);
      const auto known = std::find_if(modules_.begin(), modules_.end(), [&](const auto& one) { return one->name == name; });
      const auto index = static_cast<uint32_t>(known - modules_.begin());
      if (known == modules_.end()) {
        modules_.push_back(std::make_unique<Module>());
        modules_.back()->name = name;
        modules_.back()->kind = "other";
        state_bytes_.push_back(0);
      }
      (*modules_[index]).*kind = facet;
      executor_->Describe(facet, index, facet->name);
    }
  }
}

// The daemon counts modules as it comes to know their names.
void Manager::NoteRegistered(const std::vector<ModuleDescription>& descriptions) {
  std::map<std::string, Module*> by_name;
  for (const auto& module : modules_) by_name.emplace(module->name, module.get());
  for (const ModuleDescription& description : descriptions) {
    const auto found = by_name.find(description.name);
    if (found == by_name.end()) {
      ++registered_modules_;
    } else if (found->second->registered == kNoModule) {
      found->second->registered = registered_modules_++;
    }
  }
}

void Manager::Forget(const std::vector<uint32_t>& parameters) {
  for (uint32_t i : parameters) {
    Parameter& p = parameters_[i];
    if (!p.tensor.defined()) continue;
    Module& module = *modules_[p.module];
    std::erase(module.parameters, i);
    const bool shared = std::any_of(module.parameters.begin(), module.parameters.end(),
                                    [&](uint32_t other) { return parameters_[other].storage == p.storage; });
    const auto count = static_cast<uint64_t>(p.tensor.numel());
    module.parameter_count -= count;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      totals_.parameter_count -= count;
      totals_.gradients_bytes -= Align(count * p.tensor.element_size());
      if (!shared) totals_.weights_bytes -= Align(p.storage->nbytes());
    }
    p.storage = nullptr;
    p.accumulator.reset();
    p.tensor.reset();  // where nobody else holds it, its memory goes with this
  }
}

size_t Manager::TensorsOver(const c10::StorageImpl* storage) const {
  std::set<const at::TensorImpl*> tensors;
  for (const Parameter& p : parameters_) {
    if (p.storage == storage) tensors.insert(p.tensor.unsafeGetTensorImpl());
  }
  return tensors.size();
}

std::string Manager::AdoptExisting(uint32_t module) {
  DeviceMeter& meter = DeviceMeter::Get();
  uint64_t largest = 0;
  for (const auto& m : modules_) {
    largest = std::max(largest, m->weights->bytes + (m->optimizer != nullptr ? m->optimizer->bytes : 0));
  }
  meter.SetBudget(std::max(budget_bytes(), meter.other_bytes() + 2 * largest));
  return RunStepper(module, /*adopting=*/true);
}

std::string Manager::FinishAdoption() {
  DeviceMeter& meter = DeviceMeter::Get();
  meter.SetBudget(budget_bytes());
  std::string error = executor_->FitBudget();
  if (!error.empty()) return error;
  executor_->ResetTrace();
  meter.ResetPeak();
  return "";
}

std::string Manager::AdoptLoaded(uint32_t module) {
  std::vector<at::Tensor> state;
  const Module* outer = std::exchange(stepping, modules_[module].get());
  std::string error = stepper_(module, &state);
  if (error.empty()) error = AdoptState(module, state);
  stepping = outer;
  return error;
}

std::string Manager::ResumeSampler(const std::string& state) { return session_->ResumeSampler(state); }

Manager::~Manager() {
  if (InForkedChild() || process_ends_) {
    // Everything here belongs to the parent, threads and locks too; or the process ends, and what is managed then is not
    // worth reading back, all at once at that. Left as it is.
    static_cast<void>(executor_.release());
    static_cast<void>(keeper_.release());
    static_cast<void>(session_.release());
    return;
  }
  ReleaseAll();
}

bool Manager::Release(std::string* error) {
  if (!open_) return true;
  *error = Flush();
  if (!error->empty()) return false;
  uint64_t held = 0;
  uint64_t largest = 0;  // is there twice while it is copied
  for (size_t i = 0; i < executor_->facet_count(); ++i) {
    const Facet& f = *executor_->facet(static_cast<uint32_t>(i));
    if (f.state.load() == FacetState::kEmpty) continue;
    held += f.bytes;
    largest = std::max(largest, f.bytes);
  }
  if (held + largest + DeviceMeter::Get().other_bytes() > budget_bytes()) return false;
  bool no_room = false;
  *error = GiveBack(/*within_budget=*/true, &no_room);
  return error->empty() && !no_room;
}

std::string Manager::ReleaseAll() {
  bool no_room = false;
  return GiveBack(/*within_budget=*/false, &no_room);
}

std::string Manager::GiveBack(bool within_budget, bool* no_room) {
  if (!open_) return "";
  std::string error;
  releasing_ = true;
  std::string failed_step;
  if (executor_) {
    if (!within_budget) DeviceMeter::Get().SetBudget(DeviceMeter::kUnlimited);
    for (size_t i = 0; i < executor_->facet_count(); ++i) {
      Facet* facet = executor_->facet(static_cast<uint32_t>(i));
      const std::vector<Extent> parts = keeper_->PartsOf(*facet);
      if (parts.empty()) continue;
      const policy::Use use{facet->id, policy::kRead};
      std::string failed = executor_->Use(&use, 1, /*position=*/false);
      if (!failed.empty()) {
        error = failed;
        continue;
      }
      uint64_t bytes = 0;
      for (const Extent& part : parts) bytes += part.bytes;
      keeper_->Heal(*facet);  // no sentence of a failure goes along
      if (!executor_->MakeRoom(bytes).empty()) {
        // What has its own memory by now keeps it, the rest stays managed: both are good to use.
        *no_room = true;
      } else {
        failed = executor_->Surrender(facet, parts);
        if (failed.empty()) {
          keeper_->HandOver(*facet);
        } else {
          DeviceMeter::Get().SubtractOther(bytes);
          error = failed;
        }
      }
      executor_->EndUse(&use, 1);
      if (*no_room) {
        releasing_ = false;
        return "";
      }
    }
  }
  // What could not be read back stays bound: its addresses must not be given to anybody else.
  if (!error.empty()) return error;
  DeviceMeter::Get().SetBudget(DeviceMeter::kUnlimited);
  // What is still due is done in ordinary memory, where no budget and no lease can be too small for it.
  for (uint32_t i = 0; i < modules_.size(); ++i) {
    if (!modules_[i]->pending.exchange(false) || !stepper_) continue;
    std::vector<at::Tensor> state;
    const std::string failed = stepper_(i, &state);
    if (failed_step.empty()) failed_step = failed;
  }
  SetTouchHandler(nullptr);
  SetFaultServer(nullptr);
  SetRoomMaker(nullptr);
  GiveBackFreed();
  SetDataDoor(nullptr);
  SetForkDoor(nullptr);
  open_ = false;
  open_manager.store(nullptr);
  for (Parameter& p : parameters_) p.accumulator.reset();
  if (session_) session_->Close();
  executor_.reset();
  return failed_step;
}

void Manager::LetGo() {
  for (Parameter& p : parameters_) {
    p.accumulator.reset();
    p.tensor.reset();
  }
}

void Manager::OnStorageGone(void* context, Facet* facet, bool last) {
  if (InForkedChild()) return;
  auto* manager = static_cast<Manager*>(context);
  if (facet->kind == FacetKind::kWeights && !manager->releasing_.load()) manager->parameter_changed_.store(true);
  if (last) manager->executor_->Discard(facet);
}

void Manager::Notice(std::string sentence) {
  std::fprintf(stderr, "misa: %s\n", sentence.c_str());
  std::lock_guard<std::mutex> lock(mutex_);
  if (totals_.notices.size() < kMaxNotices) totals_.notices.push_back(std::move(sentence));
}

// ------------------------------------------------------------------------------------------------------------ touches

std::string Manager::Touch(const Touched* touched, size_t count) {
  if (InForkedChild()) return "not here";  // the storages say it
  std::string error;
  for (size_t i = 0; i < count && error.empty(); ++i) {
    if (touched[i].facet->module == kNoModule) continue;
    const Module* module = modules_[touched[i].facet->module].get();
    if (module != stepping && module->pending.load(std::memory_order_acquire)) {
      error = RunPending(touched[i].facet->module);
    }
  }
  constexpr size_t kInline = 8;
  policy::Use few[kInline];
  std::vector<policy::Use> many;
  policy::Use* uses = few;
  if (count > kInline) {
    many.resize(count);
    uses = many.data();
  }
  for (size_t i = 0; i < count; ++i) uses[i] = {touched[i].facet->id, touched[i].access};
  if (error.empty()) error = executor_->Use(uses, count, /*position=*/stepping == nullptr);
  if (!error.empty()) {
    for (size_t i = 0; i < count; ++i) keeper_->Poison(*touched[i].facet, "misa: " + error);
    poisoned_.store(true);
  } else if (poisoned_.load(std::memory_order_relaxed)) {
    // An earlier failure's sentence must not outlive the failure.
    for (size_t i = 0; i < count; ++i) keeper_->Heal(*touched[i].facet);
  }
  return error;
}

void Manager::EndTouch(const Touched* touched, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const policy::Use use{touched[i].facet->id, touched[i].access};
    executor_->EndUse(&use, 1);
  }
}

// A step that is due would change what the view shows, and autograd's word of views (those of `unbind`, `chunk`) may not
// outlive a change of their base; so the step comes first. The data itself need not be there.
void Manager::BeforeView(Facet* facet) {
  if (InForkedChild() || facet->module == kNoModule) return;
  const Module& module = *modules_[facet->module];
  if (&module == stepping || !module.pending.load(std::memory_order_acquire)) return;
  const std::string error = RunPending(facet->module);
  if (error.empty()) return;
  keeper_->Poison(*facet, "misa: " + error);
  poisoned_.store(true);
}

std::string Manager::Pin(const at::Tensor& tensor) {
  Slot* slot = tensor.has_storage() ? StorageTable::Get().Find(StorageOf(tensor)) : nullptr;
  if (slot == nullptr) return "";
  const Touched touched{slot->facet, policy::kRead | policy::kWrite};
  return Touch(&touched, 1);
}

void Manager::Unpin(const at::Tensor& tensor) {
  Slot* slot = tensor.has_storage() ? StorageTable::Get().Find(StorageOf(tensor)) : nullptr;
  if (slot == nullptr) return;
  const Touched touched{slot->facet, 0};
  EndTouch(&touched, 1);
}

std::string Manager::Hold(const at::Storage& storage, bool write) {
  Slot* slot = StorageTable::Get().Find(storage.unsafeGetStorageImpl());
  if (slot == nullptr) return "";
  if (InForkedChild()) return "This tensor is managed by misa in the process that was forked from.";
  Facet& facet = *slot->facet;
  if (facet.module != kNoModule && modules_[facet.module].get() != stepping && modules_[facet.module]->pending.load()) {
    const std::string error = RunPending(facet.module);
    if (!error.empty()) return error;
  }
  const policy::Use use{facet.id, static_cast<uint8_t>(policy::kRead | (write ? policy::kWrite : 0))};
  const std::string error = executor_->Use(&use, 1, /*position=*/false);
  if (error.empty()) keeper_->Heal(facet);  // an earlier failure's sentence must not outlive the failure
  return error;
}

void Manager::LetGoOf(const at::Storage& storage) {
  Slot* slot = StorageTable::Get().Find(storage.unsafeGetStorageImpl());
  if (slot == nullptr) return;
  const policy::Use use{slot->facet->id, 0};
  executor_->EndUse(&use, 1);
}

uint64_t Manager::AddressOf(const at::Storage& storage) const {
  const Slot* slot = StorageTable::Get().Find(storage.unsafeGetStorageImpl());
  return slot == nullptr ? 0 : reinterpret_cast<uintptr_t>(slot->facet->address + slot->offset);
}

bool Manager::IsManaged(const at::Tensor& tensor) const {
  return tensor.has_storage() && StorageTable::Get().Find(StorageOf(tensor)) != nullptr;
}

int64_t Manager::ModuleOf(const at::Tensor& tensor) const {
  Slot* slot = tensor.has_storage() ? StorageTable::Get().Find(StorageOf(tensor)) : nullptr;
  return slot == nullptr || slot->facet->module == kNoModule ? -1 : static_cast<int64_t>(slot->facet->module);
}

std::string Manager::Look(const c10::StorageImpl* storage) {
  Slot* slot = storage != nullptr ? StorageTable::Get().Find(storage) : nullptr;
  if (slot == nullptr || InForkedChild()) return "";  // there the storage says it
  KeepFaultDoor();
  Facet& facet = *slot->facet;
  executor_->MarkRaw(&facet);
  if (facet.module != kNoModule && modules_[facet.module].get() != stepping && modules_[facet.module]->pending.load()) {
    const std::string error = RunPending(facet.module);
    if (!error.empty()) return error;
  }
  // No position of the training: a look is not repeated with every step.
  const policy::Use use{facet.id, policy::kRead};
  const std::string error = executor_->Use(&use, 1, /*position=*/false);
  if (!error.empty()) return error;
  keeper_->Heal(facet);  // an earlier failure's sentence must not outlive the failure
  executor_->EndUse(&use, 1);
  return "";
}

void Manager::PinTogether(const std::vector<at::Tensor>& tensors, std::vector<Touched>* pinned) {
  if (InForkedChild()) return;
  std::vector<policy::Use> uses;
  uint64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    Slot* slot = tensor.defined() && tensor.has_storage() ? StorageTable::Get().Find(StorageOf(tensor)) : nullptr;
    if (slot == nullptr || std::any_of(pinned->begin(), pinned->end(),
                                       [&](const Touched& one) { return one.facet == slot->facet; })) {
      continue;
    }
    bytes += slot->facet->bytes;
    pinned->push_back({slot->facet, policy::kRead});
    uses.push_back({slot->facet->id, policy::kRead});
    if (slot->facet->module == kNoModule) continue;
    const Module& module = *modules_[slot->facet->module];
    if (&module == stepping || !module.pending.load(std::memory_order_acquire)) continue;
    const std::string error = RunPending(slot->facet->module);
    TORCH_CHECK(error.empty(), "misa: ", error);
  }
  if (uses.empty()) return;
  // What the code makes meanwhile needs room beside them.
  const DeviceMeter& meter = DeviceMeter::Get();
  const uint64_t left = meter.budget_bytes() - std::min(meter.budget_bytes(), meter.other_bytes());
  if (bytes > left / 2) return pinned->clear();
  if (!executor_->Use(uses.data(), uses.size(), /*position=*/stepping == nullptr).empty()) pinned->clear();
}

// A raw pointer is used on what it cannot have as it is.
std::string Manager::Serve(Facet& facet) {
  if (InForkedChild()) {
    return facet.name + " is managed in the process that was forked from; a child cannot reach it. Give it a copy instead.";
  }
  if (facet.module == kNoModule) return executor_->Reach(&facet);
  Module& module = *modules_[facet.module];
  if (&module != stepping && facet.kind != FacetKind::kGradients && module.pending.load(std::memory_order_acquire)) {
    const auto step = [this, &facet] { return RunPending(facet.module); };
    const std::string error = step_guard_ ? step_guard_(step) : step();
    if (module.pending.load(std::memory_order_acquire)) return error;
    // As in plain training, what a step that failed has left is there to be looked at.
    if (!error.empty()) Notice(error);
  }
  return executor_->Reach(&facet);
}

// ----------------------------------------------------------------------------------------------------------- stepping

std::string Manager::MarkPending(uint32_t index) {
  Module& module = *modules_[index];
  module.pending.store(true, std::memory_order_release);
  if (options_.step != StepMode::kDeferred) return "";
  for (uint32_t i : module.parameters) {
    const at::Tensor& t = parameters_[i].tensor;
    if (t.defined() && StorageTable::Get().Find(StorageOf(t)) == nullptr) return RunPending(index);
  }
  // Whoever holds raw pointers must not see the bytes of before the step; operators come here first.
  Veil(module, true);
  return "";
}

void Manager::Veil(const Module& module, bool on) {
  for (Facet* facet : {module.weights, module.optimizer}) {
    if (facet != nullptr) executor_->Veil(facet, on);
  }
}

std::string Manager::RunPending(uint32_t index) {
  Module& module = *modules_[index];
  {
    std::unique_lock<std::mutex> lock(pending_mutex_);
    if (module.running == std::this_thread::get_id()) return "";
    while (module.running != std::thread::id()) {
      // Another thread steps it. Whatever that thread may need from this one (the interpreter's lock) is given up.
      lock.unlock();
      bool ended = false;
      const std::function<void()> wait = [&] {
        std::unique_lock<std::mutex> again(pending_mutex_);
        ended = pending_done_.wait_for(again, std::chrono::duration<double>(options_.executor.wait_seconds),
                                       [&] { return module.running == std::thread::id(); });
      };
      if (wait_guard_) {
        wait_guard_(wait);
      } else {
        wait();
      }
      lock.lock();
      if (!ended) {
        return "Another thread has been at the optimizer's step of " + module.name + " for " +
               std::to_string(static_cast<int>(options_.executor.wait_seconds)) +
               " s and has not ended it. Its content is not lost; use it again when that step is done, or give misa.manage "
               "more wait_seconds.";
      }
    }
    if (!module.pending.load()) return "";
    module.running = std::this_thread::get_id();
  }
  const std::string error = RunStepper(index);
  {
    std::lock_guard<std::mutex> lock(pending_mutex_);
    module.running = std::thread::id();
    if (error.empty()) module.pending.store(false, std::memory_order_release);
  }
  pending_done_.notify_all();
  return error;
}

std::string Manager::StepModule(uint32_t module) {
  modules_[module]->pending.store(true, std::memory_order_release);
  return RunPending(module);
}

std::string Manager::RunStepper(uint32_t index, bool adopting) {
  Module& module = *modules_[index];
  Veil(module, false);
  policy::Use uses[3];
  size_t count = 0;
  const auto add = [&](Facet* facet, uint8_t access) {
    if (facet != nullptr && facet->state.load() != FacetState::kEmpty) uses[count++] = {facet->id, access};
  };
  add(module.weights, policy::kRead | policy::kWrite);
  add(module.gradients, policy::kRead);
  add(module.optimizer, policy::kRead | policy::kWrite);
  std::string error = executor_->Use(uses, count, /*position=*/true);
  if (!error.empty()) return error;
  if (!adopting) {
    // All or nothing: a step that stops in its middle cannot be taken back, so its room is there before it begins.
    uint64_t room = module.step_bytes;
    if (module.optimizer != nullptr && module.optimizer->state.load() == FacetState::kEmpty) {
      // The state is made in ordinary memory, and then moves.
      room = module.optimizer->bytes + std::max(room, module.optimizer->bytes);
    }
    error = room > 0 ? executor_->EnsureRoom(room) : "";
    if (!error.empty()) {
      executor_->EndUse(uses, count);
      return "The optimizer's step of " + module.name + " was not begun. " + error;
    }
  }
  // An earlier failure's sentence must not outlive this.
  for (size_t i = 0; i < count; ++i) keeper_->Heal(*executor_->facet(uses[i].facet));
  const Module* outer = std::exchange(stepping, &module);
  std::vector<at::Tensor> state;
  error = stepper_(index, &state);
  // As in plain training a step that fails is an error once, and is not repeated.
  if (!error.empty()) module.pending.store(false, std::memory_order_release);
  if (error.empty()) error = AdoptState(index, state);
  stepping = outer;
  executor_->EndUse(uses, count);
  return error;
}

std::string Manager::AdoptState(uint32_t index, const std::vector<at::Tensor>& state) {
  Module& module = *modules_[index];
  std::vector<c10::StorageImpl*> fresh;
  uint64_t needed = 0;
  for (const at::Tensor& tensor : state) {
    if (!tensor.defined() || !tensor.has_storage() || tensor.device().type() != at::kCPU) continue;
    c10::StorageImpl* storage = StorageOf(tensor);
    if (storage->nbytes() < kLeastStateBytes || MayHaveArrays(tensor, 1) || StorageTable::Get().Find(storage) != nullptr ||
        std::find(fresh.begin(), fresh.end(), storage) != fresh.end()) {
      continue;
    }
    fresh.push_back(storage);
    needed += Align(storage->nbytes());
  }
  if (fresh.empty()) return "";
  if (module.optimizer == nullptr) {
    // An optimizer whose state was not known beforehand: its room on the disk is reserved now.
    std::string error;
    const uint64_t bytes = executor_->space().RoundUp(needed);
    const uint64_t before = disk_bytes_;
    const uint64_t offset = ReserveDisk(bytes);
    int unused = -1;
    ModuleDescription description{module.name, module.kind, module.parameter_count, module.samplable, {}, module.pinned};
    for (const Facet* f : {module.weights, module.gradients}) {
      if (f != nullptr) description.facets.push_back({f->id, f->kind, f->bytes});
    }
    description.facets.push_back({static_cast<uint32_t>(executor_->facet_count()), FacetKind::kOptimizer, bytes});
    error = session_->Register({description}, disk_bytes_, &unused);
    if (error.empty()) {
      module.optimizer =
          executor_->AddFacet(index, FacetKind::kOptimizer, bytes, offset, module.name + " optimizer state", &error);
    }
    if (!error.empty()) {
      disk_bytes_ = before;
      if (!warned_state_.exchange(true)) {
        Notice("Optimizer state of " + module.name + " stays in memory unmanaged: " + error);
      }
      return "";
    }
  }
  Facet* facet = module.optimizer;
  const bool empty = facet->state.load() == FacetState::kEmpty;
  const auto no_room = [&] {
    if (!warned_state_.exchange(true)) {
      Notice("The optimizer keeps more state for " + module.name + " than was foreseen (" + FormatByteSize(needed) +
             " more): that part stays in memory unmanaged and counts against the budget.");
    }
    return std::string();
  };
  // Where other state stays, the new one goes between.
  if (keeper_->UsedBytes(*facet) + needed > facet->bytes) return no_room();
  const policy::Use use{
      facet->id, static_cast<uint8_t>(empty ? policy::kCreate | policy::kWrite : policy::kRead | policy::kWrite)};
  std::string error = executor_->Use(&use, 1, /*position=*/true);
  if (!error.empty()) return error;
  for (c10::StorageImpl* storage : fresh) {
    const uint64_t offset = keeper_->FirstFit(*facet, storage->nbytes(), kAlignment);
    if (offset == facet->bytes) {
      no_room();
      continue;
    }
    error = keeper_->Bind(storage, facet, offset, "Optimizer state of " + module.name, /*copied=*/false);
    if (!error.empty()) break;
  }
  executor_->EndUse(&use, 1);
  return error;
}

std::string Manager::Flush() {
  std::string error;
  for (bool present : {true, false}) {
    for (uint32_t i = 0; i < modules_.size() && error.empty(); ++i) {
      Module& module = *modules_[i];
      if (!module.pending.load()) continue;
      const FacetState state = module.weights->state.load();
      if (present && state != FacetState::kDevice && state != FacetState::kReady) continue;
      error = RunPending(i);
    }
  }
  return error;
}

void Manager::EndStep() {
  KeepFaultDoor();
  if (parameter_changed_.exchange(false)) CheckParameters();
  executor_->EndStep();
}

void Manager::CheckParameters() {
  for (Parameter& p : parameters_) {
    if (!p.tensor.defined()) continue;
    c10::StorageImpl* storage = StorageOf(p.tensor);
    if (storage == p.storage && StorageTable::Get().Find(storage) != nullptr) continue;
    if (StorageTable::Get().Find(storage) != nullptr) continue;  // now another managed tensor's storage
    p.storage = storage;
    Notice("Parameter " + p.name +
           " was resized or replaced while misa managed it. Its new content is kept and trained; "
           "it stays in ordinary memory from now on and counts against the budget.");
  }
}

// ---------------------------------------------------------------------------------------------------------- gradients

void Manager::WatchGradients() {
  for (uint32_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = parameters_[i];
    if (!p.tensor.defined() || !p.tensor.requires_grad() || p.accumulator != nullptr) continue;
    std::shared_ptr<torch::autograd::Node> node = torch::autograd::impl::grad_accumulator(p.tensor);
    if (node == nullptr) continue;
    node->add_post_hook(std::make_unique<GradientHook>([this, i] {
      if (open_manager.load() == this && !InForkedChild()) OnGradient(i);
    }));
    p.accumulator = node;
  }
}

void Manager::OnGradient(uint32_t index) {
  Parameter& p = parameters_[index];
  if (!p.tensor.defined()) return;
  const std::string error = TakeGradient(p);
  TORCH_CHECK(error.empty(), "misa: ", error);
  p.has_gradient = true;
  ++p.gradients;
  if (options_.step != StepMode::kInBackward || !gradient_complete_) return;
  p.fresh = true;
  const Module& module = *modules_[p.module];
  for (uint32_t i : module.parameters) {
    if (parameters_[i].tensor.requires_grad() && !parameters_[i].fresh) return;
  }
  const std::string failed = gradient_complete_(p.module);
  Settle(module.parameters);
  TORCH_CHECK(failed.empty(), "misa: ", failed);
}

std::vector<uint32_t> Manager::FreshParameters(uint32_t module) const {
  std::vector<uint32_t> fresh;
  for (uint32_t i : modules_[module]->parameters) {
    if (parameters_[i].fresh) fresh.push_back(i);
  }
  return fresh;
}

void Manager::Settle(const std::vector<uint32_t>& parameters) {
  for (uint32_t i : parameters) parameters_[i].fresh = false;
}

std::string Manager::TakeGradient(Parameter& p) {
  const at::Tensor& gradient = p.tensor.grad();
  kernels::Element element;
  if (!gradient.defined() || gradient.layout() != at::kStrided || !gradient.has_storage() ||
      !ElementOf(gradient, &element)) {
    return "";
  }
  const auto count = static_cast<size_t>(gradient.numel());
  c10::StorageImpl* storage = StorageOf(gradient);
  const auto measure = [&](void* target) {
    const kernels::Sums sums = kernels::MeasureAndCopy(gradient.const_data_ptr(), target, count, element);
    p.statistics = {sums.sum, sums.sum_squares, count};
  };
  const bool whole = !MayHaveArrays(gradient, 1) && gradient.is_non_overlapping_and_dense() && gradient.storage_offset() == 0 &&
                     storage->nbytes() == count * gradient.element_size();
  if (Slot* slot = StorageTable::Get().Find(storage)) {
    // Accumulated in place into what is managed already.
    const policy::Use use{slot->facet->id, policy::kRead};
    std::string error = executor_->Use(&use, 1, /*position=*/true);
    if (!error.empty()) return error;
    if (gradient.is_non_overlapping_and_dense()) measure(nullptr);
    executor_->EndUse(&use, 1);
    return "";
  }
  Module& module = *modules_[p.module];
  if (!whole || count * gradient.element_size() < kAlignment || options_.step == StepMode::kInBackward ||
      module.gradients == nullptr || !take_gradients_) {
    if (gradient.is_non_overlapping_and_dense()) measure(nullptr);
    return "";
  }
  // A step that is still due uses the gradients of before; they go with it.
  if (module.pending.load()) {
    const std::string error = RunPending(p.module);
    if (!error.empty()) return error;
  }
  Facet* facet = module.gradients;
  if (keeper_->Occupied(*facet, p.gradient_offset)) {
    // Somebody still holds an earlier gradient: that one keeps its place.
    measure(nullptr);
    return "";
  }
  const bool empty = facet->state.load() == FacetState::kEmpty;
  const policy::Use use{
      facet->id, static_cast<uint8_t>(empty ? policy::kCreate | policy::kWrite : policy::kRead | policy::kWrite)};
  std::string error = executor_->Use(&use, 1, /*position=*/true);
  if (!error.empty()) return error;
  measure(facet->address + p.gradient_offset);
  error = keeper_->Bind(storage, facet, p.gradient_offset, "The gradient of " + p.name, /*copied=*/true);
  executor_->EndUse(&use, 1);
  return error;
}

std::vector<ModuleStatistics> Manager::TakeStatistics() {
  std::vector<ModuleStatistics> all;
  for (uint32_t m = 0; m < modules_.size(); ++m) {
    ModuleStatistics statistics{m, {}};
    for (uint32_t i : modules_[m]->parameters) {
      Parameter& p = parameters_[i];
      if (!p.has_gradient) continue;
      p.has_gradient = false;
      statistics.statistics.sum += p.statistics.sum;
      statistics.statistics.sum_squares += p.statistics.sum_squares;
      statistics.statistics.count += p.statistics.count;
    }
    if (statistics.statistics.count > 0) all.push_back(statistics);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  finished_statistics_ = all;
  return all;
}

uint32_t Manager::TakeMicroBatches() {
  uint32_t most = 0;
  for (Parameter& p : parameters_) most = std::max(most, std::exchange(p.gradients, 0));
  return most;
}

void Manager::SetLoss(double loss, uint64_t rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  loss_ = loss;
  rows_ = rows;
}

void Manager::SetSampling(uint64_t round, std::vector<uint32_t> active, uint64_t digest, uint32_t counted_steps,
                          bool waits) {
  std::lock_guard<std::mutex> lock(mutex_);
  round_ = round;
  active_ = std::move(active);
  sampler_digest_ = digest;
  counted_steps_ = counted_steps;
  sampling_waits_ = waits;
}

void Manager::SetTask(std::string name, double weight) {
  std::lock_guard<std::mutex> lock(mutex_);
  task_ = std::move(name);
  task_weight_ = weight;
}

// ------------------------------------------------------------------------------------------------------------ reports

void Manager::OnStep(StepSummary summary) {
  StepReport report;
  report.states = executor_->States();
  report.problem = executor_->TakeProblem();
  report.device_bytes = DeviceMeter::Get().total_bytes();
  report.pool_backed_bytes = DeviceMeter::Get().pool_bytes();
  report.budget_serial = budget_serial_;
  if (!report.problem.empty()) Notice(report.problem);
  DecideGradients(*summary.trace);
  // By this thread alone.
  TraceOnce* seen = traces_.Touch(summary.trace_digest);
  const bool again = std::exchange(seen->seen, true);
  // A step like one before has nothing new inside.
  if (!again) {
    report.mode_traces = NewModeTraces(*summary.trace);
    for (const trace::Section& section : report.mode_traces) {
      sections_[section.mode] = std::make_shared<const policy::Trace>(section.trace);
      PlanSection(section.mode);
    }
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    report.statistics = std::move(finished_statistics_);
    finished_statistics_.clear();
    std::erase_if(report.statistics, [&](const ModuleStatistics& s) { return modules_[s.module]->registered == kNoModule; });
    for (ModuleStatistics& s : report.statistics) s.module = modules_[s.module]->registered;
    report.round = round_;
    report.active_modules = active_;
    report.sampler_digest = sampler_digest_;
    report.task = task_;
    report.task_weight = task_weight_;
    report.counted_steps = counted_steps_;
    report.sampling_waits = sampling_waits_;
    report.loss = std::exchange(loss_, std::nullopt);
    report.rows = rows_;
    last_trace_ = summary.trace;
    last_peak_bytes_ = summary.device_peak_bytes;
    // A trace that will not come back is not worth a plan; the first ones are, for want of a better.
    report.send_trace = !seen->sent && summary.trace_remembered && (again || summary.step <= 3);
    // The first traces are timed while everything is loaded on demand and memory is touched for the first time. Once a plan
    // is in force the same trace goes up again where its times have moved, ever more rarely.
    const double compute = ComputeSeconds(*summary.trace);
    if (report.send_trace) {
      seen->refresh_gap = kFirstRefreshSteps;
    } else if (seen->sent && summary.plan_version > 0 && summary.step >= seen->next_refresh &&
               std::abs(compute - seen->compute_seconds) > kRefreshShare * seen->compute_seconds) {
      report.send_trace = true;
      seen->refresh_gap *= 2;
    }
    if (report.send_trace) {
      seen->sent = true;
      seen->compute_seconds = compute;
      seen->next_refresh = summary.step + seen->refresh_gap;
    }
    if (totals_.step_seconds.size() < kMaxSteps) {
      totals_.step_seconds.push_back(summary.step_seconds);
      totals_.stall_seconds.push_back(summary.counters.stall_seconds);
      totals_.loaded_bytes.push_back(summary.counters.loaded_bytes_demand + summary.counters.loaded_bytes_prefetch);
      totals_.unloaded_bytes.push_back(summary.counters.unloaded_bytes);
    }
    const policy::LinkRates& measured = summary.measured;
    if (measured.load > 0) totals_.link.load = measured.load;
    if (measured.unload > 0) totals_.link.unload = measured.unload;
    if (measured.duplex_load > 0) totals_.link.duplex_load = measured.duplex_load;
    if (measured.duplex_unload > 0) totals_.link.duplex_unload = measured.duplex_unload;
  }
  report.summary = std::move(summary);
  session_->Report(std::move(report));
  ApplyBudget();
}

bool Manager::GrowBudget(uint64_t smallest_bytes) {
  constexpr double kMostSeconds = 30;
  const uint64_t most = session_->info().chunks_bytes;
  if (smallest_bytes > most || releasing_.load()) return false;
  // A little more than now: the next operator may need it.
  session_->AskForBudget(std::min(most, smallest_bytes + smallest_bytes / 8));
  const auto end = std::chrono::steady_clock::now() +
                   std::chrono::duration<double>(std::min(kMostSeconds, options_.executor.wait_seconds));
  std::unique_lock<std::mutex> lock(mutex_);
  while (told_budget_.serial == 0 || told_budget_.bytes < smallest_bytes) {
    // Another thread may have been given what this one asks for.
    if (budget_bytes() >= smallest_bytes) return true;
    if (std::chrono::steady_clock::now() >= end || !session_->daemon_alive()) return false;
    budget_told_.wait_for(lock, std::chrono::milliseconds(100));
  }
  DeviceMeter::Get().SetBudget(told_budget_.bytes);
  budget_ = told_budget_.bytes;
  budget_serial_ = std::exchange(told_budget_.serial, 0);
  return true;
}

// At a boundary. What has to leave for a smaller budget leaves now; where that cannot be, the old one stays until the next.
void Manager::ApplyBudget() {
  if (releasing_.load()) return;
  const uint64_t before = budget_bytes();
  uint64_t told = 0, serial = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    told = told_budget_.bytes;
    serial = std::exchange(told_budget_.serial, 0);
  }
  if (serial == 0) return;
  DeviceMeter& meter = DeviceMeter::Get();
  meter.SetBudget(told);
  const std::string error = told < before ? executor_->FitBudget() : "";
  if (error.empty()) {
    budget_ = told;
    budget_serial_ = serial;
    meter.TakeWindowPeak();  // the step is measured from here on
    for (const auto& [mode, trace] : sections_) PlanSection(mode);
    return;
  }
  meter.SetBudget(before);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (told_budget_.serial == 0) told_budget_ = {told, serial};
  }
  Notice("The budget stays " + FormatByteSize(before) + " for another step: " + error);
}

std::vector<trace::Section> Manager::NewModeTraces(const policy::Trace& step) {
  std::vector<trace::FacetKind> kinds;
  for (size_t i = 0; i < executor_->facet_count(); ++i) {
    kinds.push_back(static_cast<trace::FacetKind>(executor_->facet(static_cast<uint32_t>(i))->kind));
  }
  std::vector<trace::Section> found = trace::FindModes(step, kinds);
  std::erase_if(found, [&](const trace::Section& section) {
    const uint64_t digest = policy::Digest(section.trace);
    return std::exchange(mode_traces_sent_[section.mode], digest) == digest;
  });
  return found;
}

// What the daemon plans a trace with, as far as it is known here.
policy::PlanInput Manager::PlanInputOf(const policy::Trace& trace) {
  policy::PlanInput input;
  for (size_t i = 0; i < executor_->facet_count(); ++i) {
    input.facet_bytes.push_back(executor_->facet(static_cast<uint32_t>(i))->bytes);
  }
  input.trace = trace;
  input.budget_bytes = budget_bytes();
  input.reserve_bytes = policy::SessionReserve(input.budget_bytes);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    input.link = totals_.link;
  }
  return input;
}

// Parts of a step are planned here: the daemon plans what comes again and again, and these come when the loop likes. A few
// milliseconds, for each new one.
void Manager::PlanSection(trace::TraceMode mode) {
  if (options_.executor.stress || options_.executor.demand_only) return;
  if (sections_[mode]->entries.size() > kMostSectionPositions) return;
  policy::Result<policy::Plan> plan = policy::MakeSessionPlan(PlanInputOf(*sections_[mode])).plan;
  // One that cannot be planned goes on as it did: on demand.
  if (plan.ok()) {
    executor_->SetSection(static_cast<uint32_t>(mode), sections_[mode], std::make_shared<policy::Plan>(std::move(plan.value)));
  }
}

// Where everything fits anyway, gradients stay in the memory autograd gave them: moving them costs a pass over each.
void Manager::DecideGradients(const policy::Trace& trace) {
  uint64_t other = 0;
  for (const policy::TraceEntry& entry : trace.entries) other = std::max(other, entry.other_bytes);
  uint64_t needed = other;
  for (size_t i = 0; i < executor_->facet_count(); ++i) {
    const Facet& facet = *executor_->facet(static_cast<uint32_t>(i));
    if (facet.module != kNoModule && modules_[facet.module]->parameters.empty()) continue;  // it has no content any more
    // Gradients that are not taken are among the other tensors already.
    if (facet.kind != FacetKind::kGradients || take_gradients_) needed += facet.bytes;
  }
  // Two marks, so that a borderline case does not go to and fro.
  const double share = static_cast<double>(needed) / static_cast<double>(DeviceMeter::Get().budget_bytes());
  take_gradients_ = options_.executor.stress || share > (take_gradients_ ? 0.85 : 0.95);
}

RunTotals Manager::Totals() {
  RunTotals totals;
  std::shared_ptr<const policy::Trace> trace;
  uint64_t peak_bytes = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    totals = totals_;
    totals.batch_rows = rows_;
    trace = last_trace_;
    peak_bytes = last_peak_bytes_;
  }
  if (executor_ && trace) {
    totals.batch = guard::HintBatch(policy::BatchInputOf(PlanInputOf(*trace), peak_bytes, totals.batch_rows));
  }
  totals.counters = executor_ ? executor_->totals() : ExecutorCounters{};
  const policy::LinkRates& link = totals.link;
  if (link.load > 0 && link.unload > 0 && link.duplex_load > 0 && link.duplex_unload > 0) {
    totals.bound_link_seconds = policy::LinkSeconds(static_cast<double>(totals.bound.load_bytes),
                                                    static_cast<double>(totals.bound.unload_bytes), link);
  }
  double compute_seconds = 0;  // the fastest step's
  for (size_t i = FirstSettled(totals.step_seconds.size()); i < totals.step_seconds.size(); ++i) {
    const double compute = totals.step_seconds[i] - totals.stall_seconds[i];
    if (compute_seconds == 0 || compute < compute_seconds) compute_seconds = compute;
  }
  totals.bound_step_seconds = policy::MeasuredStepBound(compute_seconds, totals.bound, link);
  totals.link_late_seconds = executor_ ? executor_->link_late_seconds() : 0;
  totals.optimizer_bytes = 0;
  for (const auto& module : modules_) {
    if (module->optimizer != nullptr) totals.optimizer_bytes += keeper_->UsedBytes(*module->optimizer);
  }
  return totals;
}

}  // namespace misa::torch_client
