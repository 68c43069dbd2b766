// Sharing the device: whose budget becomes what, and who waits for whom.
#include <algorithm>
#include <utility>
#include <vector>

#include "server/core/core.h"

namespace misa::server {
namespace {

// Kept free of elastic budgets: what comes anew starts in it while the others still shrink.
constexpr uint64_t kWatermarkDivisor = 10;
// What a step needs at once differs a little from step to step.
constexpr uint64_t kDriftDivisor = 16;
// Memory that comes free piecemeal is handed on in parts of at least this share of a budget: every change costs a plan.
constexpr uint64_t kLeastGrowthDivisor = 8;

}  // namespace

uint64_t Core::LeastOf(const v1::AttachRequest& request) const {
  return request.has_elastic() ? std::max(request.elastic().least_bytes(), options_.chunk_bytes)
                               : request.budget_bytes();
}

uint64_t Core::MostOf(const v1::AttachRequest& request) const {
  if (!request.has_elastic()) return request.budget_bytes();
  const uint64_t most = request.elastic().most_bytes();
  return most == 0 ? device_.capacity_bytes() : std::min(most, device_.capacity_bytes());
}

uint64_t Core::Floor(const Session& session) const {
  if (!session.elastic) return session.budget_bytes;
  uint64_t least = std::max({session.least_bytes, session.asked_bytes, options_.chunk_bytes});
  if (session.smallest_bytes > 0) {
    least = std::max(least, session.smallest_bytes + session.smallest_bytes / kDriftDivisor);
  }
  return std::min(least, session.most_bytes);
}

uint64_t Core::Attainable() const {
  uint64_t bytes = device_.free_bytes() + device_.reclaiming_bytes();
  for (const auto& [lease, session] : sessions_) {
    if (session.state == Session::State::kReleasing || session.state == Session::State::kConnected) continue;
    if (!session.end_cause.empty()) {
      bytes += session.leased_bytes;
    } else {
      bytes += session.leased_bytes - std::min(session.leased_bytes, std::min(session.budget_bytes, Floor(session)));
    }
  }
  return bytes;
}

std::string Core::ChangeBudget(Session* session, uint64_t budget_bytes, const std::string& cause) {
  if (budget_bytes == session->budget_bytes) return "";
  const bool grows = budget_bytes > session->leased_bytes;
  if (grows) {
    std::string refusal = device_.Lease(budget_bytes - session->leased_bytes);
    if (!refusal.empty()) return refusal;
    session->leased_bytes = budget_bytes;
  }
  session->budget_bytes = budget_bytes;
  ++session->budget_serial;
  freed_ = true;
  Emit("budget_changed", session->name, cause, budget_bytes);
  if (grows) {
    // A daemon that is killed right after must have left word of it before the trainer uses it.
    session->announce_serial = JournalSessions(/*answer=*/true);
  } else if (session->announce_serial == 0) {  // else with the journal that is on its way
    Announce(session);
  }
  return "";
}

void Core::Announce(Session* session) {
  session->announce_serial = 0;
  if (session->stream != 0) {
    v1::TrainResponse notice;
    notice.mutable_budget()->set_budget_bytes(session->budget_bytes);
    notice.mutable_budget()->set_serial(session->budget_serial);
    Do(SendTrain{session->stream, std::move(notice)});
  }
  if (session->has_trace) WantPlan(session);
}

void Core::On(const JournalWritten& event) {
  for (auto& [lease, session] : sessions_) {
    if (session.announce_serial == 0 || session.announce_serial > event.serial) continue;
    if (session.attached()) {
      Announce(&session);
    } else {
      session.announce_serial = 0;
    }
  }
}

void Core::Balance() {
  // What one of them does may be news to the others; each makes progress or clears its mark, so this ends.
  for (int round = 0; round < 4 && (arbitrate_ || freed_); ++round) {
    if (std::exchange(arbitrate_, false)) Arbitrate();
    if (std::exchange(freed_, false)) {
      // First of all who would not get through its step, then who waits to begin, then who would only be faster.
      Grow(/*only_starved=*/true);
      ServeWaiting();
      Grow(/*only_starved=*/false);
    }
  }
}

void Core::Arbitrate() {
  std::vector<policy::Claim> claims;
  std::vector<Session*> claimants;
  uint64_t taken = device_.capacity_bytes() / kWatermarkDivisor + device_.orphaned_bytes();
  uint64_t least = 0;
  for (auto& [lease, session] : sessions_) {
    const bool holds = session.state == Session::State::kAttaching || session.state == Session::State::kAttached;
    if (!holds || !session.end_cause.empty()) continue;
    if (!session.elastic) {
      taken += session.budget_bytes;
      continue;
    }
    claims.push_back({session.weight, Floor(session), session.most_bytes, session.budget_bytes, session.influence});
    claimants.push_back(&session);
    least += claims.back().least_bytes;
  }
  // Those who wait count as if they were there, as far as that is possible.
  std::vector<Waiting*> comers;
  const uint64_t watermark = device_.capacity_bytes() / kWatermarkDivisor;
  for (Waiting& waiting : waiting_) {
    const v1::AttachRequest& request = waiting.attach.request;
    const uint64_t needed = LeastOf(request);
    if (taken - watermark + needed + least > device_.capacity_bytes()) continue;
    if (!request.has_elastic()) {
      taken += needed;
      continue;
    }
    claims.push_back({request.weight() > 0 ? request.weight() : 1, needed, MostOf(request), 0, {}});
    comers.push_back(&waiting);
    least += needed;
  }
  if (claims.empty()) return;
  // Nobody goes below its least, even where fixed budgets leave less than that.
  const uint64_t available = std::max(least, device_.capacity_bytes() - std::min(device_.capacity_bytes(), taken));
  policy::ArbiterOptions options;
  options.granule_bytes = options_.chunk_bytes;
  const policy::Result<std::vector<uint64_t>> split = policy::Arbitrate(claims, available, options);
  if (!split.ok()) {
    Do(LogLine{Level::kError, "the budgets could not be shared out: " + split.error});
    return;
  }
  for (size_t i = 0; i < claimants.size(); ++i) {
    Session* session = claimants[i];
    session->target_bytes = split.value[i];
    if (session->target_bytes < session->budget_bytes)
      ChangeBudget(session, session->target_bytes, "shared with others");
    if (session->target_bytes > session->budget_bytes) freed_ = true;
  }
  for (size_t i = 0; i < comers.size(); ++i) comers[i]->target_bytes = split.value[claimants.size() + i];
}

// First come, first served; one that still does not fit holds back those behind it, or a large one would starve.
void Core::ServeWaiting() {
  while (!waiting_.empty()) {
    const Waiting& waiting = waiting_.front();
    const auto by_token = by_token_.find(waiting.attach.token);
    if (by_token == by_token_.end()) {
      Fail(waiting.attach.call, {Code::kUnauthenticated, "the lease ended while its Attach waited for memory"});
    } else if (!TryAttach(&sessions_.at(by_token->second), waiting)) {
      return;
    }
    waiting_.pop_front();
    arbitrate_ = true;
  }
}

// Brings budgets up to what the arbiter decided, as memory comes free.
void Core::Grow(bool only_starved) {
  const uint64_t watermark = device_.capacity_bytes() / kWatermarkDivisor;
  for (auto& [lease, session] : sessions_) {
    if (!session.elastic || !session.attached() || session.target_bytes <= session.budget_bytes) continue;
    // The watermark is for those who come, and for one that would not work otherwise.
    const bool starved = session.budget_bytes < Floor(session);
    if (!starved && (only_starved || !waiting_.empty())) continue;  // what is free is for who waits
    const uint64_t kept = starved ? 0 : watermark;
    const uint64_t spare = device_.free_bytes() - std::min(device_.free_bytes(), kept);
    uint64_t budget = std::min(session.target_bytes, session.leased_bytes + spare);
    if (budget < session.target_bytes)
      budget = std::max(session.budget_bytes, budget / options_.chunk_bytes * options_.chunk_bytes);
    const uint64_t worth = starved ? 1 : session.budget_bytes / kLeastGrowthDivisor;
    if (budget < session.target_bytes && budget < session.budget_bytes + worth) continue;
    const std::string refusal = ChangeBudget(&session, budget, "shared with others");
    if (!refusal.empty()) Do(LogLine{Level::kError, refusal});
  }
}

}  // namespace misa::server
