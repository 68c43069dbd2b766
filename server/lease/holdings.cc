#include "server/lease/holdings.h"

#include <nlohmann/json.hpp>
#include <utility>

namespace misa::server {

Error Holdings::Create(const CreateChunks& effect) {
  auto holding = std::make_shared<Holding>();
  std::string problem = holding->chunks.Create(effect.session, effect.bytes);
  if (!problem.empty()) return {Code::kInternal, std::move(problem)};
  problem = send_(effect.lease,
                  nlohmann::json{{"type", "chunks"}, {"bytes", effect.bytes}, {"chunk_bytes", effect.chunk_bytes}}.dump(),
                  holding->chunks.fd());
  if (!problem.empty()) return {Code::kUnavailable, std::move(problem)};
  absl::MutexLock lock(&mutex_);
  holdings_[effect.lease] = std::move(holding);
  return {};
}

Error Holdings::Reserve(const ReserveDisk& effect) {
  std::shared_ptr<Holding> holding;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = holdings_.find(effect.lease);
    if (found == holdings_.end()) return {Code::kInternal, "the lease holds nothing that disk could be added to"};
    holding = found->second;
  }
  const auto fail = [](const device::DiskOutcome& outcome) {
    return Error{outcome.kind == device::DiskOutcome::kFull ? Code::kExhausted : Code::kInternal, outcome.sentence};
  };
  std::unique_ptr<device::DiskFile> created;
  device::DiskFile* file = holding->file.get();
  if (file == nullptr) {
    const device::DiskOutcome outcome = disk_->Create(&created);
    if (!outcome.ok()) return fail(outcome);
    file = created.get();
  }
  const device::DiskOutcome outcome = file->Reserve(effect.bytes);
  if (!outcome.ok()) return fail(outcome);
  if (created == nullptr) return {};
  std::string problem = send_(
      effect.lease,
      nlohmann::json{{"type", "disk"}, {"bytes", effect.bytes}, {"block_bytes", disk_->block_bytes()}}.dump(), file->fd());
  if (!problem.empty()) return {Code::kUnavailable, std::move(problem)};
  holding->file = std::move(created);
  return {};
}

std::string Holdings::Release(LeaseId lease) {
  std::shared_ptr<Holding> holding;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = holdings_.find(lease);
    if (found == holdings_.end()) return "";
    holding = std::move(found->second);
    holdings_.erase(found);
  }
  // Scrubbed before it is closed: a forked child of the trainer may hold the memfd open, and its pages with it.
  return holding->chunks.Scrub();
}

}  // namespace misa::server
