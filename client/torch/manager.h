// One trainer's managed training state: parameters, gradients and optimizer state of its modules, and when each module
// steps. Used by the Python package and by C++ trainers.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "client/core/executor.h"
#include "client/core/fault_door.h"
#include "client/core/session.h"
#include "client/torch/doors.h"
#include "runtime/modules/grouping.h"
#include "client/torch/managed_storage.h"
#include "client/torch/observer.h"
#include "runtime/guard/batch_hint.h"
#include "runtime/policy/importance.h"
#include "runtime/predict/recent.h"

namespace misa::torch_client {

using modules::GroupParameters;
using modules::ModuleGroup;
using modules::ParameterShape;

// When a module's optimizer step happens: at its next touch, as soon as its gradient is complete, or inside step().
enum class StepMode : uint8_t { kDeferred, kInBackward, kEager };

struct ManagerOptions {
  SessionOptions session;
  ExecutorOptions executor;
  StepMode step = StepMode::kDeferred;
  // The optimizers have state already: AdoptExisting for each module, then FinishAdoption, come before training.
  bool existing_state = false;
  // Kinds or names of modules that stay on the device as far as the budget allows (guard::IsPinned).
  std::vector<std::string> pins;
};

struct ParameterInput {
  std::string name;
  at::Tensor tensor;
  // Bytes the optimizer will keep for it, where known; reserved from the start.
  uint64_t expected_state_bytes = 0;
  // Bytes its step needs for a while, where known: a step begins only where they are to be had.
  uint64_t step_bytes = 0;
};

// The first steps run on demand and touch memory for the first time: figures are of what comes after them.
inline size_t FirstSettled(size_t steps) { return steps > 6 ? 3 : 0; }

// For reports: medians are over steps.
struct RunTotals {
  ExecutorCounters counters;
  std::vector<double> step_seconds;
  std::vector<double> stall_seconds;
  std::vector<uint64_t> loaded_bytes;
  std::vector<uint64_t> unloaded_bytes;
  policy::Bound bound;
  uint64_t plan_version = 0;
  double bound_step_seconds = 0;      // of the trace's bound and of what was measured (policy::MeasuredStepBound)
  double bound_link_seconds = 0;      // the least time in which the link moves the bound's bytes
  double predicted_step_seconds = 0;  // by the plan of this version
  double link_late_seconds = 0;       // of a modelled link: by how much its copies were late, in all
  policy::LinkRates link;  // measured where there is enough of it, else as the daemon calibrated
  uint64_t weights_bytes = 0, gradients_bytes = 0, optimizer_bytes = 0;
  uint64_t parameter_count = 0;
  std::vector<std::string> notices;
  guard::BatchHint batch;  // of the last step
  uint64_t batch_rows = 0;
};

class Manager final : public TouchHandler, public FaultServer {
 public:
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    uint32_t module = 0;
    uint64_t gradient_offset = 0;
    c10::StorageImpl* storage = nullptr;  // as bound
    std::shared_ptr<void> accumulator;    // keeps the hook's node alive
    bool has_gradient = false;            // since the last boundary
    uint32_t gradients = 0;               // backwards since then that reached it
    bool fresh = false;                   // since its last step, in StepMode::kInBackward
    policy::GradientStatistics statistics;
  };
  struct Module {
    std::string name;
    std::string kind;
    bool samplable = false;
    bool pinned = false;
    std::vector<uint32_t> parameters;
    uint64_t parameter_count = 0;
    Facet* weights = nullptr;
    Facet* gradients = nullptr;
    Facet* optimizer = nullptr;
    uint64_t step_bytes = 0;      // other tensors' while it steps
    uint32_t registered = UINT32_MAX;  // its number at the daemon; none yet
    std::atomic<bool> pending{false};
    std::thread::id running{};  // guarded by pending_mutex_
  };

  // Connects, registers, moves every parameter's storage into its module's facet. Null and a sentence on failure; the
  // tensors are as before then.
  static std::unique_ptr<Manager> Create(std::vector<ParameterInput> parameters, ManagerOptions options,
                                         std::string* error);

  // For a model that is still being made, larger than the budget perhaps: a session, a budget in force, and no modules yet.
  static std::unique_ptr<Manager> CreateEmpty(ManagerOptions options, std::string* error);
  // Moves the storages of tensors just made behind the pool. What cannot be managed (other devices, no storage) or already
  // is, stays as it is. A sentence where there is no room; everything is where it was then.
  std::string AdoptCreated(const std::vector<at::Tensor>& tensors);
  // The model is complete: from here on this is the manager that Create() would have given. A sentence where that cannot
  // be; as long as nothing was moved the manager goes on as before.
  std::string Take(std::vector<ParameterInput> parameters, StepMode step, bool existing_state);
  bool is_growing() const { return growing_; }

