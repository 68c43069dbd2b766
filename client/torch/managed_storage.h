// Storages whose bytes live in a facet: bound once, and pointed at the facet's address for good. Who uses that while the
// bytes are away comes through the fault door; a storage throws a sentence only where a use of it has failed.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "client/core/executor.h"

namespace misa::torch_client {

class StorageKeeper;

// One managed storage. Dies with the storage.
struct Slot {
  StorageKeeper* keeper = nullptr;
  Facet* facet = nullptr;
  c10::StorageImpl* storage = nullptr;
  uint64_t offset = 0;
  uint64_t bytes = 0;
  bool poisoned = false;  // guarded by the keeper's lock
  c10::DataPtr before;    // the memory of before, where somebody may point into that
};

// Storages by address, for the observer: look-ups take no lock.
class StorageTable {
 public:
  Slot* Find(const c10::StorageImpl* key) const {
    size_t i = Hash(key);
    for (;;) {
      const c10::StorageImpl* seen = keys_[i & mask_].load(std::memory_order_acquire);
      if (seen == key) return values_[i & mask_].load(std::memory_order_acquire);
      if (seen == nullptr) return nullptr;
      ++i;
    }
  }
  // False where the table is full (a limit of kCapacity / 2 storages).
  bool Insert(const c10::StorageImpl* key, Slot* value);
  // Forgets the key where it is still this slot's; it may have another one by now.
  void Erase(const c10::StorageImpl* key, const Slot* value);
  static StorageTable& Get();

 private:
  static constexpr size_t kCapacity = 1 << 17;
  StorageTable();
  static size_t Hash(const void* key) { return (reinterpret_cast<uintptr_t>(key) >> 4) * 0x9e3779b97f4a7c15ull >> 40; }
  static const c10::StorageImpl* Tombstone() { return reinterpret_cast<const c10::StorageImpl*>(1); }

  std::unique_ptr<std::atomic<const c10::StorageImpl*>[]> keys_;
  std::unique_ptr<std::atomic<Slot*>[]> values_;
  const size_t mask_ = kCapacity - 1;
  size_t used_ = 0;
  std::mutex mutex_;
};

// A NumPy array was made over the tensor's memory, torch's own allocator made the memory, and more refer to it than `known`
// tensors: whoever moves it leaves the array behind, where that is what refers to it.
bool MayHaveArrays(const at::Tensor& tensor, size_t known);

class StorageKeeper final : public FacetOwner {
 public:
  // A storage has died or was resized; called without the keeper's lock. `last` where the facet has no storage left.
  using Gone = void (*)(void* context, Facet* facet, bool last);
  StorageKeeper(Gone gone, void* context) : gone_(gone), context_(context) {}

  // Moves the storage's content to the facet at `offset` and points it there; the old memory is freed. The facet is
  // present, pinned and attached. With `copied` the content is there already. With `keep_before` the old memory is there as
  // long as the storage. A storage of another facet, present and pinned too, leaves that one. A sentence where it cannot be
  // managed.
  std::string Bind(c10::StorageImpl* storage, Facet* facet, uint64_t offset, const std::string& what, bool copied,
                   bool keep_before = false);
  // The facet's addresses have become ordinary memory (Executor::Surrender), counted as other tensors': each storage owns its
  // part of it from now on, and the keeper forgets it.
  void HandOver(const Facet& facet);
  // From now on an access to the storages' data throws this sentence, until Heal.
  void Poison(const Facet& facet, const std::string& sentence);
  void Heal(const Facet& facet);
  // Where in the facet its storages are.
  std::vector<Extent> PartsOf(const Facet& facet);
  std::vector<c10::StorageImpl*> StoragesOf(const Facet& facet);
  // A storage lives at this offset.
  bool Occupied(const Facet& facet, uint64_t offset);
  // The lowest offset with room for that many bytes between the facet's storages, each at a multiple of `alignment`; the
  // facet's size where there is none.
  uint64_t FirstFit(const Facet& facet, uint64_t bytes, uint64_t alignment);
  // Bytes of the facet that storages have.
  uint64_t UsedBytes(const Facet& facet);

  // For fork(): between both calls no storage changes.
  void Lock() { mutex_.lock(); }
  void Unlock() { mutex_.unlock(); }
  // In a forked child, locked: every access to managed data throws this sentence.
  void PoisonAll(const std::string& sentence);

  // Addresses never change, so there is nothing to do when bytes come and go.
  void Attach(Facet&) override {}
  void Detach(Facet&) override {}

 private:
  static void OnDelete(void* slot);

  const Gone gone_;
  void* const context_;
  std::mutex mutex_;
  std::vector<std::vector<std::unique_ptr<Slot>>> slots_;  // by facet id
};

}  // namespace misa::torch_client
