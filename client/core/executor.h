// Executes plans: decides at every use what is loaded, what leaves, and makes sure that what is used is there.
//
// Facets have this life (invariant 2: every arrow is all or nothing, a failure goes back):
//
//   kEmpty --create--> kDevice --unload--> kUnloading --copied--> kAway --load--> kLoading --copied--> kReady
//      ^                 |  ^                  |                                     |                   |
//      +----discard------+  +------used--------+              kAway <----failure-----+   kDevice <--used-+
//
// kReady and kDevice both have their bytes on the device; kDevice is also attached, that is, its owner knows.
// Attaching and detaching happens on the threads that compute, never on the one that moves bytes.
//
// Whoever holds a raw pointer needs no use: the addresses show nothing but whole and present content. A load arrives at
// other addresses and is put into place when it is complete; content that has not changed since its load is read-only, and
// so is content on its way out, so that no write goes unnoticed (an access that is not possible comes to Reach, see
// fault_door.h).
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "client/core/meter.h"
#include "client/core/plan_follower.h"
#include "runtime/device/chunk_space.h"
#include "runtime/device/link.h"
#include "runtime/policy/planner.h"
#include "runtime/policy/trace.h"

namespace misa {

enum class FacetState : uint8_t { kEmpty, kAway, kLoading, kReady, kDevice, kUnloading };
enum class FacetKind : uint8_t { kWeights = 1, kGradients = 2, kOptimizer = 3 };

struct Facet {
  uint32_t id = 0;
  uint32_t module = 0;
  FacetKind kind = FacetKind::kWeights;
  uint64_t bytes = 0;         // rounded up to chunks
  char* address = nullptr;    // reserved for ever
  uint64_t disk_offset = 0;
  std::string name;           // "blocks.3.attention.query weights", for sentences

  std::atomic<FacetState> state{FacetState::kEmpty};
  // Operators that use it now; above 0 it stays where it is.
  std::atomic<int32_t> pins{0};
  // The content differs from the copy on the disk.
  std::atomic<bool> dirty{false};
  // What the addresses allow now.
  std::atomic<Access> access{Access::kNone};
  // Somebody may hold raw pointers into it.
  std::atomic<bool> raw{false};
  // The content is not what it has to be for who looks (an optimizer step is due): raw pointers come to Reach first.
  std::atomic<bool> veiled{false};

  // Guarded by the executor's lock:
  std::vector<Extent> extents;
  char* aside = nullptr;        // other addresses of the extents, where a copy under way reads or writes
  size_t fault_range = 0;
  bool surrendered = false;     // its addresses are ordinary memory now, and somebody else's
  bool queued = false;          // in the load queue
  bool demanded = false;        // a thread waits for it
  bool prefetched = false;      // present because of a plan, not used since
  bool discard_after_io = false;
  bool writing = false;         // an unload's blocks may still be in flight
  bool orphan_write = false;    // and what they write is dead
  uint64_t last_use = 0;        // count of positions, for eviction without a trace
  std::string error;            // why the last load failed
  std::chrono::steady_clock::time_point unload_pause{};  // after a failed unload, not before then again
  std::chrono::steady_clock::time_point raw_until{};     // a raw pointer was used a moment ago: others leave first
};

// What the tensors' side does when a facet's bytes come and go. Called with the executor's lock held; must not call back.
class FacetOwner {
 public:
  virtual ~FacetOwner() = default;
  virtual void Attach(Facet& facet) = 0;
  virtual void Detach(Facet& facet) = 0;
};

// Counters of one step and of the whole run.
struct ExecutorCounters {
  uint64_t loads_demand = 0, loads_prefetch = 0, loaded_bytes_demand = 0, loaded_bytes_prefetch = 0;
  uint64_t prefetch_hits = 0, unloads = 0, unloaded_bytes = 0, drops = 0, departures = 0;
  double stall_seconds = 0;
};

struct StepSummary {
  uint64_t step = 0;
  double step_seconds = 0;
  uint64_t device_peak_bytes = 0;  // in this step
  uint64_t plan_version = 0;
  ExecutorCounters counters;
  std::shared_ptr<const policy::Trace> trace;
  uint64_t trace_digest = 0;
  policy::LinkRates measured;
};

struct ExecutorOptions {
  // Unloads everything that is not in use after every position: shows every mistake there is about presence.
  bool stress = false;
  // The yardstick: every load is on demand, and what was used longest ago leaves. No plan and no trace is looked at.
  bool demand_only = false;
  // Without any byte moving for so long, a wait ends with a sentence.
  double wait_seconds = 120;
  // The tier below, for sentences.
  std::string below = "the disk";
};

class Executor {
 public:
  Executor(std::unique_ptr<ChunkSpace> space, std::unique_ptr<Link> link, DeviceMeter* meter, FacetOwner* owner,
           ExecutorOptions options);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // A facet without content. Address space is reserved here; nullptr and *error where there is none left.
  Facet* AddFacet(uint32_t module, FacetKind kind, uint64_t bytes, uint64_t disk_offset, std::string name,
                  std::string* error);
  // The facet belongs to this module from now on, and sentences call it so.
  void Describe(Facet* facet, uint32_t module, std::string name);
  Facet* facet(uint32_t id) { return facets_[id].get(); }
  size_t facet_count() const { return facets_.size(); }
  ChunkSpace& space() { return *space_; }

