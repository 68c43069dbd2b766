#include "client/torch/doors.h"

#include <ATen/core/VariableHooksInterface.h>
#include <pthread.h>

#include <atomic>
#include <mutex>

namespace misa::torch_client {
namespace {

std::atomic<const DataDoor*> data_door{nullptr};
std::atomic<const ForkDoor*> fork_door{nullptr};
std::atomic<bool> forked{false};

using Hooks = at::impl::VariableHooksInterface;

// Autograd's own hooks with one of them watched.
class WatchedHooks final : public Hooks {
 public:
  explicit WatchedHooks(Hooks* inner) : inner_(inner) {}

  void set_data(const at::TensorBase& tensor, const at::TensorBase& other) const override {
    const DataDoor* door = data_door.load(std::memory_order_acquire);
    if (door != nullptr) door->before(tensor);
    inner_->set_data(tensor, other);
    if (door != nullptr) door->after(tensor);
  }

  at::TensorBase tensor_data(const at::TensorBase& t) const override { return inner_->tensor_data(t); }
  at::TensorBase variable_data(const at::TensorBase& t) const override { return inner_->variable_data(t); }
  const std::shared_ptr<torch::autograd::Node>& grad_fn(const at::TensorBase& t) const override {
    return inner_->grad_fn(t);
  }
  unsigned _register_hook(const at::TensorBase& t,
                          std::function<at::TensorBase(const at::TensorBase&)> hook) const override {
    return inner_->_register_hook(t, std::move(hook));
  }
  void remove_hook(const at::TensorBase& t, unsigned place) const override { inner_->remove_hook(t, place); }
  bool is_view(const at::TensorBase& t) const override { return inner_->is_view(t); }
  const at::TensorBase& base(const at::TensorBase& t) const override { return inner_->base(t); }
  const std::string& name(const at::TensorBase& t) const override { return inner_->name(t); }
  bool is_leaf(const at::TensorBase& t) const override { return inner_->is_leaf(t); }
  int64_t output_nr(const at::TensorBase& t) const override { return inner_->output_nr(t); }
  at::TensorBase data(const at::TensorBase& t) const override { return inner_->data(t); }
  int64_t _version(const at::TensorBase& t) const override { return inner_->_version(t); }
  void retain_grad(const at::TensorBase& t) const override { inner_->retain_grad(t); }
  bool retains_grad(const at::TensorBase& t) const override { return inner_->retains_grad(t); }
  void _backward(const at::Tensor& t, at::TensorList inputs, const std::optional<at::Tensor>& gradient,
                 std::optional<bool> keep_graph, bool create_graph) const override {
    inner_->_backward(t, inputs, gradient, keep_graph, create_graph);
  }
  void requires_grad_(const at::TensorBase& t, bool value) const override { inner_->requires_grad_(t, value); }
  void basic_autograd_not_implemented_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                               torch::jit::Stack* stack) const override {
    inner_->basic_autograd_not_implemented_fallback(op, keys, stack);
  }
  std::optional<c10::ScalarType> grad_dtype(const at::TensorBase& t) const override { return inner_->grad_dtype(t); }
  void set_grad_dtype(const at::TensorBase& t, const std::optional<c10::ScalarType>& type) const override {
    inner_->set_grad_dtype(t, type);
  }

 private:
  Hooks* const inner_;
};

}  // namespace

void SetDataDoor(const DataDoor* door) {
  // Stays for the life of the process: whoever asked for the hooks may keep the pointer.
  static std::once_flag once;
  std::call_once(once, [] { at::impl::SetVariableHooks(new WatchedHooks(at::impl::GetVariableHooks())); });
  data_door.store(door, std::memory_order_release);
}

void SetForkDoor(const ForkDoor* door) {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(
        [] {
          if (const ForkDoor* open = fork_door.load()) open->prepare();
        },
        [] {
          if (const ForkDoor* open = fork_door.load()) open->parent();
        },
        [] {
          const ForkDoor* open = fork_door.load();
          if (open == nullptr) return;
          forked.store(true);
          open->child();
        });
  });
  fork_door.store(door);
}

bool InForkedChild() { return forked.load(std::memory_order_relaxed); }

}  // namespace misa::torch_client
