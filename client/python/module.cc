// The Python package's door to the trainer's side. Everything here is private to the package.
#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "client/core/fault_door.h"
#include "client/core/meter.h"
#include "client/core/timeline.h"
#include "client/torch/manager.h"
#include "client/torch/metering_allocator.h"
#include "kernels/cpu/gradient_statistics.h"
#include "runtime/device/emulated/twin.h"
#include "runtime/guard/accumulation.h"
#include "runtime/guard/loss_stability.h"
#include "runtime/guard/pins.h"
#include "runtime/memory/byte_size.h"
#include "runtime/policy/sampler.h"
#include "runtime/policy/step_bound.h"
#include "runtime/policy/tasks.h"

namespace py = pybind11;

namespace misa::torch_client {
namespace {

void Check(const std::string& error) {
  if (!error.empty()) throw std::runtime_error(error);
}

// Keeps a Python callable safe to hold and to drop from threads without the interpreter's lock.
std::shared_ptr<py::object> Hold(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            if (!Py_IsInitialized()) return;  // the interpreter is gone, and everything with it
            py::gil_scoped_acquire gil;
            delete held;
          }};
}

std::string Describe(py::error_already_set& error) {
  return std::string("the optimizer's step failed: ") + error.what();
}

py::dict TotalsDict(const RunTotals& t) {
  py::dict d;
  d["demand_loads"] = t.counters.loads_demand;
  d["prefetch_loads"] = t.counters.loads_prefetch;
  d["prefetch_hits"] = t.counters.prefetch_hits;
  d["unloads"] = t.counters.unloads;
  d["drops"] = t.counters.drops;
  d["departures"] = t.counters.departures;
  d["total_loaded_bytes"] = t.counters.loaded_bytes_demand + t.counters.loaded_bytes_prefetch;
  d["total_unloaded_bytes"] = t.counters.unloaded_bytes;
  d["step_seconds"] = t.step_seconds;
  d["stall_seconds"] = t.stall_seconds;
  d["loaded_bytes"] = t.loaded_bytes;
  d["unloaded_bytes"] = t.unloaded_bytes;
  d["bound_step_seconds"] = t.bound_step_seconds;
  d["bound_load_bytes"] = t.bound.load_bytes;
  d["bound_unload_bytes"] = t.bound.unload_bytes;
  d["plan_version"] = t.plan_version;
  d["bound_link_seconds"] = t.bound_link_seconds;
  d["predicted_step_seconds"] = t.predicted_step_seconds;
  d["link_late_seconds"] = t.link_late_seconds;
  d["load_bytes_per_second"] = t.link.load;
  d["unload_bytes_per_second"] = t.link.unload;
  d["duplex_load_bytes_per_second"] = t.link.duplex_load;
  d["duplex_unload_bytes_per_second"] = t.link.duplex_unload;
  d["weights_bytes"] = t.weights_bytes;
  d["gradients_bytes"] = t.gradients_bytes;
  d["optimizer_bytes"] = t.optimizer_bytes;
  d["parameter_count"] = t.parameter_count;
  d["notices"] = t.notices;
  d["batch_rows"] = t.batch_rows;
  d["batch_known"] = t.batch.known;
  d["batch_free_share"] = t.batch.free_share;
  d["batch_most_share"] = t.batch.most_share;
  d["batch_free_rows"] = t.batch.free_rows;
  d["batch_most_rows"] = t.batch.most_rows;
  d["batch_hint"] = t.batch.sentence;
  return d;
}

// Runs a step that a raw pointer's use has made due. A thread without the interpreter's lock may be one that the lock's owner
// waits for (a worker of a parallel loop), so it waits no longer than it has to.
std::string GuardedStep(double wait_seconds, const std::function<std::string()>& step) {
  if (PyGILState_Check()) return step();
  struct Errand {
    std::mutex mutex;
    std::condition_variable done;
    bool finished = false;
    std::string error;
  };
  auto errand = std::make_shared<Errand>();
  std::thread([errand, step] {
    std::string error = step();
    std::lock_guard<std::mutex> lock(errand->mutex);
    errand->error = std::move(error);
    errand->finished = true;
    errand->done.notify_all();
  }).detach();
  std::unique_lock<std::mutex> lock(errand->mutex);
  if (errand->done.wait_for(lock, std::chrono::duration<double>(wait_seconds), [&] { return errand->finished; })) {
    return errand->error;
  }
  return "the optimizer step that is due before needs the Python interpreter, and another thread has held that for " +
         std::to_string(static_cast<int>(wait_seconds)) + " s. Call run.flush() before code like this one.";
}