  // --- Uses ---
  // Makes every facet of the group present and attached, and pins it. On failure nothing is pinned and a sentence comes
  // back. Within one thread a group whose facets the present position already has, is the same position.
  // With `position` false the trace and the plan are not touched (nested uses of something larger).
  std::string Use(const policy::Use* uses, size_t count, bool position);
  void EndUse(const policy::Use* uses, size_t count);

  // For raw pointers: makes the facet present, and one that is present already writable. A sentence where it cannot be.
  std::string Reach(Facet* facet);
  // Raw pointers into the facet may exist from now on, taken in a way that was seen.
  void MarkRaw(Facet* facet) { facet->raw.store(true, std::memory_order_relaxed); }
  // With `on`, raw pointers show nothing until a use or Reach after the next call without.
  void Veil(Facet* facet, bool on);

  // Gives an empty facet room on the device (attached by the caller's next Attach), pinned; counts as a position.
  std::string Create(Facet* facet);
  // The end: the facet's addresses become ordinary memory with the content of these parts of it, so that nothing that points
  // there notices. The memory is the caller's, who has counted it and holds the facet in use. A sentence on failure; nothing
  // has changed then.
  std::string Surrender(Facet* facet, const std::vector<Extent>& parts);
  // The content is dead. Any thread.
  void Discard(Facet* facet);

  // Frees room for `bytes` of other tensors and counts them; a sentence where there is none to be had.
  std::string MakeRoom(uint64_t bytes);
  // Frees room for `bytes` of tensors that are made next, without counting them; freed blocks that are kept serve, too.
  std::string EnsureRoom(uint64_t bytes);

  // --- Steps and plans ---
  // The boundary: the trace of the step ends with the next use.
  void EndStep();
  // Called at the boundary's end, on the thread of the use that began the next step, without the lock.
  std::function<void(StepSummary)> on_step;
  // Called without the lock where the budget is too small for what runs now, with the smallest that works: true where it
  // has grown to that. May wait.
  std::function<bool(uint64_t smallest_bytes)> on_need;
  // A sentence where the plan is not for this trace; the old one stays then. In force from the next boundary.
  std::string OfferPlan(std::shared_ptr<const policy::Plan> plan, uint64_t version, uint64_t trace_digest);

  // A period inside the steps and its plan (PlanFollower::SetSection).
  void SetSection(uint32_t key, std::shared_ptr<const policy::Trace> trace, std::shared_ptr<const policy::Plan> plan);

  // Evicts until the bytes on the device are under the meter's budget; a sentence where they cannot be.
  std::string FitBudget();
  // Forgets what was recorded so far: the next use begins the first step.
  void ResetTrace();

  // Unloads all that is not in use, as far as possible. For tests and for the end of management.
  void UnloadAll();
  // Waits until nothing is on its way out or in; false where that does not end.
  bool Drain();

  ExecutorCounters totals();
  // By facet id.
  std::vector<FacetState> States();
  // By how much the link's copies were later than its model says, in all.
  double link_late_seconds() const { return link_->late_seconds(); }
  uint64_t pool_backed_bytes() const { return meter_->pool_bytes(); }
  // A sentence about the last thing that went wrong without stopping the training; taken.
  std::string TakeProblem();

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Clock = std::chrono::steady_clock;

