#include "client/core/plan_follower.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "runtime/policy/repair.h"
#include "runtime/policy/split_mix.h"

namespace misa {
namespace {

// How far ahead a use that is not the expected one is looked for, before it counts as a departure.
constexpr uint32_t kResyncWindow = 96;

uint64_t Extend(uint64_t prefix, uint64_t group) {
  return policy::SplitMix((prefix ^ group) + policy::kSplitMixStep);
}

}  // namespace

PlanFollower::PlanFollower() : bidder_(predict::MakeStepBidder({})) {}

uint64_t PlanFollower::GroupHash(const policy::Use* uses, size_t count) {
  // Order within a group has no meaning, so the hash is a sum.
  uint64_t hash = count;
  for (size_t i = 0; i < count; ++i) {
    hash += policy::SplitMix(uses[i].facet + policy::kSplitMixStep);
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
  const uint64_t before = std::exchange(last_hash_, hash);
  const auto size = static_cast<uint32_t>(expected_->path.groups.size());
  if (section_ != nullptr) {
    const auto round = static_cast<uint32_t>(section_->path.groups.size());
    const uint32_t next = section_cursor_ + 1 < round ? section_cursor_ + 1 : 0;
    if (section_->path.groups[next] != hash) return LeaveSection(hash);
    if (next == 0) {
      const std::vector<policy::Action>& all = section_->plan->actions;
      section_rest_.insert(section_rest_.end(), all.begin() + static_cast<std::ptrdiff_t>(section_action_), all.end());
      section_action_ = 0;
    }
    section_cursor_ = next;
    return;
  }
  const uint32_t from = begun_ ? cursor_ + 1 : 0;
  if (from < size && expected_->path.groups[from] == hash) {
    cursor_ = from;
    begun_ = true;
    return;
  }
  if (begun_ && plan_ && !sections_.empty() && (from >= size || !expected_->pairs.contains(PairHash(before, hash))) &&
      EnterSection(before, hash)) {
    return;
  }
  ++departures_;
  if (Known* other = SameSoFar()) {
    // Another step than was expected, and one that is known: from here on it is that one's plan.
    expected_ = other;
    cursor_ = static_cast<uint32_t>(recording_.entries.size()) - 1;
    begun_ = true;
    if (other->plan == nullptr) return;
    Follow(other->plan, other->version, static_cast<uint32_t>(other->path.groups.size()));
    entered_ = reenter_ = true;
    return;
  }
  const uint32_t to = std::min<uint64_t>(size, static_cast<uint64_t>(from) + kResyncWindow);
  for (uint32_t i = from + 1; i < to; ++i) {
    if (expected_->path.groups[i] != hash) continue;
    skipped_ = true;
    cursor_ = i;
    begun_ = true;
    return;
  }
}

PlanFollower::Known* PlanFollower::SameSoFar() {
  if (cut_off_ || strayed_) return nullptr;
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

bool PlanFollower::EnterSection(uint64_t before, uint64_t hash) {
  for (auto& [key, section] : sections_) {
    const std::vector<uint64_t>& groups = section.path.groups;
    for (size_t i = 0; i < groups.size(); ++i) {
      if (groups[i] != hash || groups[i > 0 ? i - 1 : groups.size() - 1] != before) continue;
      section_ = &section;
      section_cursor_ = static_cast<uint32_t>(i);
      section_entered_ = true;
      strayed_ = reenter_ = true;
      return true;
    }
  }
  return false;
}

void PlanFollower::LeaveSection(uint64_t hash) {
  section_ = nullptr;
  section_rest_.clear();
  // A section shares its beginning with what comes after it, so that more than a window was passed over perhaps.
  const auto& groups = expected_->path.groups;
  auto found = std::find(groups.begin() + cursor_ + 1, groups.end(), hash);
  if (found == groups.end()) found = std::find(groups.begin(), groups.end(), hash);
  if (found == groups.end()) {
    ++departures_;
    return;
  }
  cursor_ = static_cast<uint32_t>(found - groups.begin());
}

std::shared_ptr<const policy::Trace> PlanFollower::EndStep(double compute_seconds, uint64_t other_bytes) {
  if (!recording_.entries.empty()) {
    recording_.entries.back().compute_seconds = compute_seconds;
    recording_.entries.back().other_bytes = other_bytes;
  }
  const auto last = std::make_shared<const policy::Trace>(std::move(recording_));
  recording_ = {};
  prefix_ = 0;
  const bool whole = !std::exchange(cut_off_, false);
  const uint64_t digest = whole ? policy::Digest(*last) : last_digest_;
  const bool again = digest == std::exchange(last_digest_, digest);
  bool another = false;  // the next step is to have another trace than this one
  if (whole) {
    recording_.entries.reserve(last->entries.size() + 8);
    if (!strayed_ || again) expected_ = Remember(last, digest);
    bidder_->Observe(digest);
    const std::optional<uint64_t> predicted = bidder_->Predict();
    Known* next = predicted ? known_.Find(*predicted) : nullptr;
    if (next != nullptr && expected_ != nullptr) {
      another = next->digest != digest;
      expected_ = next;
    }
  }
  section_ = nullptr;
  section_rest_.clear();
  strayed_ = false;
  begun_ = false;
  cursor_ = 0;
  skipped_ = false;
  if (expected_ != nullptr && expected_->plan != nullptr && (another || expected_->version != version_)) {
    Follow(expected_->plan, expected_->version, static_cast<uint32_t>(expected_->path.groups.size()));
  } else if (offered_ != nullptr && (expected_ == nullptr || expected_->plan == nullptr)) {
    Follow(std::move(offered_), offered_version_, offered_positions_);
  } else {
    NextPeriod();
  }
  offered_ = nullptr;
  entered_ = another && expected_->plan != nullptr;
  reenter_ |= entered_;
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

void PlanFollower::Path::Set(std::shared_ptr<const policy::Trace> of) {
  trace = std::move(of);
  groups.clear();
  positions.clear();
  for (uint32_t i = 0; i < trace->entries.size(); ++i) {
    const auto& uses = trace->entries[i].uses;
    groups.push_back(GroupHash(uses.data(), uses.size()));
    for (const policy::Use& use : uses) positions[use.facet].push_back(i);
  }
}

uint32_t PlanFollower::Path::NextUse(uint32_t facet, uint32_t now) const {
  const auto it = positions.find(facet);
  if (it == positions.end()) return UINT32_MAX;
  const auto next = std::lower_bound(it->second.begin(), it->second.end(), now);
  if (next != it->second.end()) return *next - now;
  return it->second.front() + static_cast<uint32_t>(groups.size()) - now;
}

PlanFollower::Known* PlanFollower::Remember(std::shared_ptr<const policy::Trace> trace, uint64_t digest) {
  Known* known = known_.Touch(digest);
  if (known->path.trace != nullptr) return known;
  known->digest = digest;
  known->path.Set(std::move(trace));
  uint64_t prefix = 0;
  const std::vector<uint64_t>& groups = known->path.groups;
  for (size_t i = 0; i < groups.size(); ++i) {
    known->prefixes.push_back(prefix = Extend(prefix, groups[i]));
    if (i > 0) known->pairs.insert(PairHash(groups[i - 1], groups[i]));
  }
  size_t positions = 0;
  for (const auto& item : known_.items()) positions += item.value.path.groups.size();
  while (positions > kMostPositions && known_.items().size() > 1) {
    positions -= known_.items().back().value.path.groups.size();
    known_.ForgetOldest();
  }
  return known;
}

void PlanFollower::SetSection(uint32_t key, std::shared_ptr<const policy::Trace> trace,
                              std::shared_ptr<const policy::Plan> plan) {
  Section& section = sections_[key];
  if (section_ == &section) {
    // Positions of the old one say nothing in the new one.
    section_ = nullptr;
    section_rest_.clear();
  }
  section.path.Set(std::move(trace));
  section.plan = std::move(plan);
}

std::string PlanFollower::Offer(std::shared_ptr<const policy::Plan> plan, uint64_t version, uint64_t trace_digest) {
  Known* known = known_.Find(trace_digest);
  if (known == nullptr) return "The plan is for another trace than the last steps had; the old plan stays.";
  const auto positions = static_cast<uint32_t>(known->path.groups.size());
  const uint64_t cycle = uint64_t{plan->periods} * positions;
  for (const policy::Action& action : plan->actions) {
    if (action.position >= cycle) {
      return "The plan names position " + std::to_string(action.position) + ", and its cycle has " +
             std::to_string(cycle) + "; the old plan stays.";
    }
  }
  known->plan = plan;
  known->version = version;
  offered_ = std::move(plan);
  offered_version_ = version;
  offered_positions_ = positions;
  return "";
}

void PlanFollower::Enter(const policy::Plan& plan, const Path& path, size_t due, uint32_t position,
                         std::vector<policy::Action>* actions) {
  // The last action on a facet, round and round, says where it is.
  std::unordered_map<uint32_t, policy::Action::Kind> last;
  for (size_t i = 0; i < plan.actions.size(); ++i) {
    const policy::Action& action = plan.actions[(due + i) % plan.actions.size()];
    last[action.facet] = action.kind;
  }
  std::vector<uint32_t> away;
  std::vector<std::pair<uint32_t, uint32_t>> here;  // next use, facet
  const auto now = static_cast<uint32_t>(position % path.groups.size());
  for (const auto& [facet, uses] : path.positions) {
    const auto found = last.find(facet);
    if (found != last.end() && found->second == policy::Action::kUnload) {
      away.push_back(facet);
    } else {
      here.emplace_back(path.NextUse(facet, now), facet);
    }
  }
  std::sort(away.begin(), away.end());
  std::sort(here.begin(), here.end());
  for (const uint32_t facet : away) actions->push_back({position, policy::Action::kUnload, facet});
  for (const auto& [next_use, facet] : here) actions->push_back({position, policy::Action::kLoad, facet});
}

void PlanFollower::TakeSectionDue(std::vector<policy::Action>* actions) {
  const std::vector<policy::Action>& all = section_->plan->actions;
  size_t end = section_action_;
  if (section_entered_) end = 0;
  while (end < all.size() && (all[end].kind == policy::Action::kLoad ? all[end].position <= section_cursor_
                                                                     : all[end].position < section_cursor_)) {
    ++end;
  }
  if (std::exchange(section_entered_, false)) {
    // Where all of the section fits, what else there is may stay as long as nothing needs its room.
    if (!all.empty()) {
      std::vector<uint32_t> others;
      for (const auto& [facet, uses] : expected_->path.positions) {
        if (!section_->path.positions.contains(facet)) others.push_back(facet);
      }
      std::sort(others.begin(), others.end());
      for (const uint32_t facet : others) actions->push_back({section_cursor_, policy::Action::kUnload, facet});
    }
    Enter(*section_->plan, section_->path, end, section_cursor_, actions);
  } else {
    actions->insert(actions->end(), section_rest_.begin(), section_rest_.end());
    actions->insert(actions->end(), all.begin() + static_cast<std::ptrdiff_t>(section_action_),
                    all.begin() + static_cast<std::ptrdiff_t>(end));
  }
  section_rest_.clear();
  section_action_ = end;
}

void PlanFollower::TakeDue(std::vector<policy::Action>* actions) {
  if (section_ != nullptr) return TakeSectionDue(actions);
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
  if (std::exchange(reenter_, false)) {
    skipped_ = false;
    next_action_ = end;
    Enter(*plan_, expected_->path, end, position, actions);
    return;
  }
  TakeUpTo(end, position, std::exchange(skipped_, false), actions);
}

void PlanFollower::TakeRest(std::vector<policy::Action>* actions) {
  // After a section the next position says what is to be where.
  if (!plan_ || !begun_ || section_ != nullptr || reenter_) return;
  const uint32_t next = (period_ + 1) * plan_positions_;
  size_t end = next_action_;
  while (end < plan_->actions.size() && plan_->actions[end].position < next) ++end;
  // A whole step leaves over only what its last position does.
  TakeUpTo(end, next, cursor_ + 1 < plan_positions_, actions);
}

void PlanFollower::TakeUpTo(size_t end, uint32_t position, bool skipped, std::vector<policy::Action>* actions) {
  if (skipped) {
    const auto next_use = [this](uint32_t facet, uint32_t from) -> uint64_t {
      const auto found = expected_->path.positions.find(facet);
      if (found == expected_->path.positions.end() || plan_positions_ == 0) return UINT64_MAX;
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
  if (section_ != nullptr) return section_->path.NextUse(facet, section_cursor_ + 1);
  if (expected_ == nullptr) return UINT32_MAX;
  return expected_->path.NextUse(facet, begun_ ? cursor_ + 1 : 0);
}

std::vector<uint32_t> PlanFollower::Leftovers(uint32_t count) const {
  std::vector<uint32_t> leftovers;
  if (expected_ == nullptr || section_ != nullptr) return leftovers;
  for (uint32_t facet = 0; facet < count; ++facet) {
    if (!expected_->path.positions.contains(facet)) leftovers.push_back(facet);
  }
  return leftovers;
}

}  // namespace misa
