#include "client/torch/metering_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <malloc.h>
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

#include "client/core/block_mappings.h"
#include "client/core/meter.h"
#include "client/torch/doors.h"
#include "runtime/memory/byte_size.h"

namespace misa::torch_client {
namespace {

constexpr size_t kAlignment = 64;  // c10's alignment of CPU tensors
constexpr uint8_t kPriority = 20;  // above torch's own
// Freed blocks of this size and above do not stay in glibc's hands: what the meter no longer counts must not stay resident.
constexpr size_t kLarge = 256 << 10;
// Freed large blocks are kept for the next tensors up to this sum; the meter counts them, and they go as soon
// as the budget needs the room.
constexpr uint64_t kMostKept = 1ull << 30;
// Smaller ones do, in holes between others that malloc does not give back by itself. More than this of them is given back
// where the budget needs the room; looking the heap through costs too much for less.
constexpr int64_t kLeastTrim = 2 << 20;
constexpr size_t kPage = 4096;

std::atomic<bool> managed{false};
// Of small blocks: freed since the heap was trimmed last and not asked for again.
std::atomic<int64_t> heap_free{0};

void NoteHeap(int64_t change) {
  int64_t free = heap_free.fetch_add(change, std::memory_order_relaxed) + change;
  if (free < 0) {
    heap_free.store(0, std::memory_order_relaxed);
    free = 0;
  }
  DeviceMeter::Get().SetIdle(free >= kLeastTrim ? static_cast<uint64_t>(free) : 0);
}

void TrimHeap() {
  heap_free.store(0, std::memory_order_relaxed);
  DeviceMeter::Get().SetIdle(0);
  malloc_trim(0);
}

BlockMappings& Mappings() {
  // Never destroyed: tensors may die after static destructors.
  static BlockMappings* mappings = [] {
    // Whoever forks must not leave the child a lock that nobody there will ever open.
    pthread_atfork([] { Mappings().LockForFork(); }, [] { Mappings().UnlockAfterFork(); },
                   [] { Mappings().UnlockAfterFork(); });
    return new BlockMappings(&DeviceMeter::Get(), kMostKept);
  }();
  return *mappings;
}

using RoomMaker = std::function<std::string(uint64_t)>;
std::atomic<std::shared_ptr<const RoomMaker>> room_maker;

void Free(void* pointer) {
  if (pointer == nullptr) return;
  const bool keep = managed.load(std::memory_order_relaxed);
  if (reinterpret_cast<uintptr_t>(pointer) % kPage == 0 && Mappings().Free(pointer, keep)) return;
  const size_t size = malloc_usable_size(pointer);
  free(pointer);
  DeviceMeter::Get().SubtractOther(size);
  if (keep && size < kLarge) NoteHeap(static_cast<int64_t>(size));
}

// What the budget needs: of the heap first, which is of less use to the next tensors than whole mappings.
void Reclaim(uint64_t bytes) {
  const uint64_t idle = DeviceMeter::Get().idle_bytes();
  if (idle > 0) TrimHeap();
  if (bytes > idle) Mappings().Reclaim(bytes - idle);
}

class MeteringAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &Free, cpu};
    void* pointer = nullptr;
    uint64_t usable = 0;
    if (bytes >= kLarge && managed.load(std::memory_order_relaxed)) {
      usable = (bytes + kPage - 1) / kPage * kPage;
      pointer = Mappings().Reuse(usable);
      if (pointer != nullptr) return {pointer, pointer, &Free, cpu};  // counted all the time
      pointer = Mappings().Make(usable);
    } else if (posix_memalign(&pointer, kAlignment, bytes) == 0) {
      usable = malloc_usable_size(pointer);
      if (managed.load(std::memory_order_relaxed) && heap_free.load(std::memory_order_relaxed) > 0) {
        NoteHeap(-static_cast<int64_t>(usable));
      }
    } else {
      pointer = nullptr;
    }
    TORCH_CHECK(pointer != nullptr, "The system has no memory for a tensor of ", FormatByteSize(bytes), ".");
    // Pages come with the first write, so counting after the allocation is still counting before the use.
    DeviceMeter& meter = DeviceMeter::Get();
    if (!meter.TryAddOther(usable)) {
      // In a forked child nobody could make room, and the budget is the parent's.
      const std::shared_ptr<const RoomMaker> maker = InForkedChild() ? nullptr : room_maker.load();
      if (maker == nullptr) {
        meter.AddOther(usable);
      } else {
        const std::string error = (*maker)(usable);
        if (!error.empty()) {
          // Never counted: it must neither raise the peak nor be kept.
          if (!Mappings().Drop(pointer)) free(pointer);
          TORCH_CHECK(false, error);
        }
      }
    }
    return {pointer, pointer, &Free, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Free; }
  void copy_data(void* target, const void* source, size_t count) const override { std::memcpy(target, source, count); }
};

}  // namespace

void InstallMeteringAllocator() {
  static std::once_flag once;
  std::call_once(once, [] {
    static MeteringAllocator allocator;
    c10::SetCPUAllocator(&allocator, kPriority);
  });
}

void ServeManaged() {
  // glibc raises the threshold by itself and then keeps what is freed: the cgroup would see more than the meter.
  mallopt(M_MMAP_THRESHOLD, static_cast<int>(kLarge));
  mallopt(M_TRIM_THRESHOLD, static_cast<int>(4 * kLarge));
  TrimHeap();
  managed.store(true);
  DeviceMeter::Get().SetReclaimer(&Reclaim);
}

void TrimFreed() { TrimHeap(); }

void GiveBackFreed() {
  managed.store(false);
  TrimHeap();
  Mappings().Reclaim(~0ull);
}

void SetRoomMaker(std::function<std::string(uint64_t bytes)> maker) {
  room_maker.store(maker ? std::make_shared<const RoomMaker>(std::move(maker)) : nullptr);
}

}  // namespace misa::torch_client