  // Parameters that came after the management began go behind the pool, into modules of their own, within the budget.
  // (*modules)[i] is the module of the i-th; -1 where it stays in ordinary memory, and the sentence says why then.
  std::string AdoptLater(const std::vector<ParameterInput>& inputs, std::vector<int64_t>* modules);
  // These parameters step no more, and are held here no more: they die with whoever else holds them, and their memory with
  // them. None may have a step due.
  void Forget(const std::vector<uint32_t>& parameters);
  ~Manager() override;

  size_t module_count() const { return modules_.size(); }
  const Module& module(size_t i) const { return *modules_[i]; }
  const Parameter& parameter(size_t i) const { return parameters_[i]; }
  size_t parameter_count() const { return parameters_.size(); }
  const SessionInfo& session() const { return session_->info(); }
  bool daemon_alive() const { return session_->daemon_alive(); }
  StepMode step_mode() const { return options_.step; }

  // --- Stepping ---
  // Runs what is due for one module (its optimizer step) with everything present; returns "" or a sentence. Tensors of
  // optimizer state that the module has afterwards go to *state.
  using Stepper = std::function<std::string(uint32_t module, std::vector<at::Tensor>* state)>;
  void SetStepper(Stepper stepper) { stepper_ = std::move(stepper); }
  // What to run around a wait for another thread (the Python package gives the interpreter's lock up there).
  void SetWaitGuard(std::function<void(const std::function<void()>&)> guard) { wait_guard_ = std::move(guard); }
  // How a step that a raw pointer's use makes due is run; the default runs it where it is. The guard ends with a sentence
  // where it cannot be run (the Python package's step needs the interpreter, which somebody else may hold for ever).
  using StepGuard = std::function<std::string(const std::function<std::string()>& step)>;
  void SetStepGuard(StepGuard guard) { step_guard_ = std::move(guard); }
  // The module steps at its next touch; at once where not every touch of it is seen, because a parameter was replaced.
  std::string MarkPending(uint32_t module);
  bool IsPending(uint32_t module) const { return modules_[module]->pending.load(); }
  // Runs the stepper for the module now. A sentence on failure; the module stays pending then.
  std::string StepModule(uint32_t module);
  // Steps every pending module, those on the device first.
  std::string Flush();
  // Takes over the module's optimizer state of before the management (ManagerOptions::existing_state).
  std::string AdoptExisting(uint32_t module);
  // From here on the budget holds.
  std::string FinishAdoption();
  // Takes over optimizer state that was loaded in place of what was there; the budget holds meanwhile.
  std::string AdoptLoaded(uint32_t module);
  // Nothing was trained yet: the trace begins with the next use.
  void ResetTrace() { executor_->ResetTrace(); }
  // The boundary of a training step.
  void EndStep();

  // In StepMode::kInBackward: called when the module's gradients are complete.
  void SetGradientComplete(std::function<std::string(uint32_t module)> call) { gradient_complete_ = std::move(call); }
  // Of the module's parameters those that got a gradient since they last stepped; only these may step now.
  std::vector<uint32_t> FreshParameters(uint32_t module) const;
  // Their optimizer has stepped: gradients of before are old ones.
  void Settle(const std::vector<uint32_t>& parameters);
  // Gradients are taken and statistics kept from now on for parameters that require one; call again after
  // requires_grad has changed.
  void WatchGradients();
  // Statistics of this step's complete gradients, by module; taken.
  std::vector<ModuleStatistics> TakeStatistics();
  // Backwards of this step, from the parameter that most of them reached; taken.
  uint32_t TakeMicroBatches();
  void SetSampling(uint64_t round, std::vector<uint32_t> active, uint64_t digest, uint32_t counted_steps = 1,
                   bool waits = false);
  // The loss of the step that ends next, and the rows of its batch (0: not known), for the daemon's guards.
  void SetLoss(double loss, uint64_t rows);
  // Before Take(): the pins of a model that was made under its budget.
  void SetPins(std::vector<std::string> pins) { options_.pins = std::move(pins); }
  // The step that ends now belongs to this task; "" for none.
  void SetTask(std::string name, double weight);
  // Tells the daemon in which state the sampler goes on.
  std::string ResumeSampler(const std::string& state);