// What a compiled graph has pinned for its run.
struct Pinned {
  Manager* manager = nullptr;
  std::vector<Touched> touched;
};

// Puts the thread's dispatch state (autograd and autocast keys, modes) to what it was when the package was imported: a
// deferred step must not run inside the half-dispatched operator whose touch it precedes.
class PlainDispatch {
 public:
  static void Capture() { Plain() = std::make_unique<at::ThreadLocalState>(); }
  void Enter() {
    saved_ = std::make_unique<at::ThreadLocalState>();
    at::ThreadLocalState::setThreadLocalState(*Plain());
  }
  void Exit() {
    at::ThreadLocalState::setThreadLocalState(*saved_);
    saved_.reset();
  }

 private:
  static std::unique_ptr<at::ThreadLocalState>& Plain() {
    static auto* state = new std::unique_ptr<at::ThreadLocalState>;
    return *state;
  }
  std::unique_ptr<at::ThreadLocalState> saved_;
};

// name, tensor, bytes of state, bytes of a step
using ParameterTuples = std::vector<std::tuple<std::string, at::Tensor, uint64_t, uint64_t>>;

std::vector<ParameterInput> Inputs(const ParameterTuples& parameters) {
  std::vector<ParameterInput> inputs;
  for (const auto& [name, tensor, bytes, room] : parameters) inputs.push_back({name, tensor, bytes, room});
  return inputs;
}

StepMode StepModeOf(const std::string& step) {
  return step == "in_backward" ? StepMode::kInBackward : step == "eager" ? StepMode::kEager : StepMode::kDeferred;
}

