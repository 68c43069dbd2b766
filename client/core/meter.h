// Bytes on the device: the pool's chunks that hold pages, and every other tensor. One sum, never above the budget.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>

namespace misa {

// All counters are bytes. Thread-safe; the fast path is two atomic additions.
class DeviceMeter {
 public:
  static constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

  // The process has one device and one meter.
  static DeviceMeter& Get();

  // False, and nothing counted, where the sum would pass the budget.
  bool TryAddOther(uint64_t bytes) {
    if (!TryAdd(bytes)) return false;
    const uint64_t other = other_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
    Raise(other_window_peak_, other);
    return true;
  }
  // Counts without looking at the budget: for bytes that exist already.
  void AddOther(uint64_t bytes) {
    Raise(peak_, total_.fetch_add(bytes, std::memory_order_seq_cst) + bytes);
    Raise(other_window_peak_, other_.fetch_add(bytes, std::memory_order_relaxed) + bytes);
  }
  void SubtractOther(uint64_t bytes) {
    other_.fetch_sub(bytes, std::memory_order_relaxed);
    total_.fetch_sub(bytes, std::memory_order_seq_cst);
  }

  // Freed memory that its allocator keeps for the next tensor: still on the device, but given up on demand.
  void MoveOtherToKept(uint64_t bytes) {
    other_.fetch_sub(bytes, std::memory_order_relaxed);
    kept_.fetch_add(bytes, std::memory_order_relaxed);
  }
  void MoveKeptToOther(uint64_t bytes) {
    kept_.fetch_sub(bytes, std::memory_order_relaxed);
    Raise(other_window_peak_, other_.fetch_add(bytes, std::memory_order_relaxed) + bytes);
  }
  void SubtractKept(uint64_t bytes) {
    kept_.fetch_sub(bytes, std::memory_order_relaxed);
    total_.fetch_sub(bytes, std::memory_order_seq_cst);
  }
  uint64_t kept_bytes() const { return kept_.load(std::memory_order_relaxed); }
  // Freed memory that malloc holds: nobody's bytes and in no sum, but resident until the reclaimer has it given back. What is
  // added has to fit beside it.
  void SetIdle(uint64_t bytes) { idle_.store(bytes, std::memory_order_relaxed); }
  uint64_t idle_bytes() const { return idle_.load(std::memory_order_relaxed); }
  // Gives at least `bytes` of idle and kept memory up, as far as there is any; called where an addition would pass the budget.
  using Reclaimer = void (*)(uint64_t bytes);
  void SetReclaimer(Reclaimer reclaimer) { reclaimer_.store(reclaimer); }

  bool TryAddPool(uint64_t bytes) {
    if (!TryAdd(bytes)) return false;
    pool_.fetch_add(bytes, std::memory_order_relaxed);
    return true;
  }
  void SubtractPool(uint64_t bytes) {
    pool_.fetch_sub(bytes, std::memory_order_relaxed);
    total_.fetch_sub(bytes, std::memory_order_seq_cst);
  }

  void SetBudget(uint64_t bytes) { budget_.store(bytes, std::memory_order_seq_cst); }
  uint64_t budget_bytes() const { return budget_.load(std::memory_order_seq_cst); }
  uint64_t total_bytes() const { return total_.load(std::memory_order_seq_cst); }
  uint64_t other_bytes() const { return other_.load(std::memory_order_relaxed); }
  uint64_t pool_bytes() const { return pool_.load(std::memory_order_relaxed); }
  uint64_t peak_bytes() const {
    return std::max(earlier_peak_.load(std::memory_order_relaxed), peak_.load(std::memory_order_relaxed));
  }
  void ResetPeak() {
    earlier_peak_.store(0, std::memory_order_relaxed);
    peak_.store(total_bytes(), std::memory_order_relaxed);
  }
  // The highest total since the last call.
  uint64_t TakeWindowPeak() {
    const uint64_t peak = peak_.exchange(total_bytes(), std::memory_order_relaxed);
    Raise(earlier_peak_, peak);
    return peak;
  }

  // The highest other_bytes since the last call.
  uint64_t TakeOtherWindowPeak() {
    return other_window_peak_.exchange(other_bytes(), std::memory_order_relaxed);
  }

 private:
  bool TryAdd(uint64_t bytes) {
    if (TryAddOnce(bytes)) return true;
    const Reclaimer reclaimer = reclaimer_.load(std::memory_order_relaxed);
    if (reclaimer == nullptr || kept_bytes() + idle_bytes() == 0) return false;
    const uint64_t wanted = total_bytes() + idle_bytes() + bytes;
    const uint64_t budget = budget_bytes();
    if (wanted > budget) reclaimer(wanted - budget);
    return TryAddOnce(bytes);
  }
  bool TryAddOnce(uint64_t bytes) {
    const uint64_t total = total_.fetch_add(bytes, std::memory_order_seq_cst) + bytes;
    if (total + idle_bytes() > budget_.load(std::memory_order_relaxed)) {
      total_.fetch_sub(bytes, std::memory_order_seq_cst);
      return false;
    }
    Raise(peak_, total);
    return true;
  }
  static void Raise(std::atomic<uint64_t>& mark, uint64_t value) {
    uint64_t seen = mark.load(std::memory_order_relaxed);
    while (seen < value && !mark.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
    }
  }

  std::atomic<uint64_t> budget_{kUnlimited};
  std::atomic<uint64_t> total_{0};
  std::atomic<uint64_t> other_{0};
  std::atomic<uint64_t> pool_{0};
  std::atomic<uint64_t> kept_{0};
  std::atomic<uint64_t> idle_{0};
  std::atomic<Reclaimer> reclaimer_{nullptr};
  std::atomic<uint64_t> peak_{0};  // since the last TakeWindowPeak
  std::atomic<uint64_t> earlier_peak_{0};
  std::atomic<uint64_t> other_window_peak_{0};
};

}  // namespace misa
