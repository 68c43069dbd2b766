// An executor over a real memfd, with a tier below in memory, a link that can break and an owner that checks.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "client/core/executor.h"
#include "tests/unit/client/core/memory_link.h"

namespace misa::testing {

constexpr auto kLoad = Transfer::Direction::kLoad;
constexpr auto kUnload = Transfer::Direction::kUnload;

// Ends the process with a sentence where a test hangs: a wait without an end is a failure like any other.
class Watchdog {
 public:
  explicit Watchdog(double seconds);
  ~Watchdog();

 private:
  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopped_ = false;
  std::thread thread_;
};

// Stands in for the tensors' side. Remembers what is attached and what was done that must not be.
class CheckingOwner final : public FacetOwner {
 public:
  void Attach(Facet& facet) override;
  void Detach(Facet& facet) override;

  // Between these two the test touches the memory: a detach then is a breach.
  void BeginTouch(uint32_t facet);
  void EndTouch(uint32_t facet);
  // Its content died: nothing is attached any more, and nobody was asked.
  void Forget(uint32_t facet);
  bool attached(uint32_t facet);
  std::string breach();

 private:
  std::mutex mutex_;
  std::set<uint32_t> attached_;
  std::vector<int> touching_;
  std::string breach_;
};

struct RigOptions {
  uint64_t chunk_bytes = 4096;
  uint64_t space_bytes = 256 * 4096;
  uint64_t disk_bytes = 1024 * 4096;
  uint64_t budget_bytes = DeviceMeter::kUnlimited;
  uint64_t seed = 1;
  ExecutorOptions executor = {};
};

class Rig {
 public:
  explicit Rig(RigOptions options = {});
  // Checks that the pool is given back whole and that nothing was done to what was in use.
  ~Rig();

  // A facet of so many chunks, its disk room behind the previous one's.
  uint32_t Add(uint64_t chunks, FacetKind kind = FacetKind::kWeights);
  Facet& facet(uint32_t id) { return *executor->facet(id); }
  FacetState state(uint32_t id) { return facet(id).state.load(); }

  // Uses one facet, writes a pattern over all of it and ends the use. The sentence where the use failed.
  std::string Write(uint32_t id, uint64_t pattern, uint8_t access = policy::kRead | policy::kWrite);
  std::string Create(uint32_t id, uint64_t pattern) { return Write(id, pattern, policy::kCreate | policy::kWrite); }
  // Uses one facet for reading and compares. "" where it holds the pattern, else what was wrong.
  std::string Check(uint32_t id, uint64_t pattern);
  void Discard(uint32_t id);
  // The facet's addresses can be read: asked of the kernel, not tried.
  bool Readable(uint32_t id);
  // A facet's content is this pattern; only while it is in use.
  void Fill(uint32_t id, uint64_t pattern);
  bool Holds(uint32_t id, uint64_t pattern);

  // One step that reads these facets one after the other; the next use begins the next step.
  void Step(const std::vector<uint32_t>& reads);
  // Offers a plan for the trace of the last whole step. Needs a Step (and a use after it) before.
  std::string Offer(std::vector<policy::Action> actions, uint64_t version = 1);
  // Unloads all that is not in use and waits for it.
  void SendAway();
  // Polls until the condition holds; false at the deadline.
  static bool Until(const std::function<bool()>& condition, double deadline_seconds = 20);

  std::shared_ptr<Disk> disk;
  DeviceMeter meter;
  CheckingOwner owner;
  FaultyLink* link = nullptr;  // the executor's own
  int memfd = -1;              // the executor's own
  std::unique_ptr<Executor> executor;
  std::vector<StepSummary> steps;

 private:
  std::mutex steps_mutex_;
  Watchdog watchdog_;
  uint64_t disk_used_ = 0;
};

}  // namespace misa::testing
