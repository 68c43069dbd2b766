#include "client/core/executor.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "client/core/fault_door.h"
#include "runtime/memory/byte_size.h"

namespace misa {
namespace {

using std::chrono::duration;

// A waiting thread looks again at least this often, so that a lost wake-up costs time, never the run.
constexpr double kLookSeconds = 0.5;
// And this soon where another thread's doings of this moment are all that is in the way.
constexpr double kRetrySeconds = 0.001;
// Spare chunks are given back to the system in parts of at least this size: a call costs more than a page.
constexpr uint64_t kLeastRelease = 4ull << 20;
// A load ahead leaves this part of the budget (at most kLeastRelease) to tensors that come in between.
constexpr uint64_t kAheadMargin = 64;
constexpr size_t kTransfersInFlight = 2;
// Room for their pointers is reserved once: uses look facets up without the lock while others are still added.
constexpr size_t kMostFacets = 1 << 18;
// After a failed unload, for how long the same facet is left alone.
constexpr auto kUnloadPause = std::chrono::seconds(1);
// For how long what a raw pointer was used on leaves after everything else: two facets that one piece of code uses in turn
// must not push each other out at every access.
constexpr auto kRawPause = std::chrono::milliseconds(50);

// What this thread's present position holds: uses within it need no lock.
struct ThreadPosition {
  const Executor* executor = nullptr;
  uint64_t count = 0;
  std::vector<policy::Use> uses;
};
thread_local ThreadPosition thread_position;

bool Within(const std::vector<policy::Use>& position, const policy::Use* uses, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    bool found = false;
    for (const policy::Use& use : position) {
      if (use.facet == uses[i].facet && (use.access & uses[i].access) == uses[i].access) {
        found = true;
        break;
      }
    }
    if (!found) return false;
  }
  return true;
}

// What a use does with the addresses.
Access Needed(const policy::Use& use) {
  return use.access & (policy::kWrite | policy::kCreate) ? Access::kWrite : Access::kRead;
}

std::string CannotAllow(const Facet& facet) {
  return "The system has no room to change what may be done with the memory of " + facet.name + " (" +
         std::strerror(errno) + "); vm.max_map_count may be too low. Nothing was lost.";
}

bool SameFacets(const std::vector<policy::Use>& position, const policy::Use* uses, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (std::none_of(position.begin(), position.end(),
                     [&](const policy::Use& use) { return use.facet == uses[i].facet; })) {
      return false;
    }
  }
  return true;
}

}  // namespace

Executor::Executor(std::unique_ptr<ChunkSpace> space, std::unique_ptr<Link> link, DeviceMeter* meter,
                   FacetOwner* owner, ExecutorOptions options)
    : space_(std::move(space)),
      link_(std::move(link)),
      meter_(meter),
      owner_(owner),
      options_(options),
      step_start_(Clock::now()),
      rate_mark_(Clock::now()) {
  facets_.reserve(kMostFacets);
  mover_ = std::thread([this] { MoveLoop(); });
}

Executor::~Executor() {
  {
    Lock lock(mutex_);
    stopping_ = true;
  }
  link_->Wake();
  mover_.join();
  uint64_t held = space_->spare_bytes();
  for (auto& facet : facets_) {
    for (const Extent& extent : facet->extents) held += extent.bytes;
    FreeAside(facet.get());
    if (facet->surrendered) continue;
    RemoveFaultRange(facet->fault_range);
    ChunkSpace::FreeAddress(facet->address, facet->bytes);
  }
  meter_->SubtractPool(held);
}

Facet* Executor::AddFacet(uint32_t module, FacetKind kind, uint64_t bytes, uint64_t disk_offset, std::string name,
                          std::string* error) {
  bytes = space_->RoundUp(bytes);
  void* address = ChunkSpace::ReserveAddress(bytes);
  if (address == nullptr) {
    *error = "No address space is left for " + name + " (" + FormatByteSize(bytes) + "): nothing was changed.";
    return nullptr;
  }
  auto facet = std::make_unique<Facet>();
  facet->module = module;
  facet->kind = kind;
  facet->bytes = bytes;
  facet->address = static_cast<char*>(address);
  facet->disk_offset = disk_offset;
  facet->name = std::move(name);
  Lock lock(mutex_);
  if (facets_.size() == kMostFacets) {
    ChunkSpace::FreeAddress(address, bytes);
    *error = "A session manages at most " + std::to_string(kMostFacets) + " facets; " + facet->name +
             " is one too many: nothing was changed.";
    return nullptr;
  }
  facet->id = static_cast<uint32_t>(facets_.size());
  facet->fault_range = AddFaultRange(facet->address, facet->bytes, facet.get());
  facets_.push_back(std::move(facet));
  return facets_.back().get();
}

void Executor::Describe(Facet* facet, uint32_t module, std::string name) {
  Lock lock(mutex_);
  facet->module = module;
  facet->name = std::move(name);
}

// ---------------------------------------------------------------------------------------------------------- uses

