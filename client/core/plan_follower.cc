#include "client/core/plan_follower.h"

#include <algorithm>
#include <utility>

namespace misa {
namespace {

// How far ahead a use that is not the expected one is looked for, before it counts as a departure.
constexpr uint32_t kResyncWindow = 96;

}  // namespace

uint64_t PlanFollower::GroupHash(const policy::Use* uses, size_t count) {
  // Order within a group has no meaning, so the hash is a sum.
  uint64_t hash = count;
  for (size_t i = 0; i < count; ++i) {
    uint64_t x = uses[i].facet + 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    hash += x ^ (x >> 31);
  }
  return hash;
}

void PlanFollower::Begin(const policy::Use* uses, size_t count, double compute_seconds, uint64_t other_bytes) {
  if (!recording_.entries.empty() && !cut_off_) {
    recording_.entries.back().compute_seconds = compute_seconds;
    recording_.entries.back().other_bytes = other_bytes;
  }
  if (recording_.entries.size() < kMostPositions) {
    recording_.entries.push_back({{uses, uses + count}, 0, 0});
  } else {
    cut_off_ = true;
  }
  if (!expected_) return;
  const uint64_t hash = GroupHash(uses, count);
  const auto size = static_cast<uint32_t>(expected_groups_.size());
  const uint32_t from = begun_ ? cursor_ + 1 : 0;
  const uint32_t to = std::min<uint64_t>(size, static_cast<uint64_t>(from) + kResyncWindow);
  for (uint32_t i = from; i < to; ++i) {
    if (expected_groups_[i] == hash) {
      if (i != from) ++departures_;
      cursor_ = i;
      begun_ = true;
      return;
    }
  }
  ++departures_;
}

void PlanFollower::AddAccess(uint32_t facet, uint8_t access) {
  if (recording_.entries.empty() || cut_off_) return;
  for (policy::Use& use : recording_.entries.back().uses) {
    if (use.facet == facet) use.access |= access;
  }
}

void PlanFollower::MarkDiscard(uint32_t facet) {
  for (auto entry = recording_.entries.rbegin(); entry != recording_.entries.rend(); ++entry) {
    for (policy::Use& use : entry->uses) {
      if (use.facet != facet) continue;
      use.access |= policy::kDiscard;
      return;
    }
  }
}

std::shared_ptr<const policy::Trace> PlanFollower::EndStep(double compute_seconds, uint64_t other_bytes) {
  if (!recording_.entries.empty()) {
    recording_.entries.back().compute_seconds = compute_seconds;
    recording_.entries.back().other_bytes = other_bytes;
  }
  const auto last = std::make_shared<const policy::Trace>(std::move(recording_));
  recording_ = {};
  if (!std::exchange(cut_off_, false)) {
    recording_.entries.reserve(last->entries.size() + 8);
    const uint64_t digest = policy::Digest(*last);
    previous_digest_ = expected_ ? expected_digest_ : digest;
    if (digest != expected_digest_ || !expected_) {
      InstallExpected(last);
      expected_digest_ = digest;
    }
  }
  begun_ = false;
  cursor_ = 0;
  next_action_ = 0;
  if (offered_) {
    plan_ = std::move(offered_);
    offered_ = nullptr;
    version_ = offered_version_;
  }
  return last;
}

void PlanFollower::InstallExpected(std::shared_ptr<const policy::Trace> trace) {
  expected_ = std::move(trace);
  expected_groups_.clear();
  positions_.clear();
  for (uint32_t i = 0; i < expected_->entries.size(); ++i) {
    const auto& uses = expected_->entries[i].uses;
    expected_groups_.push_back(GroupHash(uses.data(), uses.size()));
    for (const policy::Use& use : uses) positions_[use.facet].push_back(i);
  }
}

std::string PlanFollower::Offer(std::shared_ptr<const policy::Plan> plan, uint64_t version, uint64_t trace_digest) {
  if (!expected_ || (trace_digest != expected_digest_ && trace_digest != previous_digest_)) {
    return "The plan is for another trace than the last steps had; the old plan stays.";
  }
  offered_ = std::move(plan);
  offered_version_ = version;
  return "";
}

void PlanFollower::TakeDue(std::vector<policy::Action>* actions) {
  if (!plan_ || !begun_) return;
  while (next_action_ < plan_->actions.size()) {
    const policy::Action& action = plan_->actions[next_action_];
    const bool due = action.kind == policy::Action::kLoad ? action.position <= cursor_ : action.position < cursor_;
    if (!due) break;
    actions->push_back(action);
    ++next_action_;
  }
}

void PlanFollower::TakeRest(std::vector<policy::Action>* actions) {
  if (!plan_ || !begun_) return;
  for (; next_action_ < plan_->actions.size(); ++next_action_) actions->push_back(plan_->actions[next_action_]);
}

uint32_t PlanFollower::NextUse(uint32_t facet) const {
  if (!expected_) return UINT32_MAX;
  auto it = positions_.find(facet);
  if (it == positions_.end()) return UINT32_MAX;
  const uint32_t now = begun_ ? cursor_ + 1 : 0;
  auto next = std::lower_bound(it->second.begin(), it->second.end(), now);
  if (next != it->second.end()) return *next - now;
  return it->second.front() + static_cast<uint32_t>(expected_groups_.size()) - now;
}

}  // namespace misa
