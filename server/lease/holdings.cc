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
    if (found == holdings_.end()) return {Code::kInternal, "the lease holds nothing that memory below could be added to"};
    holding = found->second;
  }
  const auto fail = [](const device::TierOutcome& outcome) {
    return Error{outcome.kind == device::TierOutcome::kFull ? Code::kExhausted : Code::kInternal, outcome.sentence};
  };
  std::unique_ptr<device::TierFile> created;
  device::TierFile* file = holding->file.get();
  if (file == nullptr) {
    const device::TierOutcome outcome = below_->Create(&created);
    if (!outcome.ok()) return fail(outcome);
    file = created.get();
  }
  const device::TierOutcome outcome = file->Reserve(effect.bytes);
  if (!outcome.ok()) return fail(outcome);
  if (created == nullptr) return {};
  std::string problem = send_(
      effect.lease,
      nlohmann::json{{"type", below_->name()}, {"bytes", effect.bytes}, {"block_bytes", below_->block_bytes()}}.dump(), file->fd());
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
  std::string problem = holding->chunks.Scrub();
  if (holding->file != nullptr && problem.empty()) problem = holding->file->Scrub();
  return problem;
}

}  // namespace misa::server