std::string Executor::Use(const policy::Use* uses, size_t count, bool position) {
  bool present = true;
  for (size_t i = 0; i < count; ++i) {
    Facet& f = *facets_[uses[i].facet];
    // Pinned first, looked at second; an unload does it the other way round, so one of the two sees the other.
    f.pins.fetch_add(1, std::memory_order_seq_cst);
    if (f.state.load(std::memory_order_seq_cst) != FacetState::kDevice || f.access.load() < Needed(uses[i])) {
      present = false;
    }
  }
  const bool same = !position || (thread_position.executor == this &&
                                  thread_position.count == position_count_.load(std::memory_order_relaxed) &&
                                  Within(thread_position.uses, uses, count));
  std::string error;
  std::unique_ptr<StepSummary> summary;
  if (!present || !same) {
    Lock lock(mutex_);
    if (!same) BeginPosition(lock, uses, count);
    summary = std::move(finished_step_);
    for (size_t i = 0; i < count && error.empty(); ++i) {
      Facet* f = facets_[uses[i].facet].get();
      f->last_use = position_count_.load(std::memory_order_relaxed);
      if (f->state.load() != FacetState::kAway) continue;
      f->error.clear();  // of a prefetch that nobody waited for
      Enqueue(f, /*front=*/true);
    }
    for (size_t i = 0; i < count && error.empty(); ++i) {
      Facet* f = facets_[uses[i].facet].get();
      error = EnsurePresent(lock, f, (uses[i].access & policy::kCreate) != 0);
      if (error.empty() && !Allow(f, Needed(uses[i]))) error = CannotAllow(*f);
    }
    if (error.empty() && !same) RunActions(lock);
    if (!error.empty()) {
      // Nobody waits for the rest of the group any more. Another thread that does asks for it anew.
      for (size_t i = 0; i < count; ++i) Dequeue(facets_[uses[i].facet].get());
      moved_.notify_all();
    }
  }
  if (error.empty()) {
    for (size_t i = 0; i < count; ++i) {
      if (uses[i].access & (policy::kWrite | policy::kCreate)) {
        facets_[uses[i].facet]->dirty.store(true, std::memory_order_release);
      }
    }
  } else {
    EndUse(uses, count);
  }
  if (summary && on_step) on_step(std::move(*summary));
  return error;
}

void Executor::EndUse(const policy::Use* uses, size_t count) {
  for (size_t i = 0; i < count; ++i) facets_[uses[i].facet]->pins.fetch_sub(1, std::memory_order_seq_cst);
}

bool Executor::Allow(Facet* facet, Access access, bool exactly) {
  const Access now = facet->access.load();
  if (now == access || (now > access && !exactly)) return true;
  if (!ChunkSpace::Protect(facet->address, facet->bytes, access)) return false;
  facet->access.store(access, std::memory_order_seq_cst);
  return true;
}

std::string Executor::Reach(Facet* facet) {
  facet->raw.store(true, std::memory_order_relaxed);
  facet->pins.fetch_add(1, std::memory_order_seq_cst);
  std::string error;
  {
    Lock lock(mutex_);
    if (facet->surrendered) {
      facet->pins.fetch_sub(1, std::memory_order_seq_cst);
      return "";
    }
    const FacetState state = facet->state.load();
    const bool there = state == FacetState::kDevice || state == FacetState::kReady || state == FacetState::kUnloading;
    // What could be read has faulted because it was to be written.
    const bool write = there && facet->access.load() != Access::kNone;
    if (state == FacetState::kAway) {
      facet->error.clear();  // of a prefetch that nobody waited for
      Enqueue(facet, /*front=*/true);
    }
    error = EnsurePresent(lock, facet, /*create=*/false);
    if (error.empty() && !Allow(facet, write ? Access::kWrite : Access::kRead)) error = CannotAllow(*facet);
    if (error.empty() && write) facet->dirty.store(true, std::memory_order_release);
    if (!error.empty()) {
      Dequeue(facet);
      moved_.notify_all();
    }
    facet->last_use = position_count_.load(std::memory_order_relaxed);
    facet->raw_until = Clock::now() + kRawPause;
  }
  facet->pins.fetch_sub(1, std::memory_order_seq_cst);
  return error;
}

void Executor::Veil(Facet* facet, bool on) {
  Lock lock(mutex_);
  facet->veiled.store(on);
  if (!on) return;
  const FacetState state = facet->state.load();
  if (state != FacetState::kDevice && state != FacetState::kReady && state != FacetState::kUnloading) return;
  // A copy that reads at these very addresses cannot go on without them; the veil falls when it is done.
  if (facet->writing && facet->aside == nullptr) return;
  Allow(facet, Access::kNone, /*exactly=*/true);
}

void Executor::BeginPosition(Lock& lock, const policy::Use* uses, size_t count) {
  if (!boundary_ && thread_position.executor == this &&
      thread_position.count == position_count_.load(std::memory_order_relaxed) &&
      SameFacets(thread_position.uses, uses, count)) {
    // The same facets, more access: still the same position.
    for (size_t i = 0; i < count; ++i) {
      follower_.AddAccess(uses[i].facet, uses[i].access);
      for (policy::Use& use : thread_position.uses) {
        if (use.facet == uses[i].facet) use.access |= uses[i].access;
      }
    }
    return;
  }
  FinishStepIfDue(lock);
  const auto now = Clock::now();
  const double seconds = duration<double>(now - position_start_).count() - (counters_.stall_seconds - stall_at_position_);
  position_start_ = now;
  stall_at_position_ = counters_.stall_seconds;
  follower_.Begin(uses, count, std::max(0.0, seconds), meter_->TakeOtherWindowPeak());
  counters_.departures = follower_.departures();
  thread_position.executor = this;
  thread_position.count = position_count_.fetch_add(1, std::memory_order_relaxed) + 1;
  thread_position.uses.assign(uses, uses + count);
  if (!options_.demand_only) RunActions(lock);
  if (options_.stress) UnloadUnused();
  // A load may have waited for other tensors to go, of which nobody tells the mover.
  if (!load_queue_.empty() && loads_in_flight_ < kTransfersInFlight && HasRoomFor(*load_queue_.front())) link_->Wake();
}

