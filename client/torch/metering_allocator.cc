#include "client/torch/metering_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <malloc.h>
#include <sys/mman.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
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
// Freed blocks of this size and above go back to the system: what the meter no longer counts must not stay resident.
constexpr int kReturnThreshold = 1 << 20;
// From this size on a block is a mapping of its own in huge pages: fresh memory costs one fault for 2 MiB then, not 512.
constexpr size_t kHugePage = 2ull << 20;
constexpr size_t kPage = 4096;

std::atomic<bool> managed{false};

// Blocks that are mappings of their own, by address, which is a multiple of kHugePage.
class Mappings {
 public:
  void* Make(size_t bytes) {
    const size_t size = (bytes + kPage - 1) / kPage * kPage;
    const size_t reserved = size + kHugePage;
    void* raw = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) return nullptr;
    char* begin = static_cast<char*>(raw);
    char* block = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + kHugePage - 1) / kHugePage * kHugePage);
    if (block > begin) munmap(begin, static_cast<size_t>(block - begin));
    char* end = begin + reserved;
    if (end > block + size) munmap(block + size, static_cast<size_t>(end - (block + size)));
    madvise(block, size, MADV_HUGEPAGE);  // a wish: where the system has none, small pages do
    std::lock_guard<std::mutex> lock(mutex_);
    sizes_[block] = size;
    return block;
  }
  // The block's size; 0 where the address is not one of these.
  size_t SizeOf(void* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = sizes_.find(block);
    return found == sizes_.end() ? 0 : found->second;
  }
  void Forget(void* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    sizes_.erase(block);
  }
  static Mappings& Get() {
    static Mappings* mappings = new Mappings;  // tensors may die after static destructors
    return *mappings;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<void*, size_t> sizes_;
};

using RoomMaker = std::function<std::string(uint64_t)>;
std::atomic<std::shared_ptr<const RoomMaker>> room_maker;

void Free(void* pointer) {
  if (pointer == nullptr) return;
  if (reinterpret_cast<uintptr_t>(pointer) % kHugePage == 0) {
    if (const size_t size = Mappings::Get().SizeOf(pointer); size > 0) {
      // Forgotten first: once it is unmapped the address may be another block's.
      Mappings::Get().Forget(pointer);
      munmap(pointer, size);
      DeviceMeter::Get().SubtractOther(size);
      return;
    }
  }
  const size_t size = malloc_usable_size(pointer);
  free(pointer);
  DeviceMeter::Get().SubtractOther(size);
}

// Memory for `bytes` and the bytes it really takes; null where the system has none.
void* Take(size_t bytes, uint64_t* taken) {
  if (bytes >= kHugePage && managed.load(std::memory_order_relaxed)) {
    void* block = Mappings::Get().Make(bytes);
    *taken = (bytes + kPage - 1) / kPage * kPage;
    return block;
  }
  void* pointer = nullptr;
  if (posix_memalign(&pointer, kAlignment, bytes) != 0) return nullptr;
  *taken = malloc_usable_size(pointer);
  return pointer;
}

class MeteringAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &Free, cpu};
    uint64_t usable = 0;
    void* pointer = Take(bytes, &usable);
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
          meter.AddOther(usable);  // Free takes it off again
          Free(pointer);
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

void KeepNothingFreed() {
  // glibc raises the threshold by itself and then keeps what is freed: the cgroup would see more than the meter.
  mallopt(M_MMAP_THRESHOLD, kReturnThreshold);
  mallopt(M_TRIM_THRESHOLD, 4 * kReturnThreshold);
  malloc_trim(0);
  managed.store(true);
}

void SetRoomMaker(std::function<std::string(uint64_t bytes)> maker) {
  room_maker.store(maker ? std::make_shared<const RoomMaker>(std::move(maker)) : nullptr);
}

}  // namespace misa::torch_client
