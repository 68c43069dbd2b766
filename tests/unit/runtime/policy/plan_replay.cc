#include "tests/unit/runtime/policy/plan_replay.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <vector>

namespace misa::policy {
namespace {

// Written from the description of the executor, on purpose without the planner's own model of a step.
class Executor {
 public:
  Executor(const PlanInput& input, const Plan& plan, double speed)
      : input_(input), plan_(plan), speed_(speed), count_(static_cast<int64_t>(input.trace.entries.size())) {
    facets_.resize(input.facet_bytes.size());
    for (const Action& action : plan.actions) {
      if (action.position >= count_ || action.facet >= facets_.size()) {
        Breach("an action names a position or facet that does not exist");
      }
    }
    BuildUses();
  }

  ReplayResult Run(int periods) {
    const int64_t last = (periods - 1) * count_;
    int64_t limit = 200 + periods * (8 * static_cast<int64_t>(plan_.actions.size()) + 40 * count_ +
                                     40 * static_cast<int64_t>(facets_.size()));
    double last_start = 0;
    Arrive();
    while (position_ < periods * count_ && result_.breach.empty()) {
      if (position_ == last && !counting_) {
        counting_ = true;
        last_start = now_;
      }
      if (--limit < 0) {
        Breach("the step does not go on");
        break;
      }
      while (StartUnload() || StartLoad() || StartCompute()) {
      }
      if (!Pass()) {
        if (!Demand()) {
          Breach("nothing moves and nothing can be evicted");
        }
      }
    }
    result_.seconds = now_ - last_start;
    return result_;
  }

 private:
  struct Facet {
    enum { kAway, kLoading, kDevice, kUnloading } where = kAway;
    uint64_t truth = 1;  // version of the content as the program knows it
    uint64_t device = 0;
    uint64_t below = 1;
    bool alive = true;          // there is content
    bool to_go = false;         // an unload waits in the queue
    bool dropped = false;       // gone without a copy: to be recomputed
    bool quantizing = false;    // an int8 copy stays when the unload under way has ended
    int64_t int8 = 0;           // bytes of an int8 copy that is there
    std::vector<int64_t> uses;  // positions
  };
  struct Pending {
    int64_t position = 0;
    uint32_t facet = 0;
    Action::Kind kind = Action::kUnload;
  };

  void Breach(const std::string& what) {
    if (result_.breach.empty()) {
      result_.breach = what + " (position " + std::to_string(position_) + ")";
    }
  }
  const TraceEntry& Entry() const { return input_.trace.entries[static_cast<size_t>(position_ % count_)]; }
  int64_t Bytes(uint32_t facet) const { return static_cast<int64_t>(input_.facet_bytes[facet]); }
  int64_t Capacity() const {
    return static_cast<int64_t>(input_.budget_bytes - input_.reserve_bytes - Entry().other_bytes);
  }

  void BuildUses() {
    for (int64_t p = 0; p < count_; ++p) {
      for (const Use& use : input_.trace.entries[static_cast<size_t>(p)].uses) {
        std::vector<int64_t>& uses = facets_[use.facet].uses;
        if (uses.empty() || uses.back() != p) {
          uses.push_back(p);
        }
      }
    }
    // What the steady state has: content that the period's last use discards is not there at its beginning.
    for (uint32_t f = 0; f < facets_.size(); ++f) {
      if (!facets_[f].uses.empty() && (AccessAt(f, facets_[f].uses.back()) & kDiscard) != 0) {
        facets_[f].alive = false;
      }
    }
  }
  uint8_t AccessAt(uint32_t facet, int64_t position) const {
    uint8_t access = 0;
    for (const Use& use : input_.trace.entries[static_cast<size_t>(position % count_)].uses) {
      access |= use.facet == facet ? use.access : 0;
    }
    return access;
  }
  bool UsedNow(uint32_t facet) const { return AccessAt(facet, position_) != 0; }
  int64_t NextUse(uint32_t facet) const {
    const std::vector<int64_t>& uses = facets_[facet].uses;
    if (uses.empty()) {
      return std::numeric_limits<int64_t>::max();
    }
    const int64_t base = position_ / count_ * count_;
    const auto next = std::lower_bound(uses.begin(), uses.end(), position_ - base);
    return next != uses.end() ? base + *next : base + count_ + uses.front();
  }

