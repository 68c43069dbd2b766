#include "client/core/plan_follower.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "runtime/policy/repair.h"

namespace misa {
namespace {

// How far ahead a use that is not the expected one is looked for, before it counts as a departure.
constexpr uint32_t kResyncWindow = 96;

uint64_t Extend(uint64_t prefix, uint64_t group) {
  uint64_t x = (prefix ^ group) + 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// What a plan of `trace` finds on the device when its cycle begins: what is used before any action brings it, and not born.
std::vector<policy::Action> EntryOf(const policy::Trace& trace, const policy::Plan& plan) {
  std::unordered_map<uint32_t, const policy::Action*> first;
  for (const policy::Action& action : plan.actions) first.emplace(action.facet, &action);
  std::vector<policy::Action> entry;
  std::unordered_map<uint32_t, bool> seen;
  for (uint32_t position = 0; position < trace.entries.size(); ++position) {
    for (const policy::Use& use : trace.entries[position].uses) {
      if (!seen.emplace(use.facet, true).second || (use.access & policy::kCreate) != 0) continue;
      const auto action = first.find(use.facet);
      if (action != first.end() &&
          (action->second->kind == policy::Action::kLoad || action->second->position < position)) {
        continue;
      }
      entry.push_back({position, policy::Action::kLoad, use.facet});
    }
  }
  return entry;
}

}  // namespace

PlanFollower::PlanFollower() : bidder_(predict::MakeStepBidder({})) {}

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
  const uint64_t hash = GroupHash(uses, count);
  prefix_ = Extend(prefix_, hash);
  if (expected_ == nullptr) return;
  const auto size = static_cast<uint32_t>(expected_->groups.size());
  const uint32_t from = begun_ ? cursor_ + 1 : 0;
  if (from < size && expected_->groups[from] == hash) {
    cursor_ = from;
    begun_ = true;
    return;
  }
  ++departures_;
  if (Known* other = SameSoFar()) {
    // Another step than was expected, and one that is known: from here on it is that one's plan.
    expected_ = other;
    cursor_ = static_cast<uint32_t>(recording_.entries.size()) - 1;
    begun_ = true;
    if (other->plan == nullptr) return;
    Follow(other->plan, other->version, static_cast<uint32_t>(other->groups.size()));
    skipped_ = cursor_ > 0;
    entered_ = enter_ = true;
    return;
  }
  const uint32_t to = std::min<uint64_t>(size, static_cast<uint64_t>(from) + kResyncWindow);
  for (uint32_t i = from + 1; i < to; ++i) {
    if (expected_->groups[i] != hash) continue;
    skipped_ = true;
    cursor_ = i;
    begun_ = true;
    return;
  }
}

PlanFollower::Known* PlanFollower::SameSoFar() {
  if (cut_off_) return nullptr;
  const size_t at = recording_.entries.size() - 1;
  for (auto& item : known_.items()) {
    if (&item.value != expected_ && at < item.value.prefixes.size() && item.value.prefixes[at] == prefix_) {
      return &item.value;
    }
  }
  return nullptr;
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
  prefix_ = 0;
  bool another = false;  // the next step is not like this one
  if (!std::exchange(cut_off_, false)) {
    recording_.entries.reserve(last->entries.size() + 8);
    ended_digest_ = policy::Digest(*last);
    expected_ = Remember(last, ended_digest_);
    bidder_->Observe(ended_digest_);
    const std::optional<uint64_t> predicted = bidder_->Predict();
    if (predicted && *predicted != ended_digest_) {
      if (Known* next = known_.Find(*predicted)) {
        expected_ = next;
        another = true;
      }
    }
  }
  begun_ = false;
  cursor_ = 0;
  skipped_ = false;
  if (expected_ != nullptr && expected_->plan != nullptr && (another || expected_->version != version_)) {
    Follow(expected_->plan, expected_->version, static_cast<uint32_t>(expected_->groups.size()));
  } else if (offered_ != nullptr && (expected_ == nullptr || expected_->plan == nullptr)) {
    Follow(std::move(offered_), offered_version_, offered_positions_);
  } else {
    NextPeriod();
  }
  offered_ = nullptr;
  entered_ = enter_ = another && expected_->plan != nullptr;
  return last;
}

void PlanFollower::Follow(std::shared_ptr<const policy::Plan> plan, uint64_t version, uint32_t positions) {
  plan_ = std::move(plan);
  version_ = version;
  plan_positions_ = positions;
  period_ = 0;
  next_action_ = 0;
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

PlanFollower::Known* PlanFollower::Remember(std::shared_ptr<const policy::Trace> trace, uint64_t digest) {
  Known* known = known_.Touch(digest);
  if (known->trace != nullptr) return known;
  known->digest = digest;
  uint64_t prefix = 0;
  for (uint32_t i = 0; i < trace->entries.size(); ++i) {
    const auto& uses = trace->entries[i].uses;
    known->groups.push_back(GroupHash(uses.data(), uses.size()));
    known->prefixes.push_back(prefix = Extend(prefix, known->groups.back()));
    for (const policy::Use& use : uses) known->positions[use.facet].push_back(i);
  }
  known->trace = std::move(trace);
  size_t positions = 0;
  for (const auto& item : known_.items()) positions += item.value.groups.size();
  while (positions > kMostPositions && known_.items().size() > 1) {
    positions -= known_.items().back().value.groups.size();
    known_.ForgetOldest();
  }
  return known;
}

std::string PlanFollower::Offer(std::shared_ptr<const policy::Plan> plan, uint64_t version, uint64_t trace_digest) {
  Known* known = known_.Find(trace_digest);
  if (known == nullptr) return "The plan is for another trace than the last steps had; the old plan stays.";
  const auto positions = static_cast<uint32_t>(known->groups.size());
  const uint64_t cycle = uint64_t{plan->periods} * positions;
  for (const policy::Action& action : plan->actions) {
    if (action.position >= cycle) {
      return "The plan names position " + std::to_string(action.position) + ", and its cycle has " +
             std::to_string(cycle) + "; the old plan stays.";
    }
  }
  known->entry = EntryOf(*known->trace, *plan);
  known->plan = plan;
  known->version = version;
  offered_ = std::move(plan);
  offered_version_ = version;
  offered_positions_ = positions;
  return "";
}

void PlanFollower::TakeDue(std::vector<policy::Action>* actions) {
  if (!plan_ || !begun_) return;
  if (std::exchange(enter_, false)) {
    for (const policy::Action& action : expected_->entry) {
      if (action.position >= cursor_) actions->push_back(action);
    }
  }
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
      if (plan_positions_ == 0) return UINT64_MAX;
      const auto found = expected_->positions.find(facet);
      if (found == expected_->positions.end()) return UINT64_MAX;
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
  if (expected_ == nullptr) return UINT32_MAX;
  const auto it = expected_->positions.find(facet);
  if (it == expected_->positions.end()) return UINT32_MAX;
  const uint32_t now = begun_ ? cursor_ + 1 : 0;
  const auto next = std::lower_bound(it->second.begin(), it->second.end(), now);
  if (next != it->second.end()) return *next - now;
  return it->second.front() + static_cast<uint32_t>(expected_->groups.size()) - now;
}

std::vector<uint32_t> PlanFollower::Leftovers(uint32_t count) const {
  std::vector<uint32_t> leftovers;
  if (!plan_ || expected_ == nullptr) return leftovers;
  // A facet whose next action brings it is not counted on before.
  std::unordered_map<uint32_t, policy::Action::Kind> next;
  for (size_t i = next_action_; i < plan_->actions.size(); ++i) {
    next.emplace(plan_->actions[i].facet, plan_->actions[i].kind);
  }
  for (uint32_t facet = 0; facet < count; ++facet) {
    const auto action = next.find(facet);
    const bool comes = action != next.end() && action->second == policy::Action::kLoad;
    if (comes || !expected_->positions.contains(facet)) leftovers.push_back(facet);
  }
  std::stable_sort(leftovers.begin(), leftovers.end(), [this](uint32_t a, uint32_t b) { return NextUse(a) > NextUse(b); });
  return leftovers;
}

}  // namespace misa
