#include "client/torch/metering_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <malloc.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "client/core/meter.h"
#include "client/torch/doors.h"
#include "runtime/memory/byte_size.h"

namespace misa::torch_client {
namespace {

constexpr size_t kAlignment = 64;  // c10's alignment of CPU tensors
constexpr uint8_t kPriority = 20;  // above torch's own
// Freed blocks of this size and above do not stay in glibc's hands: what the meter no longer counts must not stay resident.
constexpr size_t kLarge = 256 << 10;
// Freed large blocks are kept for the next tensor of their size up to this sum; the meter counts them, and they go as soon
// as the budget needs the room.
constexpr uint64_t kMostKept = 1ull << 30;
// From this size on a block lies in huge pages: fresh memory costs one fault for 2 MiB then, not 512.
constexpr size_t kHugePage = 2ull << 20;
constexpr size_t kPage = 4096;

std::atomic<bool> managed{false};

// Blocks that are mappings of their own, by address, which is a multiple of kPage.
class Mappings {
 public:
  // A kept block of this very size, or null.
  void* Reuse(size_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    // The one freed last is the one most likely still in the cache.
    for (auto it = kept_.rbegin(); it != kept_.rend(); ++it) {
      if (it->second != size) continue;
      void* block = it->first;
      kept_.erase(std::next(it).base());
      sizes_[block] = size;
      DeviceMeter::Get().MoveKeptToOther(size);
      return block;
    }
    return nullptr;
  }

  void* Make(size_t size) {
    const bool huge = size >= kHugePage;
    const size_t reserved = huge ? size + kHugePage : size;
    void* raw = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) return nullptr;
    char* begin = static_cast<char*>(raw);
    if (!huge) {
      std::lock_guard<std::mutex> lock(mutex_);
      sizes_[begin] = size;
      return begin;
    }
    char* block = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + kHugePage - 1) / kHugePage * kHugePage);
    if (block > begin) munmap(begin, static_cast<size_t>(block - begin));
    char* end = begin + reserved;
    if (end > block + size) munmap(block + size, static_cast<size_t>(end - (block + size)));
    madvise(block, size, MADV_HUGEPAGE);  // a wish: where the system has none, small pages do
    std::lock_guard<std::mutex> lock(mutex_);
    sizes_[block] = size;
    return block;
  }

  // True where the block is one of these; it is freed or kept then.
  bool Free(void* block) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto found = sizes_.find(block);
    if (found == sizes_.end()) return false;
    const size_t size = found->second;
    sizes_.erase(found);
    DeviceMeter& meter = DeviceMeter::Get();
    if (managed.load(std::memory_order_relaxed) && meter.kept_bytes() + size <= kMostKept) {
      kept_.emplace_back(block, size);
      meter.MoveOtherToKept(size);
      return true;
    }
    // Unmapped while it is still locked out: once it is, the address may be another block's.
    munmap(block, size);
    meter.SubtractOther(size);
    return true;
  }

  // Frees a block that was not counted; false where it is none of these.
  bool Drop(void* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = sizes_.find(block);
    if (found == sizes_.end()) return false;
    munmap(block, found->second);
    sizes_.erase(found);
    return true;
  }

  void Reclaim(uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t given = 0;
    while (given < bytes && !kept_.empty()) {
      const auto [block, size] = kept_.front();
      kept_.pop_front();
      munmap(block, size);
      DeviceMeter::Get().SubtractKept(size);
      given += size;
    }
  }

  static Mappings& Get() {
    static Mappings* mappings = new Mappings;  // tensors may die after static destructors
    return *mappings;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<void*, size_t> sizes_;      // blocks in use
  std::deque<std::pair<void*, size_t>> kept_;    // freed, in the order of their freeing
};

using RoomMaker = std::function<std::string(uint64_t)>;
std::atomic<std::shared_ptr<const RoomMaker>> room_maker;

void Free(void* pointer) {
  if (pointer == nullptr) return;
  if (reinterpret_cast<uintptr_t>(pointer) % kPage == 0 && Mappings::Get().Free(pointer)) return;
  const size_t size = malloc_usable_size(pointer);
  free(pointer);
  DeviceMeter::Get().SubtractOther(size);
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
      pointer = Mappings::Get().Reuse(usable);
      if (pointer != nullptr) return {pointer, pointer, &Free, cpu};  // counted all the time
      pointer = Mappings::Get().Make(usable);
    } else if (posix_memalign(&pointer, kAlignment, bytes) == 0) {
      usable = malloc_usable_size(pointer);
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
          if (!Mappings::Get().Drop(pointer)) free(pointer);
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
  malloc_trim(0);
  managed.store(true);
  DeviceMeter::Get().SetReclaimer([](uint64_t bytes) { Mappings::Get().Reclaim(bytes); });
}

void GiveBackFreed() {
  managed.store(false);
  Mappings::Get().Reclaim(~0ull);
}

void SetRoomMaker(std::function<std::string(uint64_t bytes)> maker) {
  room_maker.store(maker ? std::make_shared<const RoomMaker>(std::move(maker)) : nullptr);
}

}  // namespace misa::torch_client
