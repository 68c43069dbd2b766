#include "client/torch/managed_storage.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

namespace misa::torch_client {
namespace {

// StorageImpl can be told to throw a sentence of ours on every access to its data, but nothing public takes that back.
// An explicit instantiation may name private members, which is the one lawful way to reach them; the Python package
// checks at import that torch is the version this was built for.
template <auto Member>
struct Reach {
  friend auto& ThrowFlag(c10::StorageImpl& storage) { return storage.*Member; }
};
auto& ThrowFlag(c10::StorageImpl& storage);
template struct Reach<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

template <auto Member>
struct ReachCheck {
  friend auto& CheckFlag(c10::StorageImpl& storage) { return storage.*Member; }
};
auto& CheckFlag(c10::StorageImpl& storage);
template struct ReachCheck<&c10::StorageImpl::has_mutable_data_ptr_check_>;

// What was a facet's memory, owned by the storages that were in it.
class HandedMemory {
 public:
  HandedMemory(char* begin, uint64_t bytes) : begin_(begin), bytes_(bytes) {}
  ~HandedMemory() { ChunkSpace::FreeAddress(begin_, bytes_); }
  HandedMemory(const HandedMemory&) = delete;
  HandedMemory& operator=(const HandedMemory&) = delete;

 private:
  char* const begin_;
  const uint64_t bytes_;
};

struct HandedPart {
  std::shared_ptr<HandedMemory> memory;
  char* data;
  uint64_t bytes;
  c10::DataPtr before;

  static void Delete(void* context) {
    auto* part = static_cast<HandedPart*>(context);
    // The pages go now, where others keep the rest.
    ChunkSpace::Empty(part->data, part->bytes);
    DeviceMeter::Get().SubtractOther(part->bytes);
    delete part;
  }
};

}  // namespace

// ------------------------------------------------------------------------------------------------------------ table

StorageTable::StorageTable()
    : keys_(new std::atomic<const c10::StorageImpl*>[kCapacity]), values_(new std::atomic<Slot*>[kCapacity]) {
  for (size_t i = 0; i < kCapacity; ++i) {
    keys_[i].store(nullptr, std::memory_order_relaxed);
    values_[i].store(nullptr, std::memory_order_relaxed);
  }
}

StorageTable& StorageTable::Get() {
  // Never destroyed: storages may die in static destructors.
  static StorageTable* table = new StorageTable;
  return *table;
}

bool StorageTable::Insert(const c10::StorageImpl* key, Slot* value) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (used_ >= kCapacity / 2) return false;
  for (size_t i = Hash(key);; ++i) {
    const c10::StorageImpl* seen = keys_[i & mask_].load(std::memory_order_relaxed);
    if (seen != nullptr && seen != Tombstone() && seen != key) continue;
    if (seen == nullptr) ++used_;
    values_[i & mask_].store(value, std::memory_order_release);
    keys_[i & mask_].store(key, std::memory_order_release);
    return true;
  }
}

void StorageTable::Erase(const c10::StorageImpl* key, const Slot* value) {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t i = Hash(key);
  while (keys_[i & mask_].load(std::memory_order_relaxed) != key) {
    if (keys_[i & mask_].load(std::memory_order_relaxed) == nullptr) return;
    ++i;
  }
  if (values_[i & mask_].load(std::memory_order_relaxed) != value) return;
  values_[i & mask_].store(nullptr, std::memory_order_release);
  keys_[i & mask_].store(Tombstone(), std::memory_order_release);
  // A tombstone before an empty place ends no chain: it can be emptied, and so can those before it.
  if (keys_[(i + 1) & mask_].load(std::memory_order_relaxed) != nullptr) return;
  while (keys_[i & mask_].load(std::memory_order_relaxed) == Tombstone()) {
    keys_[i & mask_].store(nullptr, std::memory_order_release);
    --used_;
    --i;
  }
}

bool MayHaveArrays(const at::Tensor& tensor, size_t known) {
  const c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  const c10::DeleterFnPtr deleter = storage.data_ptr().get_deleter();
  const bool torchs = deleter == c10::GetCPUAllocator()->raw_deleter() ||
                      deleter == c10::GetDefaultCPUAllocator()->raw_deleter() || deleter == &HandedPart::Delete;
  // torch marks a storage so when it makes an array over it, and never takes that back.
  // Python's own object of the storage, where it was ever asked for, refers to it as well.
  const size_t python = storage.pyobj_slot()->load_pyobj() != nullptr ? 1 : 0;
  return torchs && !storage.resizable() && tensor.storage().use_count() > known + python;
}

// ----------------------------------------------------------------------------------------------------------- keeper