void Executor::RunActions(Lock& lock) {
  due_.clear();
  follower_.TakeDue(&due_);
  Perform(due_);
}

void Executor::Perform(const std::vector<policy::Action>& actions) {
  if (options_.stress || options_.demand_only) return;
  bool loads = false;
  for (const policy::Action& action : actions) {
    if (action.facet >= facets_.size()) continue;
    Facet* f = facets_[action.facet].get();
    const FacetState state = f->state.load();
    if (action.kind == policy::Action::kUnload) {
      if (state == FacetState::kDevice || state == FacetState::kReady) StartUnload(f);
    } else if (state == FacetState::kAway) {
      Enqueue(f, /*front=*/false);
      loads = true;
    } else if (state == FacetState::kUnloading) {
      // It is wanted again before it has gone.
      CancelUnload(f);
    }
  }
  if (loads) link_->Wake();
}

void Executor::Enqueue(Facet* facet, bool front) {
  if (front) {
    facet->demanded = true;
    if (facet->queued) load_queue_.erase(std::find(load_queue_.begin(), load_queue_.end(), facet));
    // Behind the other demanded ones, before all that is merely expected.
    auto at = load_queue_.begin();
    while (at != load_queue_.end() && (*at)->demanded) ++at;
    load_queue_.insert(at, facet);
    facet->queued = true;
    link_->Wake();
  } else if (!facet->queued) {
    load_queue_.push_back(facet);
    facet->queued = true;
  }
}

void Executor::Dequeue(Facet* facet) {
  facet->demanded = false;
  if (!facet->queued) return;
  load_queue_.erase(std::find(load_queue_.begin(), load_queue_.end(), facet));
  facet->queued = false;
}

void Executor::StopWaitingToUnload(Facet* facet) {
  unload_queue_.erase(std::remove(unload_queue_.begin(), unload_queue_.end(), facet), unload_queue_.end());
}

void Executor::AttachLocked(Facet* facet) {
  owner_->Attach(*facet);
  facet->state.store(FacetState::kDevice, std::memory_order_seq_cst);
}

void Executor::CancelUnload(Facet* facet) {
  StopWaitingToUnload(facet);
  // Blocks that are under way go on; what they write is valid as long as nobody writes to the facet, see StartUnload.
  facet->state.store(FacetState::kReady, std::memory_order_seq_cst);
}

std::string Executor::EnsurePresent(Lock& lock, Facet* facet, bool create) {
  const auto start = Clock::now();
  bool stalled = false;
  std::string error;
  auto last = start;
  uint64_t seen = progress_;
  while (error.empty()) {
    const FacetState state = facet->state.load();
    if (state == FacetState::kDevice) break;
    if (state == FacetState::kReady) {
      if (facet->prefetched && !stalled) ++counters_.prefetch_hits;
      facet->prefetched = false;
      AttachLocked(facet);
      break;
    }
    if (state == FacetState::kUnloading) {
      if (options_.stress) {  // it goes all the way and comes back, so that every touch shows the disk's bytes
        if (!WaitProgress(lock, &last, &seen, kLookSeconds)) error = Stuck(*facet);
        continue;
      }
      CancelUnload(facet);
      continue;
    }
    if (state == FacetState::kEmpty) {
      if (!create) {
        error = facet->name + " has no content: it was used before it was made. This is a fault in misa; nothing was "
                "written.";
        break;
      }
      if (facet->discard_after_io) {  // what is dead has to leave first
        if (!WaitProgress(lock, &last, &seen, kLookSeconds)) error = Stuck(*facet);
        continue;
      }
      error = TakeRoom(lock, facet);
      if (error.empty()) {
        facet->dirty.store(true, std::memory_order_release);
        AttachLocked(facet);
      }
      break;
    }
    stalled = true;
    double look_seconds = kLookSeconds;
    if (state == FacetState::kAway) {
      if (!facet->error.empty()) {
        error = std::move(facet->error);
        facet->error.clear();
        break;
      }
      if (!facet->queued || !facet->demanded) Enqueue(facet, /*front=*/true);
      // The first in the queue is the one that waits for room; this one's turn comes after it.
      if (!HasRoomFor(*load_queue_.front())) {
        if (EvictOne(lock)) continue;
        if (loads_in_flight_ + unloads_in_flight_ == 0 && unload_queue_.empty()) {
          uint64_t smallest = 0;
          error = TooSmall(facet, facet->bytes, facet->name, &smallest);
          if (!error.empty()) {
            if (!AskForMore(lock, smallest)) break;
            error.clear();
            continue;
          }
          look_seconds = kRetrySeconds;
        }
      }
    }
    if (!WaitProgress(lock, &last, &seen, look_seconds)) error = Stuck(*facet);
  }
  facet->demanded = false;
  if (stalled) counters_.stall_seconds += duration<double>(Clock::now() - start).count();
  return error;
}

bool Executor::WaitProgress(Lock& lock, Clock::time_point* last, uint64_t* seen, double look_seconds) {
  moved_.wait_for(lock, duration<double>(look_seconds));
  const auto now = Clock::now();
  if (progress_ != *seen) {
    *seen = progress_;
    *last = now;
  }
  return duration<double>(now - *last).count() < options_.wait_seconds;
}

std::string Executor::Stuck(const Facet& facet) const {
  return "No byte has moved for " + std::to_string(static_cast<int>(options_.wait_seconds)) + " s while " + facet.name +
         " was waited for: " + options_.below + " does not answer. Its content is safe where it was; the training cannot go on.";
}

