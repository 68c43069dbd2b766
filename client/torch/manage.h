// misa for C++ trainers: the training state of a LibTorch module and its optimizer, owned by misad.
//
//   misa::ManageOptions options;
//   options.budget = "24GiB";
//   misa::Managed run = misa::Manage(*model, optimizer, options);
//   for (...) {
//     optimizer.zero_grad();
//     loss(model->forward(inputs), targets).backward();
//     run.Step();                 // in place of optimizer.step()
//   }
//
// `run.Step()` is the one change inside the loop. Python replaces `step` on the user's optimizer object; in C++ a call to
// a virtual function of somebody else's object cannot be replaced, so the loop makes it through the run. After a call of
// `optimizer.step()` itself the numbers would still be right, but new optimizer state would stay outside the management
// and no training step would end, so that nothing could be planned. All else stays: learning-rate schedules that change
// the optimizer's options, `clip_grad_norm_`, `zero_grad`, gradient accumulation.
//
// What takes raw pointers (`data_ptr()`, `torch::save`) needs its tensors held by a misa::Resident meanwhile; operators
// need nothing. Before anything reads the optimizer's own `state()`, call `run.Flush()`: steps may still be due.
//
// Everything that goes wrong is thrown as std::runtime_error with a sentence; a failure inside an operator is torch's
// c10::Error with the same kind of sentence. This header includes nothing of torch, so that it can be included anywhere.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "client/core/session.h"

namespace at {
class Tensor;
}
namespace torch::nn {
class Module;
}
namespace torch::optim {
class Optimizer;
}

namespace misa {

// Bytes, from a number or from text such as "24GiB" or "800MiB"; or "auto": what the daemon gives, which changes as others
// come and go. Throws what cannot be a budget.
class Budget {
 public:
  Budget() = default;
  template <std::integral T>
  Budget(T bytes) : bytes_(Checked(std::in_range<uint64_t>(bytes) ? static_cast<uint64_t>(bytes) : 0)) {}
  Budget(std::string_view text);
  Budget(const char* text) : Budget(std::string_view(text)) {}
  Budget(const std::string& text) : Budget(std::string_view(text)) {}
  // As "auto", but between the two.
  static Budget Between(Budget least, Budget most);

  uint64_t bytes() const { return bytes_; }  // 0 for "auto"; the most of a range
  bool elastic() const { return elastic_; }
  uint64_t least_bytes() const { return least_bytes_; }

 private:
  static uint64_t Checked(uint64_t bytes);
  uint64_t bytes_ = 0;
  uint64_t least_bytes_ = 0;
  bool elastic_ = false;
};

// When a module's optimizer step happens. All three give the same bits.
enum class StepTime : uint8_t {
  kDeferred,    // at the module's next touch, as a rule in the next forward: its bytes travel behind the whole step
  kInBackward,  // as soon as its gradient is complete: nothing may happen between backward() and Step()
  kEager,       // inside Step(), module by module
};

struct ManageOptions {
  // What this trainer may hold on the device at once: managed state and every other tensor. Must be given.
  Budget budget;
  // How much this trainer counts beside others where the daemon chooses budgets; above 0.
  double weight = 1;
  // kExact: bit-identical to plain training. kSampled: module-wise importance sampling by `sampling`.
  Mode mode = Mode::kExact;
  StepTime step = StepTime::kDeferred;
  DaemonChoice daemon = DaemonChoice::kAuto;
  std::string job;                // a name for people; "": the program's
  std::string runtime_directory;  // of misad's sockets; "": $MISA_RUNTIME_DIR, else /run/misa
  // Of a private daemon: its disk tier's directory ("": $MISA_DISK_DIR, else /var/tmp), its binary ("": $MISA_DAEMON,
  // else misad on PATH) and its chunk size (0: its default).
  std::string disk_directory;
  std::string daemon_binary;
  uint64_t chunk_bytes = 0;
  // Mode kSampled: the draws, and kinds of modules that every round trains besides ("embedding", "head", "norm", …).
  policy::SamplerOptions sampling;
  std::vector<std::string> always;
  // Kinds or names of modules that stay on the device as far as the budget allows.
  std::vector<std::string> pins;
  // For tests and measurements: keep nothing on the device that need not be there; never prefetch; the seconds without a
  // byte moved after which a wait ends with an error.
  ExecutorOptions executor;
};

// What becomes of the memory when the management ends.
enum class AtEnd : uint8_t {
  // Every tensor gets memory of its own again if all of it fits the budget; else as kKeepManaged, and a line says so.
  kGiveBackIfFits,
  kGiveBack,      // whatever it takes
  kKeepManaged,   // everything stays managed and is loaded on demand until the process ends
};

// What a run did so far. Medians are over all steps but the first three, where there are more than six.
struct RunReport {
  Mode mode = Mode::kExact;
  StepTime step = StepTime::kDeferred;
  uint64_t budget_bytes = 0;
  uint64_t steps = 0;
  double step_seconds_median = 0;
  double stall_seconds_median = 0;
  double bound_step_seconds = 0;
  double h2d_bytes_per_step = 0;
  double d2h_bytes_per_step = 0;
  double bound_h2d_bytes_per_step = 0;
  double bound_d2h_bytes_per_step = 0;
  uint64_t device_peak_bytes = 0;
  double device_stddev_bytes = 0;
  uint64_t demand_loads = 0;
  uint64_t prefetch_loads = 0;
  uint64_t prefetch_hits = 0;
  uint64_t unloads = 0;
  uint64_t drops = 0;
  uint64_t departures = 0;
  uint64_t plan_version = 0;
  uint64_t module_count = 0;
  uint64_t parameter_count = 0;
  uint64_t weights_bytes = 0;
  uint64_t gradients_bytes = 0;
  uint64_t optimizer_bytes = 0;
  std::vector<std::string> notices;
  std::vector<double> step_seconds;
  std::vector<double> stall_seconds;
  std::string device_kind;
  std::string device_name;
  uint64_t device_capacity_bytes = 0;
  double h2d_bytes_per_second = 0;
  double d2h_bytes_per_second = 0;
  double total_bytes_per_second = 0;
  // How many rows fit (runtime/guard/batch_hint.h), as a sentence; "" before the first step.
  std::string batch_hint;
  // Seconds since the start, bytes on the device.
  std::vector<std::pair<double, uint64_t>> timeline;
};

class Run;

// A managed run; its end is the end of the management. Module and optimizer must outlive it. Used by one thread.
class Managed {
 public:
  Managed(Managed&&) noexcept;
  Managed& operator=(Managed&&) noexcept;
  // As Close(), where that was not called; what goes wrong is printed.
  ~Managed();