  void Arrive() {
    arrival_ = now_;
    const int64_t period = position_ / count_;
    const int64_t at = position_ % count_;
    // The plan's list is in order of start; a period's list is admitted as its positions come.
    if (at == 0) {
      next_load_ = 0;
      // Unloads of the period before that its last position leaves over.
      AdmitUnloads(period - 1, count_ - 1);
      next_unload_ = 0;
    }
    for (; next_load_ < plan_.actions.size(); ++next_load_) {
      const Action& action = plan_.actions[next_load_];
      if (action.kind != Action::kLoad) {
        continue;
      }
      if (action.position > at) {
        break;
      }
      loads_.push_back({position_, action.facet});
    }
    AdmitUnloads(period, at - 1);
  }
  void AdmitUnloads(int64_t period, int64_t upto) {
    if (period < 0) {
      return;
    }
    for (; next_unload_ < plan_.actions.size(); ++next_unload_) {
      const Action& action = plan_.actions[next_unload_];
      if (action.kind == Action::kLoad || action.kind == Action::kRecompute || action.kind == Action::kDequantize) {
        continue;
      }
      if (action.position > upto) {
        break;
      }
      unloads_.push_back({period * count_ + action.position, action.facet, action.kind});
      facets_[action.facet].to_go = true;
    }
  }

  bool StartUnload() {
    while (unloading_ < 0 && !unloads_.empty()) {
      const uint32_t f = unloads_.front().facet;
      const Action::Kind kind = unloads_.front().kind;
      unloads_.pop_front();
      Facet& facet = facets_[f];
      facet.to_go = false;
      // Needed again before its turn came: it stays.
      if (facet.where != Facet::kDevice || UsedNow(f)) {
        continue;
      }
      if (kind == Action::kDrop) {
        facet.where = Facet::kAway;
        facet.dropped = true;
        held_ -= Bytes(f);
        return true;
      }
      facet.quantizing = kind == Action::kQuantize;
      Evict(f);
      return true;
    }
    return false;
  }
  // The int8 copy that a facet leaves behind.
  void Shrink(uint32_t f) {
    if (!facets_[f].quantizing) {
      return;
    }
    facets_[f].quantizing = false;
    facets_[f].int8 = OfferOf(f, Offer::kInt8).bytes;
    held_ += facets_[f].int8;
  }
  struct OfferFigures {
    int64_t bytes = 0;
    double seconds = 0;
  };
  OfferFigures OfferOf(uint32_t f, Offer::Kind kind) {
    for (const Offer& offer : input_.offers) {
      if (offer.facet == f && offer.kind == kind) {
        return {static_cast<int64_t>(offer.bytes), offer.seconds};
      }
    }
    Breach("the plan takes up what facet " + std::to_string(f) + " does not offer");
    return {};
  }
  bool PlanHas(Action::Kind kind, uint32_t f) const {
    return std::find(plan_.actions.begin(), plan_.actions.end(),
                     Action{static_cast<uint32_t>(position_ % count_), kind, f}) != plan_.actions.end();
  }
  bool Recomputed(uint32_t f) const { return facets_[f].dropped && PlanHas(Action::kRecompute, f); }
  bool Dequantized(uint32_t f) const { return facets_[f].int8 > 0 && PlanHas(Action::kDequantize, f); }
  void Evict(uint32_t f) {
    Facet& facet = facets_[f];
    if (facet.alive && facet.device != facet.below) {
      facet.where = Facet::kUnloading;
      unloading_ = f;
      unload_left_ = static_cast<double>(Bytes(f));
      result_.unloaded_bytes += counting_ ? input_.facet_bytes[f] : 0;
    } else {
      facet.where = Facet::kAway;
      held_ -= Bytes(f);
      Shrink(f);
    }
  }