bool Executor::AskForMore(Lock& lock, uint64_t smallest) {
  if (!on_need || smallest == 0) return false;
  lock.unlock();
  const bool grown = on_need(smallest);
  lock.lock();
  return grown;
}

std::string Executor::TooSmall(const Facet* facet, uint64_t needed, const std::string& what, uint64_t* smallest_out) const {
  *smallest_out = 0;
  uint64_t present = 0;  // pinned and there
  uint64_t pinned = 0;   // pinned, there or not: the whole of each group that is used now
  uint64_t failing = 0;
  for (const auto& f : facets_) {
    const FacetState state = f->state.load();
    const bool there = state != FacetState::kEmpty && state != FacetState::kAway;
    if (f->pins.load() > 0) {
      pinned += f->bytes;
      if (there) present += f->bytes;
    } else if (there && f->dirty.load()) {
      failing += f->bytes;
    }
  }
  if (failing > 0 && !last_unload_error_.empty()) {
    return "There is no room for " + what + " (" + FormatByteSize(needed) + "): " + last_unload_error_ +
           " Everything is still in memory; nothing was lost, but the training cannot go on.";
  }
  if (facet != nullptr && pinned > space_->bytes()) {
    return "The session's leased memory of " + FormatByteSize(space_->bytes()) + " is too small for " + what + " (" +
           FormatByteSize(needed) + "): the operator that runs now needs " + FormatByteSize(pinned) +
           " of managed memory at once. The smallest budget that works here is " +
           std::to_string(pinned + meter_->other_bytes()) + " bytes (" +
           FormatByteSize(pinned + meter_->other_bytes()) + "). Nothing was lost.";
  }
  const uint64_t smallest = pinned + meter_->other_bytes() + (facet == nullptr ? needed : 0);
  // Another thread unpinned something meanwhile, or its refused allocation was counted for a moment.
  if (smallest <= meter_->budget_bytes()) return "";
  *smallest_out = smallest;
  return "The budget of " + FormatByteSize(meter_->budget_bytes()) + " is too small for " + what + " (" +
         FormatByteSize(needed) + "): the operator that runs now holds " + FormatByteSize(present) + " of " +
         FormatByteSize(pinned) + " of managed memory that it needs, and other tensors take " +
         FormatByteSize(meter_->other_bytes()) + ". The smallest budget that works here is " +
         std::to_string(smallest) + " bytes (" + FormatByteSize(smallest) + "). Nothing was lost.";
}

bool Executor::HasRoomFor(const Facet& facet) const {
  const uint64_t spare = space_->spare_bytes();
  if (spare >= facet.bytes) return true;
  if (spare + space_->empty_bytes() < facet.bytes) return false;
  return meter_->total_bytes() - meter_->kept_bytes() + (facet.bytes - spare) <= meter_->budget_bytes();
}

// Takes chunks for a facet, whose state no other thread changes meanwhile. The budget's part is counted here.
bool Executor::TryTake(Facet* facet, std::vector<Extent>* empty) {
  const uint64_t spare = space_->spare_bytes();
  const uint64_t fresh = facet->bytes > spare ? facet->bytes - spare : 0;
  if (fresh > space_->empty_bytes()) return false;
  if (fresh > 0 && !meter_->TryAddPool(fresh)) return false;
  facet->extents.clear();
  return space_->Take(facet->bytes, &facet->extents, empty);
}

std::string Executor::MapExtents(Facet* facet, char* address, const std::vector<Extent>& empty) {
  std::string error = space_->Back(empty);
  if (error.empty()) error = space_->Map(address, facet->extents);
  return error;
}

std::string Executor::MapAside(Facet* facet, const std::vector<Extent>& empty) {
  facet->aside = static_cast<char*>(ChunkSpace::ReserveAddress(facet->bytes));
  if (facet->aside == nullptr) return "No address space is left.";
  std::string error = MapExtents(facet, facet->aside, empty);
  if (!error.empty()) FreeAside(facet);
  return error;
}

void Executor::FreeAside(Facet* facet) {
  if (facet->aside != nullptr) ChunkSpace::FreeAddress(std::exchange(facet->aside, nullptr), facet->bytes);
}

std::string Executor::PutInPlace(Facet* facet) {
  const Access access = facet->veiled.load() ? Access::kNone : Access::kRead;
  if (!ChunkSpace::Protect(facet->aside, facet->bytes, access)) {
    const std::string error = CannotAllow(*facet);
    FreeAside(facet);
    return error;
  }
  facet->access.store(access);
  std::string error = ChunkSpace::Move(std::exchange(facet->aside, nullptr), facet->address, facet->extents);
  if (!error.empty()) facet->access.store(Access::kNone);
  return error;
}

// Before the copy to the disk begins: from here on a write is noticed. False where it cannot be.
bool Executor::PrepareUnload(Facet* facet) {
  // What must not be seen by raw pointers meanwhile, or may have to be hidden from some before the copy is done, is
  // copied from other addresses.
  if (facet->access.load() == Access::kNone || facet->raw.load()) {
    if (!MapAside(facet, {}).empty()) return false;
  }
  if (facet->access.load() == Access::kWrite && !Allow(facet, Access::kRead, /*exactly=*/true)) {
    FreeAside(facet);
    return false;
  }
  return true;
}

