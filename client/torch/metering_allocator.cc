#include "client/torch/metering_allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <malloc.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

#include "client/core/meter.h"
#include "runtime/memory/byte_size.h"

namespace misa::torch_client {
namespace {

constexpr size_t kAlignment = 64;  // c10's alignment of CPU tensors
constexpr uint8_t kPriority = 20;  // above torch's own
// Freed blocks of this size and above go back to the system: what the meter no longer counts must not stay resident.
constexpr int kReturnThreshold = 1 << 20;

using RoomMaker = std::function<std::string(uint64_t)>;
std::atomic<std::shared_ptr<const RoomMaker>> room_maker;

void Free(void* pointer) {
  if (pointer == nullptr) return;
  DeviceMeter::Get().SubtractOther(malloc_usable_size(pointer));
  free(pointer);
}

class MeteringAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, nullptr, &Free, cpu};
    void* pointer = nullptr;
    if (posix_memalign(&pointer, kAlignment, bytes) != 0) {
      TORCH_CHECK(false, "The system has no memory for a tensor of ", FormatByteSize(bytes), ".");
    }
    // Pages come with the first write, so counting after the allocation is still counting before the use.
    const uint64_t usable = malloc_usable_size(pointer);
    DeviceMeter& meter = DeviceMeter::Get();
    if (!meter.TryAddOther(usable)) {
      const std::shared_ptr<const RoomMaker> maker = room_maker.load();
      if (maker == nullptr) {
        meter.AddOther(usable);
      } else {
        const std::string error = (*maker)(usable);
        if (!error.empty()) {
          free(pointer);
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
    // glibc raises the threshold by itself and then keeps what is freed: the cgroup would see more than the meter.
    mallopt(M_MMAP_THRESHOLD, kReturnThreshold);
    mallopt(M_TRIM_THRESHOLD, 4 * kReturnThreshold);
    static MeteringAllocator allocator;
    c10::SetCPUAllocator(&allocator, kPriority);
  });
}

void SetRoomMaker(std::function<std::string(uint64_t bytes)> maker) {
  room_maker.store(maker ? std::make_shared<const RoomMaker>(std::move(maker)) : nullptr);
}

}  // namespace misa::torch_client