void BindManager(py::module_& m) {
  m.def("twins", [] {
    std::vector<std::pair<std::string, double>> out;
    for (const device::Twin& twin : device::Twins()) out.emplace_back(twin.name, twin.hiding_tokens);
    return out;
  });
  py::class_<EmulatedDevice>(m, "EmulatedDevice")
      .def(py::init([](const std::string& twin, double compute_flops, double load, double unload, double duplex_factor,
                       double latency_seconds) {
             return EmulatedDevice{twin, compute_flops, {load, unload, 0, 0}, duplex_factor, latency_seconds};
           }),
           py::kw_only(), py::arg("twin"), py::arg("compute_flops"), py::arg("load_bytes_per_second"),
           py::arg("unload_bytes_per_second"), py::arg("duplex_factor"), py::arg("latency_seconds"));
  py::class_<Pinned>(m, "Pinned").def("end", [](Pinned& self) {
    self.manager->UnpinAll(self.touched);
    self.touched.clear();
  });
  py::class_<Manager>(m, "Manager")
      // Without parameters (None) the model is still to be made.
      .def(py::init([](const std::optional<ParameterTuples>& parameters, uint64_t budget, bool elastic, uint64_t least,
                       double weight, const std::string& mode, const std::string& step, const std::string& daemon,
                       const std::string& job, const std::string& runtime_directory, const std::string& disk_directory,
                       const std::string& daemon_binary, uint64_t chunk_bytes, const policy::SamplerOptions& sampling,
                       bool stress, bool demand_only, double wait_seconds, bool existing_state,
                       const std::optional<EmulatedDevice>& emulated, std::vector<std::string> pins) {
             ManagerOptions options;
             options.session.budget_bytes = budget;
             options.session.elastic = elastic;
             options.session.least_bytes = least;
             options.session.most_bytes = budget;
             options.session.weight = weight;
             options.session.mode = mode == "sampled" ? Mode::kSampled : Mode::kExact;
             options.session.daemon = daemon == "required"  ? DaemonChoice::kRequired
                                      : daemon == "private" ? DaemonChoice::kPrivate
                                                            : DaemonChoice::kAuto;
             options.session.job = job;
             options.session.runtime_directory = runtime_directory;
             options.session.disk_directory = disk_directory;
             options.session.daemon_binary = daemon_binary;
             options.session.chunk_bytes = chunk_bytes;
             options.session.sampling = sampling;
             options.session.emulated = emulated;
             options.step = StepModeOf(step);
             options.executor.stress = stress;
             options.executor.demand_only = demand_only;
             options.executor.wait_seconds = wait_seconds;
             options.existing_state = existing_state;
             options.pins = std::move(pins);
             std::vector<ParameterInput> inputs;
             if (parameters) inputs = Inputs(*parameters);
             std::string error;
             std::unique_ptr<Manager> manager;
             {
               py::gil_scoped_release release;
               manager = parameters ? Manager::Create(std::move(inputs), std::move(options), &error)
                                    : Manager::CreateEmpty(std::move(options), &error);
             }
             Check(error);
             manager->SetWaitGuard([](const std::function<void()>& wait) {
               if (PyGILState_Check()) {
                 py::gil_scoped_release release;
                 wait();
               } else {
                 wait();
               }
             });
             manager->SetStepGuard([wait_seconds](const std::function<std::string()>& step) {
               return GuardedStep(wait_seconds, step);
             });
             return manager;
           }),
           py::kw_only(), py::arg("parameters"), py::arg("budget"), py::arg("elastic"), py::arg("least"),
           py::arg("weight"), py::arg("mode"), py::arg("step"), py::arg("daemon"),
           py::arg("job"), py::arg("runtime_directory"), py::arg("disk_directory"), py::arg("daemon_binary"),
           py::arg("chunk_bytes"), py::arg("sampling"), py::arg("stress"), py::arg("demand_only"),
           py::arg("wait_seconds"), py::arg("existing_state"), py::arg("emulated"),
           py::arg("pins") = std::vector<std::string>())
      .def("adopt_created",
           [](Manager& self, const std::vector<at::Tensor>& tensors) {
             std::string error;
             {
               py::gil_scoped_release release;
               error = self.AdoptCreated(tensors);
             }
             Check(error);
           })
      .def(
          "take",
          [](Manager& self, const ParameterTuples& parameters, const std::string& step, bool existing_state) {
            std::vector<ParameterInput> inputs = Inputs(parameters);
            std::string error;
            {
              py::gil_scoped_release release;
              error = self.Take(std::move(inputs), StepModeOf(step), existing_state);
            }
            Check(error);
          },
          py::kw_only(), py::arg("parameters"), py::arg("step"), py::arg("existing_state"))
      .def("is_growing", &Manager::is_growing)
      // The module of each parameter, -1 where it stays in ordinary memory, and why.
      .def("adopt_later",
           [](Manager& self, const ParameterTuples& parameters) {
             const std::vector<ParameterInput> inputs = Inputs(parameters);
             std::vector<int64_t> modules;
             std::string error;
             {
               py::gil_scoped_release release;
               error = self.AdoptLater(inputs, &modules);
             }
             return std::make_pair(modules, error);
           })
      .def("forget", &Manager::Forget)
      .def("parameter_count", &Manager::parameter_count)
      .def("set_stepper",
           [](Manager& self, py::object call) {
             auto held = Hold(std::move(call));
             self.SetStepper([held](uint32_t module, std::vector<at::Tensor>* state) -> std::string {
               py::gil_scoped_acquire gil;
               try {
                 *state = (*held)(module).cast<std::vector<at::Tensor>>();
                 return "";
               } catch (py::error_already_set& error) {
                 return Describe(error);
               }
             });
           })
      .def("set_gradient_complete",
           [](Manager& self, py::object call) {
             auto held = Hold(std::move(call));
             self.SetGradientComplete([held](uint32_t module) -> std::string {
               py::gil_scoped_acquire gil;
               try {
                 (*held)(module);
                 return "";
               } catch (py::error_already_set& error) {
                 return Describe(error);
               }
             });
           })
      .def("watch_gradients", &Manager::WatchGradients)
      .def("mark_pending",
           [](Manager& self, uint32_t module) {
             std::string error;
             {
               py::gil_scoped_release release;
               error = self.MarkPending(module);
             }
             Check(error);
           })
      .def("is_pending", &Manager::IsPending)
      .def("step_module",
           [](Manager& self, uint32_t module) {
             std::string error;
             {
               py::gil_scoped_release release;
               error = self.StepModule(module);
             }
             Check(error);
           })
      .def("flush",
           [](Manager& self) {
             std::string error;
             {
               py::gil_scoped_release release;
               error = self.Flush();
             }
             Check(error);
           })
      .def("adopt_existing",
           [](Manager& self, uint32_t module) {
             std::string error;
             {
               py::gil_scoped_release release;
               error = self.AdoptExisting(module);
             }
             Check(error);
           })
      .def("finish_adoption",
           [](Manager& self) {
             std::string error;
             {
               py::gil_scoped_release release;
               error = self.FinishAdoption();
             }
             Check(error);
           })
      .def("adopt_loaded",
           [](Manager& self, uint32_t module) {
             std::string error;
             {
               py::gil_scoped_release release;
               error = self.AdoptLoaded(module);
             }
             Check(error);
           })
      .def("reset_trace", &Manager::ResetTrace, py::call_guard<py::gil_scoped_release>())
      .def("resume_sampler",
           [](Manager& self, const std::string& state) {
             std::string error;
             {
               py::gil_scoped_release release;
               error = self.ResumeSampler(state);
             }
             Check(error);
           })
      .def("fresh_parameters", &Manager::FreshParameters)
      .def("settle", &Manager::Settle)
      .def("let_go", &Manager::LetGo)
      .def("is_open", &Manager::is_open)
      .def("end_step", &Manager::EndStep, py::call_guard<py::gil_scoped_release>())
      .def("take_statistics",
           [](Manager& self) {
             std::vector<std::tuple<uint32_t, double, double, uint64_t>> out;
             for (const ModuleStatistics& s : self.TakeStatistics()) {
               out.emplace_back(s.module, s.statistics.sum, s.statistics.sum_squares, s.statistics.count);
             }
             return out;
           })
      .def("take_micro_batches", &Manager::TakeMicroBatches)
      .def("set_loss", &Manager::SetLoss)
      .def("set_pins", &Manager::SetPins)
      .def("set_sampling", &Manager::SetSampling, py::arg("round"), py::arg("active"), py::arg("digest"),
           py::arg("counted_steps") = 1, py::arg("waits") = false)
      .def("set_task", &Manager::SetTask)
      .def("pin",
           [](Manager& self, const at::Tensor& tensor) {
             std::string error;
             {
               py::gil_scoped_release release;
               error = self.Pin(tensor);
             }
             Check(error);
           })
      .def("unpin", &Manager::Unpin)
      .def(
          "hold",
          [](Manager& self, const at::Storage& storage, bool write) {
            std::string error;
            {
              py::gil_scoped_release release;
              error = self.Hold(storage, write);
            }
            Check(error);
          },
          py::arg("storage"), py::arg("write"))
      .def("let_go_of", &Manager::LetGoOf)
      .def("address_of", &Manager::AddressOf)
      .def("is_managed", &Manager::IsManaged)
      .def("module_of", &Manager::ModuleOf)
      .def("look",
           [](Manager& self, const at::Tensor& tensor) {
             if (!tensor.has_storage() || !self.IsManaged(tensor)) return;
             std::string error;
             {
               py::gil_scoped_release release;
               error = self.Look(tensor.storage().unsafeGetStorageImpl());
             }
             Check(error);
           })
      .def("look_at_storage",
           [](Manager& self, const at::Storage& storage) {
             std::string error;
             {
               py::gil_scoped_release release;
               error = self.Look(storage.unsafeGetStorageImpl());
             }
             Check(error);
           })
      // Takes what tensors there are in a list of anything; keeps none of them alive.
      .def("pin_together",
           [](Manager& self, const py::list& inputs) {
             std::vector<at::Tensor> tensors;
             for (const py::handle& input : inputs) {
               if (!THPVariable_Check(input.ptr())) continue;
               const at::Tensor& tensor = THPVariable_Unpack(input.ptr());
               if (self.IsManaged(tensor)) tensors.push_back(tensor);
             }
             auto pinned = std::make_unique<Pinned>();
             pinned->manager = &self;
             py::gil_scoped_release release;
             self.PinTogether(tensors, &pinned->touched);
             tensors.clear();
             return pinned;
           })
      .def("release",
           [](Manager& self) {
             std::string error;
             bool released;
             {
               py::gil_scoped_release release;
               released = self.Release(&error);
             }
             Check(error);
             return released;
           })
      .def("release_all",
           [](Manager& self) {
             std::string error;
             {
               py::gil_scoped_release release;
               error = self.ReleaseAll();
             }
             Check(error);
           })
      .def("close_session", &Manager::CloseSession, py::call_guard<py::gil_scoped_release>())
      .def("begin_unload", [](Manager& self) { self.executor().UnloadAll(); }, py::call_guard<py::gil_scoped_release>())
      .def("unload_all",
           [](Manager& self) {
             py::gil_scoped_release release;
             self.executor().UnloadAll();
             return self.executor().Drain();
           })
      .def("modules",
           [](Manager& self) {
             py::list out;
             for (size_t i = 0; i < self.module_count(); ++i) {
               const Manager::Module& module = self.module(i);
               py::dict d;
               d["name"] = module.name;
               d["kind"] = module.kind;
               d["samplable"] = module.samplable;
               d["parameter_count"] = module.parameter_count;
               py::list names;
               for (uint32_t p : module.parameters) names.append(self.parameter(p).name);
               d["parameters"] = names;
               out.append(d);
             }
             return out;
           })
      .def("totals", [](Manager& self) { return TotalsDict(self.Totals()); })
      .def("states",
           [](Manager& self) {
             const std::string kNames[] = {"empty", self.session().below, "loading", "device", "device", "unloading"};
             std::vector<std::pair<std::string, std::string>> out;
             const std::vector<FacetState> states = self.States();
             for (size_t i = 0; i < states.size(); ++i) {
               out.emplace_back(self.executor().facet(static_cast<uint32_t>(i))->name,
                                kNames[static_cast<int>(states[i])]);
             }
             return out;
           })
      .def("daemon_alive", &Manager::daemon_alive)
      .def("session", [](Manager& self) {
        const SessionInfo& info = self.session();
        py::dict d;
        d["session"] = info.session;
        d["budget_bytes"] = self.budget_bytes();
        d["chunk_bytes"] = info.chunk_bytes;
        d["device_kind"] = info.device_kind;
        d["device_name"] = info.device_name;
        d["device_uuid"] = info.device_uuid;
        d["device_capacity_bytes"] = info.device_capacity_bytes;
        d["below"] = info.below;
        d["private_daemon"] = info.private_daemon;
        d["daemon_pid"] = info.daemon_pid;
        d["runtime_directory"] = info.runtime_directory;
        return d;
      });
}