void Executor::UndoTake(Facet* facet, const std::vector<Extent>& empty) {
  uint64_t fresh = 0;
  for (const Extent& extent : empty) fresh += extent.bytes;
  space_->Release(empty);
  space_->GiveEmpty(empty);
  std::vector<Extent> spare;
  for (const Extent& extent : facet->extents) {
    if (std::none_of(empty.begin(), empty.end(), [&](const Extent& e) { return e.offset == extent.offset; })) {
      spare.push_back(extent);
    }
  }
  space_->Give(spare);
  facet->extents.clear();
  meter_->SubtractPool(fresh);
}

std::string Executor::TakeRoom(Lock& lock, Facet* facet) {
  auto last = Clock::now();
  const auto start = last;
  uint64_t seen = progress_;
  std::vector<Extent> empty;
  bool waited = false;
  ++room_waiters_;
  std::string error;
  while (!TryTake(facet, &empty)) {
    if (EvictOne(lock)) continue;
    double look_seconds = kLookSeconds;
    if (loads_in_flight_ + unloads_in_flight_ == 0 && unload_queue_.empty()) {
      uint64_t smallest = 0;
      error = TooSmall(facet, facet->bytes, facet->name, &smallest);
      if (!error.empty()) {
        if (!AskForMore(lock, smallest)) break;
        error.clear();
        waited = true;
        continue;
      }
      look_seconds = kRetrySeconds;
    }
    waited = true;
    if (!WaitProgress(lock, &last, &seen, look_seconds)) {
      error = Stuck(*facet);
      break;
    }
  }
  --room_waiters_;
  if (waited) counters_.stall_seconds += duration<double>(Clock::now() - start).count();
  if (!error.empty()) return error;
  error = MapExtents(facet, facet->address, empty);
  if (!error.empty()) {
    UndoTake(facet, empty);
  } else {
    facet->access.store(Access::kWrite);
  }
  return error;
}

std::string Executor::Create(Facet* facet) {
  const policy::Use use{facet->id, static_cast<uint8_t>(policy::kCreate | policy::kWrite)};
  return Use(&use, 1, /*position=*/true);
}

void Executor::FreeExtents(Facet* facet) {
  facet->access.store(Access::kNone);
  ChunkSpace::Unmap(facet->address, facet->bytes);
  space_->Give(facet->extents);
  facet->extents.clear();
}

std::string Executor::Surrender(Facet* facet, const std::vector<Extent>& parts) {
  void* fresh = ChunkSpace::MakeMemory(facet->bytes);
  if (fresh == nullptr) {
    return "The system has no memory for " + facet->name + " (" + FormatByteSize(facet->bytes) +
           ") outside the pool. It stays managed; nothing was lost.";
  }
  Lock lock(mutex_);
  // Who writes meanwhile waits for this lock, and writes to the new memory then.
  bool possible = Allow(facet, Access::kRead, /*exactly=*/true);
  if (possible) {
    for (const Extent& part : parts) {
      std::memcpy(static_cast<char*>(fresh) + part.offset, facet->address + part.offset, part.bytes);
    }
    possible = ChunkSpace::Replace(facet->address, fresh, facet->bytes);
  }
  if (!possible) {
    const std::string error = CannotAllow(*facet);
    ChunkSpace::FreeAddress(fresh, facet->bytes);
    return error;
  }
  RemoveFaultRange(facet->fault_range);
  facet->surrendered = true;
  facet->access.store(Access::kWrite);
  facet->dirty.store(false);
  facet->orphan_write = facet->writing;
  StopWaitingToUnload(facet);
  space_->Give(facet->extents);
  facet->extents.clear();
  facet->state.store(FacetState::kEmpty);
  ++progress_;
  moved_.notify_all();
  return "";
}

void Executor::Discard(Facet* facet) {
  Lock lock(mutex_);
  follower_.MarkDiscard(facet->id);
  const FacetState state = facet->state.load();
  StopWaitingToUnload(facet);
  Dequeue(facet);
  facet->error.clear();
  facet->dirty.store(false);
  facet->prefetched = false;
  if (state == FacetState::kLoading) {
    facet->discard_after_io = true;  // bytes still arrive in its pages
  } else if (state != FacetState::kEmpty && state != FacetState::kAway) {
    // An unload under way may go on reading: what it writes nobody will read.
    facet->orphan_write = facet->writing;
    FreeExtents(facet);
  }
  facet->state.store(FacetState::kEmpty);
  ++progress_;
  moved_.notify_all();
  link_->Wake();
}

// ------------------------------------------------------------------------------------------------------- eviction

void Executor::UnloadUnused() {
  for (auto& f : facets_) {
    const FacetState state = f->state.load();
    if (state == FacetState::kDevice || state == FacetState::kReady) StartUnload(f.get());
  }
}

void Executor::StartUnload(Facet* facet) {
  const FacetState before = facet->state.load();
  facet->state.store(FacetState::kUnloading, std::memory_order_seq_cst);
  if (facet->pins.load(std::memory_order_seq_cst) > 0) {
    facet->state.store(before, std::memory_order_seq_cst);
    return;
  }
  if (before == FacetState::kDevice) owner_->Detach(*facet);
  facet->prefetched = false;
  if (!facet->dirty.load(std::memory_order_acquire) && !facet->writing) {
    FreeExtents(facet);
    facet->state.store(FacetState::kAway, std::memory_order_seq_cst);
    ++counters_.drops;
    ++progress_;
    moved_.notify_all();
    link_->Wake();
    return;
  }
  unload_queue_.push_back(facet);
  link_->Wake();
}