  // Ends a training step: in place of optimizer.step(). The options and gradients of this moment are the ones that count,
  // whenever the modules step.
  void Step();
  // With a closure that computes the loss again, as optimizer.step(closure).
  at::Tensor Step(const std::function<at::Tensor()>& closure);
  // Does every step that is still due.
  void Flush();
  // Before Step(): the step's loss and the rows of its batch (0: not known), for the daemon's guards. Changes no result.
  void ReportLoss(double loss, uint64_t rows = 0);

  RunReport Report() const;
  const SessionInfo& session() const;
  bool daemon_alive() const;

  // Ends the management: what is due is done, and the memory goes by `end`. May be called again, to give back later what
  // was kept.
  void Close(AtEnd end = AtEnd::kGiveBackIfFits);

 private:
  friend Managed Manage(torch::nn::Module& module, torch::optim::Optimizer& optimizer, const ManageOptions& options);
  explicit Managed(std::shared_ptr<Run> run) : run_(std::move(run)) {}
  std::shared_ptr<Run> run_;
};

// Gives the memory of the module's and its optimizer's training state to misa. Known optimizers are torch's Adam, AdamW,
// SGD, RMSprop and Adagrad. One run at a time in a process. Throws where it cannot be; nothing was changed then.
[[nodiscard]] Managed Manage(torch::nn::Module& module, torch::optim::Optimizer& optimizer, const ManageOptions& options);

// Counts every CPU tensor made from now on as bytes on the device. Manage() does it too, but tensors made before (a data
// set, the module's buffers) are then unknown to the budget: call this first thing in main().
void InstallMeter();

// Keeps the tensors' data on the device while it lives, for code that takes raw pointers. Unmanaged tensors are left as
// they are. Throws where they do not fit the budget together.
class Resident {
 public:
  explicit Resident(const std::vector<at::Tensor>& tensors);
  Resident(const Resident&) = delete;
  Resident& operator=(const Resident&) = delete;
  ~Resident();

 private:
  std::shared_ptr<Run> run_;
  std::vector<at::Tensor> pinned_;
};

// SHA-256 over every tensor of module and optimizer state, names sorted: name, dtype, shape and raw bytes of each. The
// Python package's state_sha256 in every respect: equal names and equal bits give equal digests in both languages. Works on
// plain and managed objects alike; does what is due first.
std::string StateSha256(torch::nn::Module& module, torch::optim::Optimizer& optimizer);

}  // namespace misa