std::string StorageKeeper::Bind(c10::StorageImpl* storage, Facet* facet, uint64_t offset, const std::string& what,
                                bool copied, bool keep_before) {
  auto slot = std::make_unique<Slot>();
  slot->keeper = this;
  slot->facet = facet;
  slot->storage = storage;
  slot->offset = offset;
  slot->bytes = storage->nbytes();
  Slot* raw = slot.get();
  char* target = facet->address + offset;
  if (!copied && slot->bytes > 0) std::memcpy(target, storage->data(), slot->bytes);
  if (!StorageTable::Get().Insert(storage, raw)) {
    return "More storages are managed than misa can keep (65536): " + what + " stays in ordinary memory.";
  }
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (slots_.size() <= facet->id) slots_.resize(facet->id + 1);
    slots_[facet->id].push_back(std::move(slot));
  }
  // The old memory goes with the old DataPtr.
  c10::DataPtr before = storage->set_data_ptr(
      c10::DataPtr(target, raw, &StorageKeeper::OnDelete, c10::Device(c10::DeviceType::CPU)));
  if (keep_before) raw->before = std::move(before);
  return "";
}

void StorageKeeper::OnDelete(void* context) {
  Slot* slot = static_cast<Slot*>(context);
  StorageKeeper* keeper = slot->keeper;
  Facet* facet = slot->facet;
  StorageTable::Get().Erase(slot->storage, slot);
  bool last = false;
  {
    std::lock_guard<std::mutex> lock(keeper->mutex_);
    auto& slots = keeper->slots_[facet->id];
    slots.erase(std::find_if(slots.begin(), slots.end(), [slot](const auto& other) { return other.get() == slot; }));
    last = slots.empty();
  }
  keeper->gone_(keeper->context_, facet, last);
}

void StorageKeeper::HandOver(const Facet& facet) {
  std::vector<Slot*> slots;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (slots_.size() <= facet.id) return;
    for (const auto& slot : slots_[facet.id]) slots.push_back(slot.get());
  }
  const auto memory = std::make_shared<HandedMemory>(facet.address, facet.bytes);
  for (Slot* slot : slots) {
    char* data = facet.address + slot->offset;
    auto* part = new HandedPart{memory, data, slot->bytes, std::move(slot->before)};
    // The old DataPtr's deleter takes the slot away.
    slot->storage->set_data_ptr(c10::DataPtr(data, part, &HandedPart::Delete, c10::Device(c10::DeviceType::CPU)));
  }
}

void StorageKeeper::Poison(const Facet& facet, const std::string& sentence) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (slots_.size() <= facet.id) return;
  for (const auto& slot : slots_[facet.id]) {
    slot->poisoned = true;
    slot->storage->release_data_and_set_meta_custom_data_ptr_error_msg_(sentence);
  }
}

void StorageKeeper::Heal(const Facet& facet) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (slots_.size() <= facet.id) return;
  for (const auto& slot : slots_[facet.id]) {
    if (!std::exchange(slot->poisoned, false)) continue;
    ThrowFlag(*slot->storage) = false;
    CheckFlag(*slot->storage) = false;
  }
}

void StorageKeeper::PoisonAll(const std::string& sentence) {
  for (const auto& slots : slots_) {
    for (const auto& slot : slots) slot->storage->release_data_and_set_meta_custom_data_ptr_error_msg_(sentence);
  }
}

std::vector<c10::StorageImpl*> StorageKeeper::StoragesOf(const Facet& facet) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<c10::StorageImpl*> storages;
  if (slots_.size() <= facet.id) return storages;
  for (const auto& slot : slots_[facet.id]) storages.push_back(slot->storage);
  return storages;
}

std::vector<Extent> StorageKeeper::PartsOf(const Facet& facet) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Extent> parts;
  if (slots_.size() <= facet.id) return parts;
  for (const auto& slot : slots_[facet.id]) parts.push_back({slot->offset, slot->bytes});
  return parts;
}

uint64_t StorageKeeper::FirstFit(const Facet& facet, uint64_t bytes, uint64_t alignment) {
  const auto align = [alignment](uint64_t value) { return (value + alignment - 1) / alignment * alignment; };
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::pair<uint64_t, uint64_t>> taken;
  if (facet.id < slots_.size()) {
    for (const auto& slot : slots_[facet.id]) taken.emplace_back(slot->offset, slot->offset + align(slot->bytes));
  }
  std::sort(taken.begin(), taken.end());
  uint64_t offset = 0;
  for (const auto& [begin, end] : taken) {
    if (offset + align(bytes) <= begin) break;
    offset = std::max(offset, end);
  }
  return offset + align(bytes) <= facet.bytes ? offset : facet.bytes;
}

uint64_t StorageKeeper::UsedBytes(const Facet& facet) {
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t bytes = 0;
  if (facet.id < slots_.size()) {
    for (const auto& slot : slots_[facet.id]) bytes += slot->bytes;
  }
  return bytes;
}

bool StorageKeeper::Occupied(const Facet& facet, uint64_t offset) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (slots_.size() <= facet.id) return false;
  const auto& slots = slots_[facet.id];
  return std::any_of(slots.begin(), slots.end(), [&](const auto& slot) { return slot->offset == offset; });
}

}  // namespace misa::torch_client