void RaiseValue(const std::string& error) {
  if (!error.empty()) throw py::value_error(error);
}

void BindTasks(py::module_& m) {
  using Saved = std::vector<std::tuple<std::string, double, uint64_t>>;
  py::class_<policy::TaskTable>(m, "TaskTable")
      .def(py::init<>())
      .def("enter",
           [](policy::TaskTable& self, const std::string& name, double weight) {
             uint32_t task = 0;
             if (const std::string error = self.Enter(name, weight, &task); !error.empty()) {
               throw py::value_error(error + " Nothing was changed.");
             }
           })
      .def("close", &policy::TaskTable::Close)
      .def("count_step",
           [](policy::TaskTable& self, const std::string& name) {
             for (uint32_t i = 0; i < self.size(); ++i) {
               if (self.tasks()[i].name == name) self.CountStep(i);
             }
           })
      .def("assign",
           [](policy::TaskTable& self, const Saved& saved) {
             policy::TaskTable checked;
             std::vector<policy::Task> tasks;
             for (const auto& [name, weight, steps] : saved) {
               uint32_t task = 0;
               const std::string error = checked.Enter(name, weight, &task);
               if (!error.empty() || task != tasks.size()) {
                 throw py::value_error("The saved tasks are damaged" +
                                       (error.empty() ? std::string(".") : ": " + error) + " Nothing was changed.");
               }
               tasks.push_back({name, name.empty() ? 1.0 : weight, steps});
             }
             if (!tasks.empty()) self.Assign(std::move(tasks));
           })
      // name, weight, share, steps
      .def("tasks", [](const policy::TaskTable& self) {
        std::vector<std::tuple<std::string, double, double, uint64_t>> out;
        const std::vector<double> shares = self.Shares();
        for (size_t i = 0; i < self.size(); ++i) {
          const policy::Task& task = self.tasks()[i];
          out.emplace_back(task.name, task.weight, shares[i], task.steps);
        }
        return out;
      });
}

