#include "tests/unit/client/core/memory_link.h"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace misa::testing {
namespace {

constexpr uint64_t kBlock = 512;

uint64_t Half(uint64_t bytes) { return bytes / 2 / kBlock * kBlock; }

}  // namespace

// Through the kernel, as a disk's driver would: memory that is not mapped is an error and not a crash, and that a thread
// writes what is being read is no mistake of the link's.
int MemoryLink::Copy(const Transfer& t, uint64_t from, uint64_t to) {
  if (t.disk_offset + t.bytes > disk_->size()) return EIO;
  const iovec disk{disk_->data() + t.disk_offset + from, to - from};
  const iovec device{t.address + from, to - from};
  const ssize_t moved = t.direction == Transfer::Direction::kLoad
                            ? process_vm_writev(getpid(), &disk, 1, &device, 1, 0)
                            : process_vm_readv(getpid(), &disk, 1, &device, 1, 0);
  if (moved < 0) return errno;
  return static_cast<uint64_t>(moved) == to - from ? 0 : EFAULT;
}

void MemoryLink::Submit(const Transfer& transfer) {
  queue_.push_back({transfer, Copy(transfer, 0, Half(transfer.bytes))});
}

void MemoryLink::Wait(double timeout_seconds, std::vector<Completion>* completions) {
  if (queue_.empty()) {
    std::unique_lock<std::mutex> lock(mutex_);
    wake_.wait_for(lock, std::chrono::duration<double>(timeout_seconds), [this] { return woken_; });
    woken_ = false;
    return;
  }
  for (auto& [t, error] : queue_) {
    if (error == 0) error = Copy(t, Half(t.bytes), t.bytes);
    completions->push_back({t.tag, t.direction, t.bytes, 0, error != 0 ? std::strerror(error) : ""});
  }
  queue_.clear();
}

void MemoryLink::Wake() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    woken_ = true;
  }
  wake_.notify_all();
}

void FaultyLink::Submit(const Transfer& transfer) {
  std::lock_guard<std::mutex> lock(mutex_);
  const size_t direction = Index(transfer.direction);
  ++count_[direction];
  if (!under_way_.insert(transfer.tag).second) overlapped_ = true;
  int error = 0;
  if (count_[direction] == fail_at_[direction]) error = error_[direction];
  if (count_[0] + count_[1] == fail_at_[2]) error = error_[2];
  if (error == 0 && probability_ > 0 && std::uniform_real_distribution<>(0, 1)(random_) < probability_) {
    error = sometimes_;
  }
  Transfer carried = transfer;
  if (error != 0) {
    breaking_[{direction, transfer.tag}] = {error, transfer.bytes};
    carried.bytes = Half(transfer.bytes);
  }
  const uint32_t turns = most_turns_ == 0 ? 0 : static_cast<uint32_t>(random_() % (most_turns_ + 1));
  held_.push_back({carried, turns});
  changed_.notify_all();
}

void FaultyLink::Wait(double timeout_seconds, std::vector<Completion>* completions) {
  bool waiting = false;
  std::vector<Transfer> ready;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto held = held_.begin(); held != held_.end();) {
      if (hold_[Index(held->transfer.direction)]) {
        ++held;
      } else if (held->turns > 0) {
        --held->turns;
        waiting = true;
        ++held;
      } else {
        ready.push_back(held->transfer);
        held = held_.erase(held);
      }
    }
  }
  for (const Transfer& transfer : ready) {
    if (transfer.bytes > 0) {
      inner_->Submit(transfer);
    } else {
      failed_.push_back({transfer.tag, transfer.direction, 0, 0, ""});
    }
  }
  const size_t before = completions->size();
  inner_->Wait(waiting || !failed_.empty() ? 0 : timeout_seconds, completions);
  completions->insert(completions->end(), failed_.begin(), failed_.end());
  failed_.clear();
  std::lock_guard<std::mutex> lock(mutex_);
  for (size_t i = before; i < completions->size(); ++i) {
    Completion& completion = (*completions)[i];
    under_way_.erase(completion.tag);
    auto broken = breaking_.find({Index(completion.direction), completion.tag});
    if (broken == breaking_.end()) continue;
    completion.error = std::strerror(broken->second.first);
    completion.bytes = broken->second.second;
    breaking_.erase(broken);
  }
  if (most_turns_ > 0) {
    std::shuffle(completions->begin() + static_cast<std::ptrdiff_t>(before), completions->end(), random_);
  }
}

void FaultyLink::FailNth(Transfer::Direction direction, uint64_t n, int error) {
  std::lock_guard<std::mutex> lock(mutex_);
  fail_at_[Index(direction)] = count_[Index(direction)] + n;
  error_[Index(direction)] = error;
}

void FaultyLink::FailNthOfBoth(uint64_t n, int error) {
  std::lock_guard<std::mutex> lock(mutex_);
  fail_at_[2] = count_[0] + count_[1] + n;
  error_[2] = error;
}

void FaultyLink::FailSometimes(double probability, int error) {
  std::lock_guard<std::mutex> lock(mutex_);
  probability_ = probability;
  sometimes_ = error;
}

void FaultyLink::Delay(uint32_t most_turns) {
  std::lock_guard<std::mutex> lock(mutex_);
  most_turns_ = most_turns;
}

void FaultyLink::Hold(Transfer::Direction direction) {
  std::lock_guard<std::mutex> lock(mutex_);
  hold_[Index(direction)] = true;
}

void FaultyLink::Release(Transfer::Direction direction) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    hold_[Index(direction)] = false;
  }
  inner_->Wake();
}

bool FaultyLink::WaitHeld(Transfer::Direction direction, size_t count, double deadline_seconds) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, std::chrono::duration<double>(deadline_seconds), [&] {
    return static_cast<size_t>(std::count_if(held_.begin(), held_.end(), [&](const Held& held) {
             return held.transfer.direction == direction;
           })) >= count;
  });
}

uint64_t FaultyLink::submitted(Transfer::Direction direction) {
  std::lock_guard<std::mutex> lock(mutex_);
  return count_[Index(direction)];
}

bool FaultyLink::overlapped() {
  std::lock_guard<std::mutex> lock(mutex_);
  return overlapped_;
}

uint64_t FaultyLink::submitted() {
  std::lock_guard<std::mutex> lock(mutex_);
  return count_[0] + count_[1];
}

}  // namespace misa::testing