  // --- Looking at data ---
  // Makes the tensor's storage present and keeps it so until Unpin. A sentence on failure. Unmanaged: "" and nothing.
  std::string Pin(const at::Tensor& tensor);
  void Unpin(const at::Tensor& tensor);
  // The same for a storage, for saving and loading: no position of the trace, and without `write` its bytes stay clean.
  // Every Hold that gave "" is ended by a LetGoOf.
  std::string Hold(const at::Storage& storage, bool write);
  void LetGoOf(const at::Storage& storage);
  // Where the storage's bytes are whenever they are present; 0 where it is not managed.
  uint64_t AddressOf(const at::Storage& storage) const;
  bool IsManaged(const at::Tensor& tensor) const;
  // The module whose storage the tensor uses; -1 where that is none.
  int64_t ModuleOf(const at::Tensor& tensor) const;
  // Somebody is about to take a raw pointer into the storage: what is due is done and the bytes are there; they may leave
  // again, and come back through the fault door. A sentence where that is not to be had now. Unmanaged: "" and nothing.
  std::string Look(const c10::StorageImpl* storage);
  // For code that will use all of these by raw pointer: does what is due, and where they fit together has them stay until
  // UnpinAll(*pinned). Where they do not, nothing is pinned and each comes by itself when it is used.
  void PinTogether(const std::vector<at::Tensor>& tensors, std::vector<Touched>* pinned);
  void UnpinAll(const std::vector<Touched>& pinned) { EndTouch(pinned.data(), pinned.size()); }

  // Gives every storage memory of its own again and ends the session, where that fits the budget; otherwise
  // everything stays managed, loaded on demand. Returns whether it was given back.
  bool Release(std::string* error);
  // Does what is due and ends the management without a look at the budget. A step that fails is reported, and
  // everything is given back all the same.
  std::string ReleaseAll();
  bool is_open() const { return open_; }
  // No more steps come: the manager holds no parameter any more, so that storages can die with their model.
  void LetGo();

  // Ends the session; what is managed stays usable until the process ends.
  void CloseSession() {
    process_ends_ = true;
    if (session_) session_->Close();
  }

  RunTotals Totals();
  std::vector<FacetState> States() { return executor_->States(); }
  // What the session may hold now; the daemon may change it at any boundary.
  uint64_t budget_bytes() const { return budget_.load(); }
  Executor& executor() { return *executor_; }

  // TouchHandler
  std::string Touch(const Touched* touched, size_t count) override;
  void EndTouch(const Touched* touched, size_t count) override;
  void BeforeView(Facet* facet) override;

  // FaultServer
  std::string Serve(Facet& facet) override;

 private:
  // Both of the above. Within the budget it can find no room half way (*no_room): the rest stays managed then.
  std::string GiveBack(bool within_budget, bool* no_room);

  Manager() = default;
  std::string Start(std::vector<ParameterInput> parameters, ManagerOptions options);
  uint64_t LeastNeeded() const;
  void AskForLeast();
  struct Planned {
    uint32_t module;
    FacetKind kind;
    uint64_t bytes;
    uint64_t offset;
    Facet* facet;  // there already, or null
  };
  // The modules that the parameters make up.
  std::string Group(const std::vector<ParameterInput>& inputs, std::vector<uint32_t>* made);
  uint32_t AddModule(const ModuleGroup& group, std::map<std::string, uint32_t>* by_name);
  bool IsVacant(const Module& module) const;
  std::vector<Facet*> VacantFacets(const std::vector<uint32_t>& made) const;
  // Session, disk and executor, with the disk reserved and the modules described.
  std::string Open();
  std::string OpenDisk(const std::vector<ModuleDescription>& modules, uint64_t disk_bytes,
                       std::unique_ptr<ChunkSpace> space);
  std::string Plan(const ChunkSpace& space, const std::vector<uint32_t>& made, std::vector<Planned>* planned,
                   std::vector<ModuleDescription>* descriptions);
  void DescribeLosses(const std::vector<uint32_t>& made, const std::vector<Planned>& planned,
                      std::vector<ModuleDescription>* descriptions) const;
  void TakeFromVacant(const std::vector<uint32_t>& made, const std::vector<Planned>& planned);
  void NoteRegistered(const std::vector<ModuleDescription>& descriptions);
  std::string MakeFacets(const std::vector<Planned>& planned);
  void OpenDoors();
  void Begin();
  void Listen();
  void ForgetModules();
  // The facet that holds just these storages since they were made, with that many bytes; null where there is none.
  Facet* WholeCreated(const std::set<c10::StorageImpl*>& storages, uint64_t bytes) const;
  std::string AdoptWeights();
  std::string AdoptModule(const Module& module, bool position, uint64_t* freed);
  // Parameters' tensors over this storage.
  size_t TensorsOver(const c10::StorageImpl* storage) const;
  void OnGradient(uint32_t parameter);
  std::string TakeGradient(Parameter& parameter);
  std::string AdoptState(uint32_t module, const std::vector<at::Tensor>& state);
  std::string RunPending(uint32_t module);
  std::string RunStepper(uint32_t module, bool adopting = false);
  void Veil(const Module& module, bool on);
  void BeforeReplace(const at::TensorBase& tensor);
  void AfterReplace(const at::TensorBase& tensor);
  void InChild();
  uint64_t ReserveDisk(uint64_t bytes);
  std::string EnsureDisk(uint64_t bytes);
  void OnStep(StepSummary summary);
  void ApplyBudget();
  // An elastic budget that is too small for what runs now: asks for more and waits for it.
  bool GrowBudget(uint64_t smallest_bytes);
  void CheckParameters();
  void DecideGradients(const policy::Trace& trace);
  policy::PlanInput PlanInputOf(const policy::Trace& trace);
  // The periods inside a step that were not sent yet.
  std::vector<trace::Section> NewModeTraces(const policy::Trace& step);
  void PlanSection(trace::TraceMode mode);
  void Notice(std::string sentence);
  static void OnStorageGone(void* context, Facet* facet, bool last);