  int64_t Births() const {
    int64_t births = 0;
    for (size_t i = 0; i < Entry().uses.size(); ++i) {
      const uint32_t f = Entry().uses[i].facet;
      bool first = true;
      for (size_t j = 0; j < i; ++j) {
        first = first && Entry().uses[j].facet != f;
      }
      if (first && facets_[f].where == Facet::kAway && Born(f)) {
        births += Bytes(f) - facets_[f].int8;
      }
    }
    return computing_ ? 0 : births;
  }
  bool Born(uint32_t f) const {
    return !facets_[f].alive || (AccessAt(f, position_) & kCreate) != 0 || Recomputed(f) || Dequantized(f);
  }

  bool StartLoad() {
    while (loading_ < 0 && !loads_.empty()) {
      const uint32_t f = loads_.front().facet;
      Facet& facet = facets_[f];
      if (facet.where == Facet::kUnloading || facet.to_go) {
        return false;
      }
      if (facet.where == Facet::kDevice || !facet.alive) {
        loads_.pop_front();
        continue;
      }
      if (held_ + Births() + Bytes(f) > Capacity()) {
        return false;
      }
      loads_.pop_front();
      Load(f);
      return true;
    }
    return false;
  }
  void Load(uint32_t f) {
    facets_[f].where = Facet::kLoading;
    held_ += Bytes(f);
    loading_ = f;
    load_left_ = static_cast<double>(Bytes(f));
    result_.loaded_bytes += counting_ ? input_.facet_bytes[f] : 0;
    if (held_ > Capacity()) {
      Breach("a load goes above the capacity");
    }
  }

  bool StartCompute() {
    if (computing_) {
      return false;
    }
    for (const Use& use : Entry().uses) {
      const Facet& facet = facets_[use.facet];
      if (facet.where != Facet::kDevice && !(facet.where == Facet::kAway && Born(use.facet))) {
        return false;
      }
    }
    if (held_ + Births() > Capacity()) {
      return false;
    }
    for (const Use& use : Entry().uses) {
      Facet& facet = facets_[use.facet];
      if (facet.where == Facet::kAway && facet.alive && (AccessAt(use.facet, position_) & kCreate) == 0) {
        // Out of compute, or out of the int8 copy, whose master is what the tier below holds.
        if (Dequantized(use.facet)) {
          facet.device = facet.below;
          extra_seconds_ += OfferOf(use.facet, Offer::kInt8).seconds;
          if (facet.device != facet.truth) {
            Breach("facet " + std::to_string(use.facet) + " was quantized without its master");
          }
        } else {
          facet.device = facet.truth;
          extra_seconds_ += OfferOf(use.facet, Offer::kRecompute).seconds;
        }
        facet.where = Facet::kDevice;
        held_ += Bytes(use.facet) - facet.int8;
        facet.int8 = 0;
        facet.dropped = false;
      } else if (facet.where == Facet::kAway) {
        facet.where = Facet::kDevice;
        held_ += Bytes(use.facet) - facet.int8;
        facet.int8 = 0;
        facet.dropped = false;
        facet.device = ++facet.truth;
        facet.below = 0;
        facet.alive = true;
      } else if (facet.alive && facet.device != facet.truth && (AccessAt(use.facet, position_) & kCreate) == 0) {
        Breach("facet " + std::to_string(use.facet) + " is read with old content");
      }
    }
    if (held_ > Capacity()) {
      Breach("the compute runs above the capacity");
    }
    result_.stall_seconds += counting_ ? now_ - arrival_ : 0;
    computing_ = true;
    compute_end_ = now_ + Entry().compute_seconds + extra_seconds_;
    extra_seconds_ = 0;
    return true;
  }