  void BeginPosition(Lock& lock, const policy::Use* uses, size_t count);
  std::string EnsurePresent(Lock& lock, Facet* facet, bool create);
  void AttachLocked(Facet* facet);
  // Lets the present facet's addresses allow this much; less only where `exactly`.
  bool Allow(Facet* facet, Access access, bool exactly = false);
  void RunActions(Lock& lock);
  void Perform(const std::vector<policy::Action>& actions);
  void FinishStepIfDue(Lock& lock);

  void StartUnload(Facet* facet);
  // Starts to unload everything that is present and not pinned.
  void UnloadUnused();
  void CancelUnload(Facet* facet);
  // Takes it out of the unload queue, where it is in it; blocks under way go on.
  void StopWaitingToUnload(Facet* facet);
  Facet* PickVictim();
  // Sends one facet away; true where its room is free at once.
  bool EvictOne(Lock& lock);
  bool ReleaseSpare(Lock& lock, uint64_t bytes);

  bool HasRoomFor(const Facet& facet) const;
  bool TryTake(Facet* facet, std::vector<Extent>* empty);
  std::string AddOther(uint64_t bytes, bool kept_serves, uint64_t* added);
  std::string MapExtents(Facet* facet, char* address, const std::vector<Extent>& empty);
  std::string MapAside(Facet* facet, const std::vector<Extent>& empty);
  void FreeAside(Facet* facet);
  // Puts a complete load into its place.
  std::string PutInPlace(Facet* facet);
  bool PrepareUnload(Facet* facet);
  void FailUnload(Facet* facet, const std::string& why);
  void UndoTake(Facet* facet, const std::vector<Extent>& empty);
  void FreeExtents(Facet* facet);
  std::string TakeRoom(Lock& lock, Facet* facet);

  // Waits for something to move, at most look_seconds. False where no byte has moved for options_.wait_seconds.
  bool WaitProgress(Lock& lock, Clock::time_point* last, uint64_t* seen, double look_seconds);
  std::string Stuck(const Facet& facet) const;
  // For a facet, or (null) for that many bytes of other tensors. Empty where the budget is not what is in the way.
  // With the smallest budget that works, or 0 where no budget helps.
  std::string TooSmall(const Facet* facet, uint64_t needed, const std::string& what, uint64_t* smallest) const;
  bool AskForMore(Lock& lock, uint64_t smallest);

  void Enqueue(Facet* facet, bool front);
  void Dequeue(Facet* facet);
  bool PopLoad(Lock& lock, Facet** out, std::vector<Extent>* empty);
  void MoveLoop();
  void OnCompletion(const Completion& completion);

  const std::unique_ptr<ChunkSpace> space_;
  const std::unique_ptr<Link> link_;
  DeviceMeter* const meter_;
  FacetOwner* const owner_;
  const ExecutorOptions options_;

  std::mutex mutex_;
  std::condition_variable moved_;  // something arrived, left or failed
  std::vector<std::unique_ptr<Facet>> facets_;
  std::deque<Facet*> load_queue_;
  std::deque<Facet*> unload_queue_;
  size_t loads_in_flight_ = 0;
  size_t unloads_in_flight_ = 0;
  uint64_t unloading_bytes_ = 0;
  uint64_t progress_ = 0;
  uint32_t room_waiters_ = 0;
  bool stopping_ = false;
  std::string last_unload_error_;

  PlanFollower follower_;
  std::vector<policy::Action> due_;
  std::atomic<uint64_t> position_count_{0};
  bool boundary_ = false;
  Clock::time_point boundary_time_;
  Clock::time_point step_start_;
  Clock::time_point position_start_ = Clock::now();
  double stall_at_position_ = 0;
  uint64_t step_ = 0;
  std::unique_ptr<StepSummary> finished_step_;
  ExecutorCounters counters_;       // whole run
  ExecutorCounters step_counters_;  // at the start of this step
  std::string problem_;

  // Measured link: bytes and seconds with one or both directions busy.
  struct RateMeter {
    double seconds[3] = {0, 0, 0};  // load alone, unload alone, both
    double load_bytes[2] = {0, 0};  // alone, both
    double unload_bytes[2] = {0, 0};
  };
  RateMeter rate_;
  Clock::time_point rate_mark_;
  int RateMode() const;  // bit 0: loads run, bit 1: unloads run
  void MarkRate();
  policy::LinkRates Measured() const;

  std::thread mover_;
};

}  // namespace misa