Facet* Executor::PickVictim() {
  Facet* best = nullptr;
  uint64_t best_score = 0;
  Facet* raw = nullptr;  // of those that raw pointers were used on a moment ago, the one longest ago
  const uint64_t now = position_count_.load(std::memory_order_relaxed);
  const auto time = Clock::now();
  for (auto& f : facets_) {
    const FacetState state = f->state.load();
    if ((state != FacetState::kDevice && state != FacetState::kReady) || f->pins.load() > 0) continue;
    if (f->dirty.load() && f->unload_pause > time) continue;
    if (f->raw_until > time) {
      if (raw == nullptr || f->raw_until < raw->raw_until) raw = f.get();
      continue;
    }
    // With a trace the one used farthest in the future, else the one used longest ago.
    const uint64_t score = 1 + (follower_.knows_trace() && !options_.demand_only ? follower_.NextUse(f->id) : now - f->last_use);
    if (score > best_score) {
      best_score = score;
      best = f.get();
    }
  }
  return best != nullptr ? best : raw;
}

bool Executor::EvictOne(Lock& lock) {
  // Enough is on its way out already: wait for it instead.
  if (unloading_bytes_ > 0 && !unload_queue_.empty()) return false;
  Facet* victim = PickVictim();
  if (victim == nullptr) return false;
  StartUnload(victim);
  // A dirty one has left only when its bytes have; the caller waits then. One that was used that moment is looked over.
  return victim->state.load() != FacetState::kUnloading;
}

bool Executor::ReleaseSpare(Lock& lock, uint64_t bytes) {
  if (space_->spare_bytes() == 0) return false;
  const std::vector<Extent> extents = space_->TakeSpare(std::max(bytes, kLeastRelease));
  uint64_t released = 0;
  for (const Extent& extent : extents) released += extent.bytes;
  space_->Release(extents);
  space_->GiveEmpty(extents);
  meter_->SubtractPool(released);
  return released > 0;
}

std::string Executor::FitBudget() { return MakeRoom(0); }

void Executor::ResetTrace() {
  Lock lock(mutex_);
  follower_ = PlanFollower();
  counters_ = {};
  step_counters_ = {};
  boundary_ = false;
  step_start_ = position_start_ = Clock::now();
  stall_at_position_ = 0;
  thread_position = {};
}

std::string Executor::EnsureRoom(uint64_t bytes) {
  uint64_t added = 0;
  std::string error = AddOther(bytes, /*kept_serves=*/true, &added);
  if (error.empty()) meter_->SubtractOther(added);
  return error;
}

std::string Executor::MakeRoom(uint64_t bytes) {
  uint64_t added = 0;
  return AddOther(bytes, /*kept_serves=*/false, &added);
}

std::string Executor::AddOther(uint64_t bytes, bool kept_serves, uint64_t* added) {
  Lock lock(mutex_);
  auto last = Clock::now();
  const auto start = last;
  uint64_t seen = progress_;
  bool waited = false;
  std::string error;
  ++room_waiters_;
  while (true) {
    *added = kept_serves ? bytes - std::min(bytes, meter_->kept_bytes()) : bytes;
    if (meter_->TryAddOther(*added)) {
      // The addition itself may have taken freed blocks that were to serve.
      if (!kept_serves || *added + meter_->kept_bytes() >= bytes) break;
      meter_->SubtractOther(*added);
      continue;
    }
    const uint64_t total = meter_->total_bytes();
    const uint64_t budget = meter_->budget_bytes();
    const uint64_t missing = total + *added > budget ? total + *added - budget : 0;
    if (ReleaseSpare(lock, missing)) continue;
    if (EvictOne(lock)) continue;
    double look_seconds = kLookSeconds;
    if (loads_in_flight_ + unloads_in_flight_ == 0 && unload_queue_.empty()) {
      uint64_t smallest = 0;
      error = TooSmall(nullptr, bytes, "a tensor", &smallest);
      if (!error.empty()) {
        if (!AskForMore(lock, smallest)) break;
        error.clear();
        waited = true;
        continue;
      }
      look_seconds = kRetrySeconds;
    }
    waited = true;
    if (!WaitProgress(lock, &last, &seen, look_seconds)) {
      error = "No byte has moved for " + std::to_string(static_cast<int>(options_.wait_seconds)) +
              " s while room for a tensor of " + FormatByteSize(bytes) +
              " was waited for: " + options_.below + " does not answer. Managed data is safe where it was.";
      break;
    }
  }
  --room_waiters_;
  if (waited) counters_.stall_seconds += duration<double>(Clock::now() - start).count();
  link_->Wake();
  return error;
}

// ---------------------------------------------------------------------------------------------------------- moving

bool Executor::PopLoad(Lock& lock, Facet** out, std::vector<Extent>* empty) {
  while (!load_queue_.empty() && loads_in_flight_ < kTransfersInFlight) {
    Facet* f = load_queue_.front();
    if (f->state.load() != FacetState::kAway) {
      f->queued = false;
      load_queue_.pop_front();
      continue;
    }
    if (f->writing) return false;  // its last unload was cancelled by a discard: the blocks must land first
    // Who waits for room comes before what is merely expected.
    if (!f->demanded && room_waiters_ > 0) return false;
    if (!f->demanded) {
      const uint64_t spare = space_->spare_bytes();
      const uint64_t fresh = f->bytes > spare ? f->bytes - spare : 0;
      const uint64_t margin = std::min(kLeastRelease, meter_->budget_bytes() / kAheadMargin);
      if (fresh > 0 && meter_->total_bytes() - meter_->kept_bytes() + fresh + margin > meter_->budget_bytes()) return false;
    }
    if (!TryTake(f, empty)) return false;
    f->queued = false;
    load_queue_.pop_front();
    f->state.store(FacetState::kLoading);
    f->prefetched = !f->demanded;
    if (f->demanded) {
      ++counters_.loads_demand;
      counters_.loaded_bytes_demand += f->bytes;
    } else {
      ++counters_.loads_prefetch;
      counters_.loaded_bytes_prefetch += f->bytes;
    }
    *out = f;
    return true;
  }
  return false;
}