  // Time goes to the next event; false where there is none.
  bool Pass() {
    const bool both = loading_ >= 0 && unloading_ >= 0;
    const double load_rate = speed_ * (both ? input_.link.duplex_load : input_.link.load);
    const double unload_rate = speed_ * (both ? input_.link.duplex_unload : input_.link.unload);
    const double never = std::numeric_limits<double>::infinity();
    const double load = loading_ >= 0 ? load_left_ / load_rate : never;
    const double unload = unloading_ >= 0 ? unload_left_ / unload_rate : never;
    const double compute = computing_ ? std::max(0.0, compute_end_ - now_) : never;
    const double next = std::min({load, unload, compute});
    if (next == never) {
      return false;
    }
    now_ = compute <= next ? compute_end_ : now_ + next;
    load_left_ -= next * load_rate;
    unload_left_ -= next * unload_rate;
    if (unload <= next) {
      Facet& facet = facets_[static_cast<size_t>(unloading_)];
      facet.where = Facet::kAway;
      facet.below = facet.device;
      held_ -= Bytes(static_cast<uint32_t>(unloading_));
      Shrink(static_cast<uint32_t>(unloading_));
      unloading_ = -1;
    }
    if (load <= next) {
      Facet& facet = facets_[static_cast<size_t>(loading_)];
      facet.where = Facet::kDevice;
      facet.device = facet.below;
      loading_ = -1;
    }
    if (compute <= next) {
      EndCompute();
    }
    return true;
  }

  void EndCompute() {
    computing_ = false;
    for (const Use& use : Entry().uses) {
      Facet& facet = facets_[use.facet];
      const uint8_t access = AccessAt(use.facet, position_);
      if ((access & (kWrite | kCreate)) != 0) {
        facet.device = ++facet.truth;
      }
    }
    for (const Use& use : Entry().uses) {
      Facet& facet = facets_[use.facet];
      if ((AccessAt(use.facet, position_) & kDiscard) != 0 && facet.where == Facet::kDevice) {
        facet.where = Facet::kAway;
        facet.alive = false;
        held_ -= Bytes(use.facet);
      }
    }
    ++position_;
    Arrive();
  }

  // The compute waits, the link is idle and the plan has nothing to start: load on demand, or make room.
  bool Demand() {
    for (const Use& use : Entry().uses) {
      Facet& facet = facets_[use.facet];
      if (facet.where == Facet::kAway && !Born(use.facet) && held_ + Births() + Bytes(use.facet) <= Capacity()) {
        result_.demand_loads += counting_ ? 1 : 0;
        Load(use.facet);
        return true;
      }
    }
    int64_t victim = -1;
    for (uint32_t f = 0; f < facets_.size(); ++f) {
      if (facets_[f].where == Facet::kDevice && !UsedNow(f) &&
          (victim < 0 || NextUse(f) > NextUse(static_cast<uint32_t>(victim)))) {
        victim = f;
      }
    }
    if (victim < 0) {
      return false;
    }
    result_.demand_evictions += counting_ ? 1 : 0;
    Evict(static_cast<uint32_t>(victim));
    return true;
  }

  const PlanInput& input_;
  const Plan& plan_;
  const double speed_;
  const int64_t count_;
  ReplayResult result_;
  std::vector<Facet> facets_;
  std::deque<Pending> loads_;
  std::deque<Pending> unloads_;
  size_t next_load_ = 0;
  size_t next_unload_ = 0;
  int64_t position_ = 0;
  int64_t held_ = 0;
  bool counting_ = false;
  bool computing_ = false;
  int64_t loading_ = -1;
  int64_t unloading_ = -1;
  double load_left_ = 0;
  double unload_left_ = 0;
  double now_ = 0;
  double arrival_ = 0;
  double compute_end_ = 0;
  double extra_seconds_ = 0;  // of the position about to begin
};

}  // namespace

ReplayResult Replay(const PlanInput& input, const Plan& plan, double speed, int periods) {
  return Executor(input, plan, speed).Run(periods);
}

}  // namespace misa::policy
