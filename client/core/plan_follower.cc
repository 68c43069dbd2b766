#include "client/core/plan_follower.h"

#include <algorithm>
#include <string>
#include <utility>

#include "runtime/policy/repair.h"

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
      if (i != from) {
        ++departures_;
        skipped_ = true;
      }
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
    previous_positions_ = static_cast<uint32_t>((expected_ ? expected_ : last)->entries.size());
    if (digest != expected_digest_ || !expected_) {
      InstallExpected(last);
      expected_digest_ = digest;
    }
  }
  begun_ = false;
  cursor_ = 0;
  skipped_ = false;
  NextPeriod();
  if (offered_) {
    plan_ = std::move(offered_);
    offered_ = nullptr;
    version_ = offered_version_;
    plan_positions_ = offered_positions_;
    period_ = 0;
    next_action_ = 0;
  }
  return last;
}

void PlanFollower::NextPeriod() {
  if (!plan_ || ++period_ >= plan_->periods) {
    period_ = 0;
    next_action_ = 0;
    return;
  }
  // What an ended step did not take is not made up for in the next one.
  while (next_action_ < plan_->actions.size() && plan_->actions[next_action_].position < period_ * plan_positions_) {
    ++next_action_;
  }
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
  const uint32_t positions =
      trace_digest == expected_digest_ ? static_cast<uint32_t>(expected_groups_.size()) : previous_positions_;
  const uint64_t cycle = uint64_t{plan->periods} * positions;
  for (const policy::Action& action : plan->actions) {
    if (action.position >= cycle) {
      return "The plan names position " + std::to_string(action.position) + ", and its cycle has " +
             std::to_string(cycle) + "; the old plan stays.";
    }
  }
  offered_ = std::move(plan);
  offered_version_ = version;
  offered_positions_ = positions;
  return "";
}

void PlanFollower::TakeDue(std::vector<policy::Action>* actions) {
  if (!plan_ || !begun_) return;
  // A trace of another length than the plan's, until a plan for it comes.
  const uint32_t position =
      period_ * plan_positions_ + (plan_positions_ > 0 ? std::min(cursor_, plan_positions_ - 1) : cursor_);
  size_t end = next_action_;
  while (end < plan_->actions.size()) {
    const policy::Action& action = plan_->actions[end];
    const bool due = action.kind == policy::Action::kLoad ? action.position <= position : action.position < position;
    if (!due) break;
    ++end;
  }
  TakeUpTo(end, position, std::exchange(skipped_, false), actions);
}

void PlanFollower::TakeRest(std::vector<policy::Action>* actions) {
  if (!plan_ || !begun_) return;
  const uint32_t next = (period_ + 1) * plan_positions_;
  size_t end = next_action_;
  while (end < plan_->actions.size() && plan_->actions[end].position < next) ++end;
  // A whole step leaves over only what its last position does.
  TakeUpTo(end, next, cursor_ + 1 < plan_positions_, actions);
}

void PlanFollower::TakeUpTo(size_t end, uint32_t position, bool skipped, std::vector<policy::Action>* actions) {
  if (skipped) {
    const auto next_use = [this](uint32_t facet, uint32_t from) -> uint64_t {
      const auto found = positions_.find(facet);
      if (found == positions_.end() || plan_positions_ == 0) return UINT64_MAX;
      const uint32_t period = from / plan_positions_;
      const auto next = std::lower_bound(found->second.begin(), found->second.end(), from % plan_positions_);
      return next != found->second.end() ? uint64_t{period} * plan_positions_ + *next
                                         : uint64_t{period + 1} * plan_positions_ + found->second.front();
    };
    const std::vector<policy::Action> left = policy::CatchUp(*plan_, next_action_, end, position, next_use);
    actions->insert(actions->end(), left.begin(), left.end());
  } else {
    actions->insert(actions->end(), plan_->actions.begin() + static_cast<std::ptrdiff_t>(next_action_),
                    plan_->actions.begin() + static_cast<std::ptrdiff_t>(end));
  }
  next_action_ = end;
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
