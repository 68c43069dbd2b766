#include "client/torch/observer.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <memory>
#include <string_view>
#include <thread>
#include <vector>

namespace misa::torch_client {
namespace {

std::atomic<TouchHandler*> active_handler{nullptr};
std::atomic<int> inside{0};
at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;

// What an operator does with its arguments; argument 63 and later ones are taken to be read.
struct OperatorInfo {
  const char* name = nullptr;  // identity: every registered operator has a string of its own
  uint64_t writes = 0;
  uint64_t ignored = 0;        // only the shape or the alias is used
  uint64_t viewed = 0;         // of these, what a view is made of
};

bool NeedsNoData(std::string_view name) {
  static constexpr std::string_view kNames[] = {
      "aten::empty_like", "aten::zeros_like", "aten::ones_like",     "aten::full_like",    "aten::rand_like",
      "aten::randn_like", "aten::new_empty",  "aten::new_zeros",     "aten::new_ones",     "aten::new_full",
      "aten::size",       "aten::sym_size",   "aten::is_same_size",  "aten::result_type",  "aten::sym_numel",
      "aten::is_complex", "aten::is_nonzero_", "aten::_has_compatible_shallow_copy_type",  "aten::sym_stride",
      "aten::is_floating_point", "aten::_version", "aten::output_nr", "aten::is_leaf", "aten::retain_grad",
      "aten::requires_grad_", "aten::new_empty_strided", "aten::detach", "aten::detach_",
      // As torch's own code names them, without a schema.
      "detach", "detach_"};
  for (std::string_view candidate : kNames) {
    if (name == candidate) return true;
  }
  return false;
}

// The second argument gives its shape or type only.
bool LikeSecond(std::string_view name) {
  static constexpr std::string_view kNames[] = {"aten::view_as", "aten::expand_as", "aten::reshape_as", "aten::type_as",
                                                "aten::resize_as_"};
  return std::find(std::begin(kNames), std::end(kNames), name) != std::end(kNames);
}

OperatorInfo Describe(const at::RecordFunction& function) {
  OperatorInfo info;
  info.name = function.name();
  if (NeedsNoData(info.name)) {
    info.ignored = ~0ull;
    return info;
  }
  if (LikeSecond(info.name)) info.ignored |= 2;
  const auto operator_name = function.operator_name();
  if (!operator_name) return info;
  if (operator_name->name.rfind("c10d::", 0) == 0) {
    // Collectives write into what they are given and do not say so.
    info.writes = ~0ull;
    return info;
  }
  const auto schema = c10::Dispatcher::singleton().findSchema(*operator_name);
  if (!schema) return info;
  const auto& arguments = schema->schema().arguments();
  for (size_t i = 0; i < arguments.size() && i < 64; ++i) {
    const auto* alias = arguments[i].alias_info();
    if (alias == nullptr) continue;
    // "(a!)" is written; "(a)" only gives a view, whose use is a touch of its own.
    if (alias->isWrite()) {
      info.writes |= 1ull << i;
    } else {
      info.ignored |= 1ull << i;
      info.viewed |= 1ull << i;
    }
  }
  return info;
}

const OperatorInfo& Lookup(const at::RecordFunction& function) {
  thread_local std::array<OperatorInfo, 512> cache;
  const char* name = function.name();
  OperatorInfo& entry = cache[(reinterpret_cast<uintptr_t>(name) >> 4) % cache.size()];
  if (entry.name != name) entry = Describe(function);
  return entry;
}

struct TouchContext final : at::ObserverContext {
  TouchHandler* handler = nullptr;
  std::vector<Touched> touched;
};

void Add(std::vector<Touched>* touched, Slot* slot, uint8_t access) {
  for (Touched& one : *touched) {
    if (one.facet == slot->facet) {
      one.access |= access;
      return;
    }
  }
  touched->push_back({slot->facet, access});
}

Slot* FindSlot(const StorageTable& table, at::TensorImpl* tensor) {
  if (!tensor->has_storage()) return nullptr;
  const auto* storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  return storage == nullptr ? nullptr : table.Find(storage);
}

// Calls `visit(argument, slot, tensor)` for every managed tensor among the inputs.
template <typename Visit>
void ForEachManaged(const at::RecordFunction& function, const StorageTable& table, Visit&& visit) {
  const auto inputs = function.inputs();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const c10::IValue& value = inputs[i];
    if (value.isTensor()) {
      at::TensorImpl* tensor = value.unsafeToTensorImpl();
      if (Slot* slot = FindSlot(table, tensor)) visit(i, slot, tensor);
    } else if (value.isList()) {
      for (const c10::IValue& element : value.toListRef()) {
        if (!element.isTensor()) {
          if (element.isNone()) continue;  // of a list of optional ones
          break;
        }
        at::TensorImpl* tensor = element.unsafeToTensorImpl();
        if (Slot* slot = FindSlot(table, tensor)) visit(i, slot, tensor);
      }
    }
  }
}

std::unique_ptr<at::ObserverContext> OnStart(const at::RecordFunction& function) {
  static const StorageTable& table = StorageTable::Get();
  bool any = false;
  ForEachManaged(function, table, [&](size_t, Slot*, at::TensorImpl*) { any = true; });
  if (!any) return nullptr;

  inside.fetch_add(1, std::memory_order_seq_cst);
  TouchHandler* handler = active_handler.load(std::memory_order_seq_cst);
  std::unique_ptr<TouchContext> context;
  if (handler != nullptr) {
    const OperatorInfo& info = Lookup(function);
    context = std::make_unique<TouchContext>();
    context->handler = handler;
    ForEachManaged(function, table, [&](size_t argument, Slot* slot, at::TensorImpl* tensor) {
      const uint64_t bit = argument < 64 ? 1ull << argument : 0;
      if (info.ignored & bit) {
        if ((info.viewed & bit) && at::GradMode::is_enabled() && tensor->requires_grad()) handler->BeforeView(slot->facet);
        return;
      }
      Add(&context->touched, slot, policy::kRead | (info.writes & bit ? policy::kWrite : 0));
    });
    if (context->touched.empty()) {
      context.reset();
    } else {
      // An exception would be swallowed by the caller. A failure has left its sentence in the storages instead, and the
      // operator throws it as soon as it asks for the data.
      const std::string error = handler->Touch(context->touched.data(), context->touched.size());
      if (!error.empty()) context.reset();
    }
  }
  if (context == nullptr) inside.fetch_sub(1, std::memory_order_seq_cst);
  return context;
}

void OnEnd(const at::RecordFunction&, at::ObserverContext* context) {
  if (context == nullptr) return;
  auto* touch = static_cast<TouchContext*>(context);
  touch->handler->EndTouch(touch->touched.data(), touch->touched.size());
  inside.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace

void SetTouchHandler(TouchHandler* handler) {
  active_handler.store(handler, std::memory_order_seq_cst);
  if (handler != nullptr && handle == at::INVALID_CALLBACK_HANDLE) {
    handle = at::addGlobalCallback(at::RecordFunctionCallback(&OnStart, &OnEnd)
                                       .needsInputs(true)
                                       .scopes({at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION}));
  }
  if (handler == nullptr) {
    if (handle != at::INVALID_CALLBACK_HANDLE) at::removeCallback(std::exchange(handle, at::INVALID_CALLBACK_HANDLE));
    // Operators are short; those that wait for bytes have deadlines of their own.
    while (inside.load(std::memory_order_seq_cst) > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace misa::torch_client