void Executor::MoveLoop() {
  pthread_setname_np(pthread_self(), "misa-mover");
  std::vector<Completion> completions;
  auto last = Clock::now();
  uint64_t seen = 0;
  for (;;) {
    {
      Lock lock(mutex_);
      if (stopping_) {
        if (loads_in_flight_ + unloads_in_flight_ == 0) return;
        // A link that does not answer must not keep the process from ending.
        if (progress_ != seen) {
          seen = progress_;
          last = Clock::now();
        }
        if (duration<double>(Clock::now() - last).count() >= options_.wait_seconds) return;
      } else {
        last = Clock::now();
      }
      // Unloads first: they make room.
      for (size_t i = 0; !stopping_ && i < unload_queue_.size() && unloads_in_flight_ < kTransfersInFlight;) {
        Facet* f = unload_queue_[i];
        if (f->writing) {
          ++i;
          continue;
        }
        unload_queue_.erase(unload_queue_.begin() + static_cast<std::ptrdiff_t>(i));
        if (!PrepareUnload(f)) {
          FailUnload(f, "there is no room for another mapping of it");
          continue;
        }
        // Cleared now: whoever writes from here on sets it again, and the copy does not count then.
        f->dirty.store(false, std::memory_order_release);
        f->writing = true;
        MarkRate();
        ++unloads_in_flight_;
        unloading_bytes_ += f->bytes;
        link_->Submit({Transfer::Direction::kUnload, f->aside != nullptr ? f->aside : f->address, f->disk_offset, f->bytes,
                       f->id});
      }
      for (;;) {
        if (stopping_) break;
        Facet* f = nullptr;
        std::vector<Extent> empty;
        if (!PopLoad(lock, &f, &empty)) break;
        MarkRate();
        ++loads_in_flight_;
        lock.unlock();
        const std::string error = MapAside(f, empty);
        lock.lock();
        if (!error.empty()) {
          MarkRate();
          --loads_in_flight_;
          UndoTake(f, empty);
          f->error = "Loading " + f->name + " failed: " + error + " Its content is safe on " + options_.below + ".";
          f->state.store(f->discard_after_io ? FacetState::kEmpty : FacetState::kAway);
          f->discard_after_io = false;
          ++progress_;
          moved_.notify_all();
          break;
        }
        link_->Submit({Transfer::Direction::kLoad, f->aside, f->disk_offset, f->bytes, f->id});
      }
    }
    completions.clear();
    link_->Wait(kLookSeconds, &completions);
    if (completions.empty()) continue;
    for (Completion& completion : completions) {
      if (completion.direction != Transfer::Direction::kLoad) continue;
      Facet* f = facets_[completion.tag].get();
      if (completion.error.empty()) {
        completion.error = PutInPlace(f);
      } else {
        FreeAside(f);
      }
    }
    Lock lock(mutex_);
    for (const Completion& completion : completions) OnCompletion(completion);
    ++progress_;
    moved_.notify_all();
  }
}

void Executor::OnCompletion(const Completion& completion) {
  Facet* f = facets_[completion.tag].get();
  MarkRate();
  const int mode = RateMode() == 3 ? 1 : 0;
  if (completion.direction == Transfer::Direction::kLoad) {
    --loads_in_flight_;
    rate_.load_bytes[mode] += static_cast<double>(completion.bytes);
    if (f->discard_after_io) {
      f->discard_after_io = false;
      FreeExtents(f);
    } else if (completion.error.empty()) {
      if (f->veiled.load()) Allow(f, Access::kNone, /*exactly=*/true);  // since a moment ago
      f->state.store(FacetState::kReady, std::memory_order_seq_cst);
    } else {
      FreeExtents(f);
      f->error = "Loading " + f->name + " from " + options_.below + " failed (" + completion.error + "). The copy on " + options_.below +
                 " was not changed; the step in progress cannot go on without it.";
      problem_ = f->error;
      f->state.store(FacetState::kAway, std::memory_order_seq_cst);
    }
  } else {
    --unloads_in_flight_;
    unloading_bytes_ -= f->bytes;
    rate_.unload_bytes[mode] += static_cast<double>(completion.bytes);
    f->writing = false;
    FreeAside(f);
    // What it wrote died meanwhile; the facet may have new content already, which it says nothing about.
    if (std::exchange(f->orphan_write, false)) return;
    const FacetState state = f->state.load();
    if (f->veiled.load() && (state == FacetState::kDevice || state == FacetState::kReady)) {
      Allow(f, Access::kNone, /*exactly=*/true);  // what Veil left for this moment
    }
    if (!completion.error.empty()) {
      if (state == FacetState::kUnloading || state == FacetState::kDevice || state == FacetState::kReady) {
        f->dirty.store(true, std::memory_order_release);
        FailUnload(f, completion.error);
      }
      return;
    }
    ++counters_.unloads;
    counters_.unloaded_bytes += completion.bytes;
    if (state == FacetState::kUnloading) {
      if (f->dirty.load(std::memory_order_acquire)) return;  // wanted, written and sent away again meanwhile: queued anew
      StopWaitingToUnload(f);
      FreeExtents(f);
      f->state.store(FacetState::kAway, std::memory_order_seq_cst);
    }
  }
}