  ManagerOptions options_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<StorageKeeper> keeper_;
  std::unique_ptr<Executor> executor_;
  std::vector<Parameter> parameters_;
  std::vector<std::unique_ptr<Module>> modules_;
  std::vector<uint64_t> state_bytes_;           // expected, by module
  std::vector<Facet*> created_;                 // while growing: what AdoptCreated made
  std::unique_ptr<ChunkSpace> space_;           // until the executor takes it
  uint64_t disk_bytes_ = 0;
  std::atomic<uint64_t> budget_{0};
  std::atomic<uint64_t> budget_serial_{0};  // of the change that is in force
  uint64_t reserved_disk_bytes_ = 0;            // at the daemon
  std::multimap<uint64_t, uint64_t> free_disk_;  // by size: places of facets that are gone
  bool growing_ = false;
  bool begun_ = false;
  bool listening_ = false;
  uint32_t registered_modules_ = 0;
  bool process_ends_ = false;
  bool open_ = false;
  bool take_gradients_ = true;  // into the pool; decided at step boundaries
  std::atomic<bool> releasing_{false};
  std::atomic<bool> parameter_changed_{false};
  std::atomic<bool> poisoned_{false};
  std::atomic<bool> warned_state_{false};

  DataDoor data_door_;
  ForkDoor fork_door_;
  Stepper stepper_;
  std::function<std::string(uint32_t)> gradient_complete_;
  std::function<void(const std::function<void()>&)> wait_guard_;
  StepGuard step_guard_;
  std::mutex pending_mutex_;
  std::condition_variable pending_done_;

  // Of the traces that the last steps had, by digest.
  struct TraceOnce {
    bool seen = false;
    bool sent = false;
    double compute_seconds = 0;  // as sent
    uint64_t next_refresh = 0;   // the step from which on it may go up again
    uint64_t refresh_gap = 0;
  };
  predict::Recent<TraceOnce> traces_;

  std::mutex mutex_;  // what follows
  // By the daemon, for the next boundary; serial 0: nothing new.
  struct {
    uint64_t bytes = 0;
    uint64_t serial = 0;
  } told_budget_;
  std::condition_variable budget_told_;
  // Periods inside steps, read and written by the thread that begins a step.
  std::map<trace::TraceMode, std::shared_ptr<const policy::Trace>> sections_;
  std::map<trace::TraceMode, uint64_t> mode_traces_sent_;  // digests
  RunTotals totals_;
  uint64_t round_ = 0;
  std::vector<uint32_t> active_;
  uint64_t sampler_digest_ = 0;
  std::string task_;
  double task_weight_ = 1;
  uint32_t counted_steps_ = 1;
  bool sampling_waits_ = false;
  std::optional<double> loss_;
  uint64_t rows_ = 0;
  std::shared_ptr<const policy::Trace> last_trace_;
  uint64_t last_peak_bytes_ = 0;
  std::vector<ModuleStatistics> finished_statistics_;
};

}  // namespace misa::torch_client
