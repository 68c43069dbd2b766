// Links for tests: a tier below that is memory, and a wrapper that breaks, delays and reorders what it carries.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "runtime/device/link.h"

namespace misa::testing {

using Disk = std::vector<char>;

// Copies the first half of a transfer when it is submitted and the second when its completion is fetched: what is
// changed in between is torn, as it is with a real disk.
class MemoryLink final : public Link {
 public:
  explicit MemoryLink(std::shared_ptr<Disk> disk) : disk_(std::move(disk)) {}
  void Submit(const Transfer& transfer) override;
  void Wait(double timeout_seconds, std::vector<Completion>* completions) override;
  void Wake() override;
  size_t in_flight() const override { return queue_.size(); }

 private:
  int Copy(const Transfer& transfer, uint64_t from, uint64_t to);

  const std::shared_ptr<Disk> disk_;
  std::deque<std::pair<Transfer, int>> queue_;  // with the errno so far
  std::mutex mutex_;
  std::condition_variable wake_;
  bool woken_ = false;
};

// Submit, Wait and in_flight belong to the thread that uses the link; everything else may be called from any thread.
class FaultyLink final : public Link {
 public:
  FaultyLink(std::unique_ptr<Link> inner, uint64_t seed) : inner_(std::move(inner)), random_(seed) {}

  void Submit(const Transfer& transfer) override;
  void Wait(double timeout_seconds, std::vector<Completion>* completions) override;
  void Wake() override { inner_->Wake(); }
  size_t in_flight() const override { return inner_->in_flight() + held_.size() + failed_.size(); }

  // The nth transfer from now on (1: the next one) fails with this errno, after half of its bytes have moved.
  void FailNth(Transfer::Direction direction, uint64_t n, int error);
  void FailNthOfBoth(uint64_t n, int error);
  // Each transfer fails with this probability; 0 ends it.
  void FailSometimes(double probability, int error);
  // Each transfer waits for a random number of turns up to this, and completions come in random order.
  void Delay(uint32_t most_turns);

  // Nothing of this direction starts until Release.
  void Hold(Transfer::Direction direction);
  void Release(Transfer::Direction direction);
  // False where so many were not held within the deadline.
  bool WaitHeld(Transfer::Direction direction, size_t count, double deadline_seconds = 20);

  uint64_t submitted(Transfer::Direction direction);
  uint64_t submitted();
  // Two transfers of one facet were under way at once: nobody could say what arrives last.
  bool overlapped();

 private:
  struct Held {
    Transfer transfer;
    uint32_t turns = 0;
  };
  static size_t Index(Transfer::Direction direction) { return direction == Transfer::Direction::kLoad ? 0 : 1; }
  using Key = std::pair<size_t, uint64_t>;

  const std::unique_ptr<Link> inner_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  std::deque<Held> held_;
  std::map<Key, std::pair<int, uint64_t>> breaking_;  // -> errno, true bytes
  std::vector<Completion> failed_;
  bool hold_[2] = {false, false};
  uint64_t count_[2] = {0, 0};
  std::set<uint64_t> under_way_;  // tags
  bool overlapped_ = false;
  uint64_t fail_at_[3] = {0, 0, 0};  // of loads, of unloads, of both
  int error_[3] = {0, 0, 0};
  double probability_ = 0;
  int sometimes_ = 0;
  uint32_t most_turns_ = 0;
};

}  // namespace misa::testing