void Executor::FailUnload(Facet* f, const std::string& why) {
  f->unload_pause = Clock::now() + kUnloadPause;
  last_unload_error_ = "unloading " + f->name + " to " + options_.below + " failed (" + why + ").";
  problem_ = "Unloading " + f->name + " to " + options_.below + " failed (" + why +
             "). It stays in memory with its content; nothing was lost. It is tried again.";
  StopWaitingToUnload(f);
  if (f->state.load() == FacetState::kUnloading) f->state.store(FacetState::kReady, std::memory_order_seq_cst);
}

int Executor::RateMode() const { return (loads_in_flight_ > 0 ? 1 : 0) | (unloads_in_flight_ > 0 ? 2 : 0); }

// Called before the numbers in flight change: books the time since the last change.
void Executor::MarkRate() {
  const auto now = Clock::now();
  const int mode = RateMode();
  if (mode != 0) rate_.seconds[mode - 1] += duration<double>(now - rate_mark_).count();
  rate_mark_ = now;
}

policy::LinkRates Executor::Measured() const {
  if (const policy::LinkRates known = link_->known_rates(); known.load > 0) return known;
  // Rates from little data would only be noise: 0 says "not measured".
  constexpr double kLeastSeconds = 0.2;
  policy::LinkRates rates;
  if (rate_.seconds[0] > kLeastSeconds) rates.load = rate_.load_bytes[0] / rate_.seconds[0];
  if (rate_.seconds[1] > kLeastSeconds) rates.unload = rate_.unload_bytes[0] / rate_.seconds[1];
  if (rate_.seconds[2] > kLeastSeconds) {
    rates.duplex_load = rate_.load_bytes[1] / rate_.seconds[2];
    rates.duplex_unload = rate_.unload_bytes[1] / rate_.seconds[2];
  }
  return rates;
}

// ------------------------------------------------------------------------------------------------ steps and plans

void Executor::EndStep() {
  Lock lock(mutex_);
  boundary_ = true;
  boundary_time_ = Clock::now();
  // No thread's present position reaches into the next step, even where it begins with the same facets.
  position_count_.fetch_add(1, std::memory_order_relaxed);
}

void Executor::FinishStepIfDue(Lock& lock) {
  if (!boundary_) return;
  boundary_ = false;
  due_.clear();
  follower_.TakeRest(&due_);
  Perform(due_);
  auto summary = std::make_unique<StepSummary>();
  summary->step = ++step_;
  summary->step_seconds = duration<double>(boundary_time_ - step_start_).count();
  step_start_ = boundary_time_;
  const double seconds =
      duration<double>(boundary_time_ - position_start_).count() - (counters_.stall_seconds - stall_at_position_);
  position_start_ = Clock::now();
  stall_at_position_ = counters_.stall_seconds;
  summary->trace = follower_.EndStep(std::max(0.0, seconds), meter_->TakeOtherWindowPeak());
  summary->trace_digest = follower_.digest();
  summary->plan_version = follower_.version();
  summary->device_peak_bytes = meter_->TakeWindowPeak();
  ExecutorCounters& c = summary->counters;
  const ExecutorCounters& s = step_counters_;
  c.loads_demand = counters_.loads_demand - s.loads_demand;
  c.loads_prefetch = counters_.loads_prefetch - s.loads_prefetch;
  c.loaded_bytes_demand = counters_.loaded_bytes_demand - s.loaded_bytes_demand;
  c.loaded_bytes_prefetch = counters_.loaded_bytes_prefetch - s.loaded_bytes_prefetch;
  c.prefetch_hits = counters_.prefetch_hits - s.prefetch_hits;
  c.unloads = counters_.unloads - s.unloads;
  c.unloaded_bytes = counters_.unloaded_bytes - s.unloaded_bytes;
  c.drops = counters_.drops - s.drops;
  c.departures = counters_.departures - s.departures;
  c.stall_seconds = counters_.stall_seconds - s.stall_seconds;
  step_counters_ = counters_;
  summary->measured = Measured();
  finished_step_ = std::move(summary);
}

std::string Executor::OfferPlan(std::shared_ptr<const policy::Plan> plan, uint64_t version, uint64_t trace_digest) {
  Lock lock(mutex_);
  for (const policy::Action& action : plan->actions) {
    if (action.facet >= facets_.size()) return "The plan names a facet that this trainer does not have.";
  }
  return follower_.Offer(std::move(plan), version, trace_digest);
}

void Executor::SetSection(uint32_t key, std::shared_ptr<const policy::Trace> trace,
                          std::shared_ptr<const policy::Plan> plan) {
  Lock lock(mutex_);
  follower_.SetSection(key, std::move(trace), std::move(plan));
}

void Executor::UnloadAll() {
  Lock lock(mutex_);
  UnloadUnused();
}

bool Executor::Drain() {
  Lock lock(mutex_);
  auto last = Clock::now();
  uint64_t seen = progress_;
  while (loads_in_flight_ + unloads_in_flight_ > 0 || !unload_queue_.empty()) {
    if (!WaitProgress(lock, &last, &seen, kLookSeconds)) return false;
  }
  return true;
}

ExecutorCounters Executor::totals() {
  Lock lock(mutex_);
  return counters_;
}

std::vector<FacetState> Executor::States() {
  Lock lock(mutex_);
  std::vector<FacetState> states;
  states.reserve(facets_.size());
  for (const auto& f : facets_) states.push_back(f->state.load());
  return states;
}

std::string Executor::TakeProblem() {
  Lock lock(mutex_);
  return std::exchange(problem_, "");
}

}  // namespace misa
