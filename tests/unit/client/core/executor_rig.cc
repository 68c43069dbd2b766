#include "tests/unit/client/core/executor_rig.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace misa::testing {

Watchdog::Watchdog(double seconds) {
  thread_ = std::thread([this, seconds] {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!stop_.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return stopped_; })) {
      std::fprintf(stderr, "The test did not end within %.0f s.\n", seconds);
      std::abort();
    }
  });
}

Watchdog::~Watchdog() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopped_ = true;
  }
  stop_.notify_all();
  thread_.join();
}

void CheckingOwner::Attach(Facet& facet) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!attached_.insert(facet.id).second) breach_ = facet.name + " was attached twice";
}

void CheckingOwner::Detach(Facet& facet) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (attached_.erase(facet.id) == 0) breach_ = facet.name + " was detached without having been attached";
  if (facet.id < touching_.size() && touching_[facet.id] > 0) breach_ = facet.name + " was detached while in use";
}

void CheckingOwner::BeginTouch(uint32_t facet) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (touching_.size() <= facet) touching_.resize(facet + 1, 0);
  ++touching_[facet];
  if (attached_.count(facet) == 0) breach_ = "a facet that is not attached was given to a user";
}

void CheckingOwner::EndTouch(uint32_t facet) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (attached_.count(facet) == 0) breach_ = "a facet was detached while in use";
  --touching_[facet];
}

void CheckingOwner::Forget(uint32_t facet) {
  std::lock_guard<std::mutex> lock(mutex_);
  attached_.erase(facet);
}

bool CheckingOwner::attached(uint32_t facet) {
  std::lock_guard<std::mutex> lock(mutex_);
  return attached_.count(facet) > 0;
}

std::string CheckingOwner::breach() {
  std::lock_guard<std::mutex> lock(mutex_);
  return breach_;
}

Rig::Rig(RigOptions options) : disk(std::make_shared<Disk>(options.disk_bytes)), watchdog_(100) {
  meter.SetBudget(options.budget_bytes);
  memfd = memfd_create("misa-test", MFD_CLOEXEC);
  EXPECT_GE(memfd, 0);
  EXPECT_EQ(ftruncate(memfd, static_cast<off_t>(options.space_bytes)), 0);
  auto faulty = std::make_unique<FaultyLink>(std::make_unique<MemoryLink>(disk), options.seed);
  link = faulty.get();
  executor = std::make_unique<Executor>(
      std::make_unique<ChunkSpace>(memfd, options.space_bytes, options.chunk_bytes), std::move(faulty), &meter, &owner,
      options.executor);
  executor->on_step = [this](StepSummary summary) {
    std::lock_guard<std::mutex> lock(steps_mutex_);
    steps.push_back(std::move(summary));
  };
}

Rig::~Rig() {
  EXPECT_FALSE(link->overlapped());
  executor.reset();
  EXPECT_EQ(meter.pool_bytes(), 0u);
  EXPECT_EQ(meter.total_bytes(), meter.other_bytes());
  EXPECT_EQ(owner.breach(), "");
}

uint32_t Rig::Add(uint64_t chunks, FacetKind kind) {
  const uint64_t bytes = chunks * executor->space().chunk_bytes();
  std::string error;
  const auto name = "facet" + std::to_string(executor->facet_count());
  const Facet* added = executor->AddFacet(0, kind, bytes, disk_used_, name, &error);
  EXPECT_NE(added, nullptr) << error;
  disk_used_ += bytes;
  EXPECT_LE(disk_used_, disk->size());
  return added->id;
}

void Rig::Fill(uint32_t id, uint64_t pattern) {
  auto* words = reinterpret_cast<uint64_t*>(facet(id).address);
  for (uint64_t i = 0; i < facet(id).bytes / 8; ++i) words[i] = pattern * 0x9e3779b97f4a7c15ull + i;
}

bool Rig::Holds(uint32_t id, uint64_t pattern) {
  const auto* words = reinterpret_cast<const uint64_t*>(facet(id).address);
  for (uint64_t i = 0; i < facet(id).bytes / 8; ++i) {
    if (words[i] != pattern * 0x9e3779b97f4a7c15ull + i) return false;
  }
  return true;
}

std::string Rig::Write(uint32_t id, uint64_t pattern, uint8_t access) {
  const policy::Use use{id, access};
  std::string error = executor->Use(&use, 1, true);
  if (!error.empty()) return error;
  owner.BeginTouch(id);
  Fill(id, pattern);
  owner.EndTouch(id);
  executor->EndUse(&use, 1);
  return "";
}

std::string Rig::Check(uint32_t id, uint64_t pattern) {
  const policy::Use use{id, policy::kRead};
  std::string error = executor->Use(&use, 1, true);
  if (!error.empty()) return error;
  owner.BeginTouch(id);
  if (!Holds(id, pattern)) error = facet(id).name + " holds other bytes than were written";
  owner.EndTouch(id);
  executor->EndUse(&use, 1);
  return error;
}

void Rig::Discard(uint32_t id) {
  executor->Discard(&facet(id));
  owner.Forget(id);
}

bool Rig::Readable(uint32_t id) {
  const Facet& f = facet(id);
  std::vector<char> bytes(f.bytes);
  const iovec local{bytes.data(), bytes.size()};
  const iovec remote{f.address, f.bytes};
  return process_vm_readv(getpid(), &local, 1, &remote, 1, 0) > 0;
}

void Rig::Step(const std::vector<uint32_t>& reads) {
  for (uint32_t id : reads) {
    const policy::Use use{id, policy::kRead};
    ASSERT_EQ(executor->Use(&use, 1, true), "");
    executor->EndUse(&use, 1);
  }
  executor->EndStep();
}

std::string Rig::Offer(std::vector<policy::Action> actions, uint64_t version) {
  auto plan = std::make_shared<policy::Plan>();
  plan->actions = std::move(actions);
  EXPECT_FALSE(steps.empty());
  return executor->OfferPlan(plan, version, steps.empty() ? 0 : steps.back().trace_digest);
}

void Rig::SendAway() {
  executor->UnloadAll();
  EXPECT_TRUE(executor->Drain());
}

bool Rig::Until(const std::function<bool()>& condition, double deadline_seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(deadline_seconds);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

}  // namespace misa::testing