void BindSampler(py::module_& m) {
  py::class_<policy::SamplerOptions>(m, "SamplerOptions")
      .def(py::init([](double delta, double eta, double alpha, uint32_t inner_steps, uint64_t seed,
                       const std::vector<std::pair<std::string, std::string>>& needs,
                       const std::vector<std::pair<std::string, std::string>>& apart) {
             policy::SamplerOptions options;
             options.delta = delta;
             options.eta = eta;
             options.alpha = alpha;
             options.inner_steps = inner_steps;
             options.seed = seed;
             for (const auto& [module, other] : needs) {
               options.dependencies.push_back({module, guard::Dependency::kNeeds, other});
             }
             for (const auto& [module, other] : apart) {
               options.dependencies.push_back({module, guard::Dependency::kApart, other});
             }
             return options;
           }),
           py::arg("delta") = 0.03, py::arg("eta") = 1.0, py::arg("alpha") = 0.1, py::arg("inner_steps") = 50,
           py::arg("seed") = 0, py::arg("needs") = std::vector<std::pair<std::string, std::string>>(),
           py::arg("apart") = std::vector<std::pair<std::string, std::string>>());
  py::class_<guard::LossStability>(m, "LossStability")
      .def(py::init([](uint32_t window, double tolerance, uint32_t hold) {
             const guard::StabilityOptions options{window, tolerance, hold};
             const std::string error = guard::CheckStability(options);
             if (!error.empty()) throw py::value_error(error);
             return std::make_unique<guard::LossStability>(options);
           }),
           py::arg("window"), py::arg("tolerance"), py::arg("hold"))
      .def("observe", &guard::LossStability::Observe)
      .def("stable", &guard::LossStability::stable)
      .def("observed", &guard::LossStability::observed)
      .def("save", &guard::LossStability::Save)
      .def("restore", [](guard::LossStability& self, const std::vector<double>& saved) {
        const std::string error = self.Restore(saved);
        if (!error.empty()) throw py::value_error(error);
      });
  py::class_<policy::ModuleSampler>(m, "ModuleSampler")
      .def(py::init(
          [](const policy::SamplerOptions& options, const std::vector<std::pair<std::string, uint64_t>>& modules) {
            std::vector<policy::SamplerModule> list;
            for (const auto& [name, count] : modules) list.push_back({name, count});
            RaiseValue(policy::CheckSampler(options, list));
            return std::make_unique<policy::ModuleSampler>(options, std::move(list));
          }))
      .def("active", &policy::ModuleSampler::active)
      .def("round", &policy::ModuleSampler::round)
      .def("observe",
           [](policy::ModuleSampler& self, uint32_t module, double sum, double sum_squares, uint64_t count) {
             Check(self.Observe(module, {sum, sum_squares, count}));
           })
      // Of the task of this name ("" for none), whose weight is this from now on.
      .def(
          "end_step",
          [](policy::ModuleSampler& self, uint32_t counted_steps, const std::string& task, double weight) {
            uint32_t number = 0;
            RaiseValue(self.EnterTask(task, weight, &number));
            return self.EndStep(counted_steps, number);
          },
          py::arg("counted_steps") = 1, py::arg("task") = "", py::arg("weight") = 1.0)
      .def("tasks",
           [](const policy::ModuleSampler& self) {
             std::vector<std::tuple<std::string, double, uint64_t>> out;
             for (const policy::Task& task : self.tasks()) out.emplace_back(task.name, task.weight, task.steps);
             return out;
           })
      .def("digest", &policy::ModuleSampler::Digest)
      .def("serialize",
           [](const policy::ModuleSampler& self) {
             const auto bytes = self.Serialize();
             return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
           })
      .def("restore", [](policy::ModuleSampler& self, const std::string& bytes) {
        RaiseValue(self.Restore({bytes.begin(), bytes.end()}));
      });
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.attr("torch_version") = MISA_TORCH_VERSION;
  PlainDispatch::Capture();
  py::class_<PlainDispatch>(m, "plain_dispatch")
      .def(py::init<>())
      .def("__enter__", [](PlainDispatch& self) { self.Enter(); })
      .def("__exit__", [](PlainDispatch& self, py::args) { self.Exit(); });
  m.def("install_meter", &InstallMeteringAllocator);
  m.def("keep_fault_door", &KeepFaultDoor);
  m.def(
      "operator_nanoseconds",
      [](int64_t iterations) {
        // A small operator called from C++: what an observer adds to it is not lost in Python's own time.
        const at::Tensor a = at::ones({4});
        const at::Tensor b = at::ones({4});
        at::Tensor out = at::empty({4});
        const auto begin = std::chrono::steady_clock::now();
        for (int64_t i = 0; i < iterations; ++i) at::add_out(out, a, b);
        return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begin).count() /
               static_cast<double>(iterations);
      },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "measured_step_bound",
      [](double compute_seconds, uint64_t load_bytes, uint64_t unload_bytes, double load, double unload, double duplex_load,
         double duplex_unload) {
        return policy::MeasuredStepBound(compute_seconds, {load_bytes, unload_bytes, 0}, {load, unload, duplex_load, duplex_unload});
      },
      py::kw_only(), py::arg("compute_seconds"), py::arg("load_bytes"), py::arg("unload_bytes"),
      py::arg("load_bytes_per_second"), py::arg("unload_bytes_per_second"), py::arg("duplex_load_bytes_per_second"),
      py::arg("duplex_unload_bytes_per_second"));
  m.def("live_bytes", [] { return DeviceMeter::Get().total_bytes(); });
  m.def("other_bytes", [] { return DeviceMeter::Get().other_bytes(); });
  m.def("pool_bytes", [] { return DeviceMeter::Get().pool_bytes(); });
  m.def("peak_bytes", [] { return DeviceMeter::Get().peak_bytes(); });
  m.def("reset_peak", [] { DeviceMeter::Get().ResetPeak(); });
  m.def("parse_byte_size", [](const std::string& text) {
    uint64_t bytes = 0;
    const std::string error = ParseByteSize(text, &bytes);
    if (!error.empty()) throw py::value_error(error);
    return bytes;
  });
  m.def("format_byte_size", &FormatByteSize);
  m.def("is_pinned", &guard::IsPinned, py::arg("name"), py::arg("kind"), py::arg("pins"));
  m.def("pin_kind", &guard::PinKind, py::arg("name"), py::arg("kind"));
  m.def("counted_steps", [](uint32_t micro_batches) { return guard::CountedSteps(micro_batches); });
  m.def("group_parameters", [](const std::vector<std::tuple<std::string, at::Tensor>>& parameters) {
    std::vector<ParameterShape> shapes;
    for (const auto& [name, t] : parameters) {
      shapes.push_back({name, t.dim(), static_cast<uint64_t>(t.numel()), t.storage().nbytes()});
    }
    std::vector<std::tuple<std::string, std::string, bool, std::vector<size_t>>> out;
    for (const ModuleGroup& group : GroupParameters(shapes)) {
      out.emplace_back(group.name, group.kind, group.samplable, group.parameters);
    }
    return out;
  });
  m.def("gradient_statistics", [](const at::Tensor& t) -> std::tuple<double, double, uint64_t> {
    kernels::Element element;
    switch (t.scalar_type()) {
      case at::kFloat:
        element = kernels::Element::kFloat32;
        break;
      case at::kDouble:
        element = kernels::Element::kFloat64;
        break;
      case at::kBFloat16:
        element = kernels::Element::kBfloat16;
        break;
      case at::kHalf:
        element = kernels::Element::kFloat16;
        break;
      default:
        throw py::type_error("Gradient statistics need a floating-point tensor.");
    }
    if (!t.is_non_overlapping_and_dense()) throw py::value_error("Gradient statistics need a dense tensor.");
    const auto count = static_cast<size_t>(t.numel());
    const kernels::Sums sums = kernels::MeasureAndCopy(t.const_data_ptr(), nullptr, count, element);
    return {sums.sum, sums.sum_squares, count};
  });
  py::class_<Timeline>(m, "Timeline")
      .def(py::init([] { return std::make_unique<Timeline>(&DeviceMeter::Get()); }))
      .def("start", &Timeline::Start, py::arg("interval_seconds") = 0.005)
      .def("stop", &Timeline::Stop, py::call_guard<py::gil_scoped_release>())
      .def("samples", &Timeline::samples)
      .def("stddev_bytes", &Timeline::stddev_bytes);
  BindManager(m);
  BindTasks(m);
  BindSampler(m);
}

}  // namespace misa::torch_client
