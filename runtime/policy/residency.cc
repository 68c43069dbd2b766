#include "runtime/policy/residency.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "runtime/policy/circle_order.h"
#include "runtime/policy/range_min.h"

namespace misa::policy {
namespace {

constexpr int kMostPeriods = 12;
constexpr int kMostTies = 8;

// Covers without transfers: everything strictly between the two uses.
std::vector<Cover> FullCovers(const StepModel& model) {
  std::vector<Cover> covers(model.uses.size());
  for (size_t u = 0; u < covers.size(); ++u) {
    const FacetUse& use = model.uses[u];
    covers[u] = {static_cast<uint32_t>((use.position + 1) % model.positions()), use.distance - 1};
  }
  return covers;
}

// Positions that `seconds` of compute take: forwards from the end of `position`, or backwards from its beginning.
// At most a quarter of the period, so that a slow link does not forbid all absence.
uint32_t PositionsIn(const StepModel& model, size_t position, double seconds, bool forwards) {
  const size_t count = model.positions();
  const size_t most = count / 4;
  size_t reached = 0;
  double passed = 0;
  while (reached < most && passed < seconds) {
    ++reached;
    passed += model.compute[forwards ? (position + reached) % count : (position + count - reached) % count];
  }
  return static_cast<uint32_t>(reached);
}

// The position at which each interval's cover begins, or after which it ends; kNone for those that cover nothing.
std::vector<uint32_t> CoverEdges(const std::vector<Cover>& covers, size_t count, bool ends) {
  std::vector<uint32_t> edges(covers.size(), PositionLists::kNone);
  for (size_t u = 0; u < covers.size(); ++u) {
    if (covers[u].length > 0) {
      const size_t edge = covers[u].start + (ends ? covers[u].length : 0);
      edges[u] = static_cast<uint32_t>(edge < count ? edge : edge - count);
    }
  }
  return edges;
}

std::vector<uint32_t> NextPositions(const StepModel& model) {
  std::vector<uint32_t> next(model.uses.size());
  for (size_t u = 0; u < next.size(); ++u) {
    next[u] = model.uses[model.uses[u].next].position;
  }
  return next;
}

// Sweeps the period with farthest-next-use eviction (Belady's MIN on intervals).
class Sweep {
 public:
  Sweep(const StepModel& model, const std::vector<Cover>& covers, const std::vector<int64_t>& room, double tie_window)
      : model_(model),
        covers_(covers),
        room_(room),
        tie_window_(tie_window),
        starts_(CoverEdges(covers, model.positions(), false), model.positions()),
        ends_(CoverEdges(covers, model.positions(), true), model.positions()),
        open_(NextPositions(model), model.positions()),
        dead_(covers.size() + 1),
        active_(covers.size(), 0),
        leaves_dirty_(covers.size(), 0),
        dirty_(model.bytes.size(), 0) {
    // A facet that nothing writes is clean from the start.
    for (const FacetUse& use : model.uses) {
      dirty_[use.facet] |= use.dirties() ? 1 : 0;
    }
  }

  // Puts the intervals in that `kept` has reaching over the start of the period.
  void Enter(const std::vector<uint8_t>& kept) {
    for (uint32_t u = 0; u < covers_.size(); ++u) {
      if (kept[u] != 0 && size_t{covers_[u].start} + covers_[u].length > model_.positions()) {
        leaves_dirty_[u] = 1;
        Insert(u);
      }
    }
  }

  // One period. Intervals that start are kept until evicted; with `keep_evicted` those that `kept` has as gone stay so.
  void Run(std::vector<uint8_t>* kept, bool keep_evicted) {
    for (size_t p = 0; p < model_.positions(); ++p) {
      for (const uint32_t* u = ends_.begin(p); u != ends_.end(p); ++u) {
        Remove(*u);
      }
      for (const uint32_t* u = starts_.begin(p); u != starts_.end(p); ++u) {
        if (model_.uses[*u].discards() || (keep_evicted && (*kept)[*u] == 0)) {
          continue;
        }
        (*kept)[*u] = 1;
        Insert(*u);
      }
      while (held_ > room_[p] && count_ > 0) {
        const uint32_t victim = PickVictim(p);
        Remove(victim);
        (*kept)[victim] = 0;
      }
      for (uint32_t u = model_.first_use[p]; u < model_.first_use[p + 1]; ++u) {
        const FacetUse& use = model_.uses[u];
        const bool came = (*kept)[use.previous] == 0;
        dirty_[use.facet] = use.dirties() || (dirty_[use.facet] != 0 && !came) ? 1 : 0;
        leaves_dirty_[u] = dirty_[use.facet];
      }
    }
  }

 private:
  bool IsDead(uint32_t u) const { return !model_.uses[u].next_needs_content; }
  void Insert(uint32_t u) {
    active_[u] = 1;
    ++count_;
    held_ += model_.bytes[model_.uses[u].facet];
    // Content that nothing reads again goes before all else.
    if (IsDead(u)) {
      dead_.Insert(u);
    } else {
      open_.Insert(u);
    }
  }
  void Remove(uint32_t u) {
    if (active_[u] == 0) {
      return;
    }
    active_[u] = 0;
    --count_;
    held_ -= model_.bytes[model_.uses[u].facet];
    if (IsDead(u)) {
      dead_.Erase(u);
    } else {
      open_.Erase(u);
    }
  }
  uint32_t PickVictim(size_t p) const {
    const uint32_t dead = dead_.HighestBelow(static_cast<uint32_t>(covers_.size()));
    if (dead != RankSet::kNone) {
      return dead;
    }
    const uint32_t farthest = open_.Farthest(p);
    const double nearest = (1 - tie_window_) * Distance(farthest, p);
    uint32_t candidate = farthest;
    for (int tie = 0; tie < kMostTies && candidate != CircleOrder::kNone; ++tie) {
      if (Distance(candidate, p) < nearest) {
        break;
      }
      if (leaves_dirty_[candidate] == 0) {
        return candidate;
      }
      candidate = open_.Nearer(candidate, p);
    }
    return farthest;
  }
  // Positions from p to the interval's next use.
  double Distance(uint32_t u, size_t p) const {
    const size_t next = model_.uses[model_.uses[u].next].position;
    return static_cast<double>(next > p ? next - p : next + model_.positions() - p);
  }

  const StepModel& model_;
  const std::vector<Cover>& covers_;
  const std::vector<int64_t>& room_;
  const double tie_window_;
  const PositionLists starts_;
  const PositionLists ends_;
  CircleOrder open_;
  RankSet dead_;  // by use
  std::vector<uint8_t> active_;
  std::vector<uint8_t> leaves_dirty_;
  std::vector<uint8_t> dirty_;
  int64_t count_ = 0;  // of active intervals
  int64_t held_ = 0;
};

std::vector<int64_t> RoomBesideUses(const StepModel& model) {
  std::vector<int64_t> room(model.positions());
  for (size_t p = 0; p < room.size(); ++p) {
    room[p] = model.capacity[p] - model.used[p];
  }
  return room;
}

}  // namespace

void Repair(const StepModel& model, std::vector<uint8_t>* kept) {
  const std::vector<Cover> covers = FullCovers(model);
  const std::vector<int64_t> room = RoomBesideUses(model);
  Sweep sweep(model, covers, room, 0);
  sweep.Enter(*kept);
  sweep.Run(kept, true);
}

void Fill(const StepModel& model, const Intervals& intervals, std::vector<uint8_t>* kept) {
  const std::vector<Cover>& covers = intervals.covers;
  RangeMin left(intervals.room);
  std::vector<uint32_t> gone;
  for (uint32_t u = 0; u < covers.size(); ++u) {
    if (covers[u].length == 0) {
      continue;
    }
    if ((*kept)[u] != 0) {
      left.Add(covers[u].start, covers[u].length, -model.bytes[model.uses[u].facet]);
    } else if (!model.uses[u].discards() && model.uses[u].next_needs_content) {
      gone.push_back(u);
    }
  }
  std::sort(gone.begin(), gone.end(), [&](uint32_t a, uint32_t b) {
    return std::tuple(covers[a].length, -model.bytes[model.uses[a].facet], a) <
           std::tuple(covers[b].length, -model.bytes[model.uses[b].facet], b);
  });
  for (const uint32_t u : gone) {
    const int64_t bytes = model.bytes[model.uses[u].facet];
    if (left.Min(covers[u].start, covers[u].length) >= bytes) {
      left.Add(covers[u].start, covers[u].length, -bytes);
      (*kept)[u] = 1;
    }
  }
}

Intervals WidenUses(const StepModel& model, double transfer_room) {
  const size_t count = model.positions();
  // Uses widened by the time of their transfers: room that is taken whether the facet stays or goes.
  std::vector<double> load_seconds(count, 0);
  std::vector<double> unload_seconds(count, 0);
  std::vector<uint8_t> ever_dirty(model.bytes.size(), 0);
  for (const FacetUse& use : model.uses) {
    ever_dirty[use.facet] |= use.dirties() ? 1 : 0;
  }
  for (const FacetUse& use : model.uses) {
    const double bytes = static_cast<double>(model.bytes[use.facet]);
    load_seconds[use.position] += use.needs_content ? bytes / model.link.duplex_load : 0;
    unload_seconds[use.position] += !use.discards() && ever_dirty[use.facet] ? bytes / model.link.duplex_unload : 0;
  }
  std::vector<uint32_t> lead(count);
  std::vector<uint32_t> lag(count);
  for (size_t p = 0; p < count; ++p) {
    lead[p] = PositionsIn(model, p, transfer_room * load_seconds[p], false);
    lag[p] = PositionsIn(model, p, transfer_room * unload_seconds[p], true);
  }
  Intervals intervals{FullCovers(model), RoomBesideUses(model)};
  std::vector<Cover>& covers = intervals.covers;
  std::vector<int64_t> change(count + 1, 0);
  const auto take = [&](size_t first, size_t length, int64_t bytes) {
    first %= count;
    change[first] -= bytes;
    change[std::min(first + length, count)] += bytes;
    if (first + length > count) {
      change[0] -= bytes;
      change[first + length - count] += bytes;
    }
  };
  for (size_t u = 0; u < covers.size(); ++u) {
    const FacetUse& use = model.uses[u];
    if (use.discards()) {
      continue;
    }
    const uint32_t inside = use.distance - 1;
    const uint32_t before = use.next_needs_content ? std::min(inside, lead[(use.position + use.distance) % count]) : 0;
    const uint32_t after = ever_dirty[use.facet] ? std::min(inside - before, lag[use.position]) : 0;
    covers[u].start = static_cast<uint32_t>((covers[u].start + after) % count);
    covers[u].length = inside - before - after;
    take(use.position + 1, after, model.bytes[use.facet]);
    take(use.position + use.distance - before, before, model.bytes[use.facet]);
  }
  int64_t taken = 0;
  for (size_t p = 0; p < count; ++p) {
    taken += change[p];
    intervals.room[p] += taken;
  }
  return intervals;
}

MovedBytes CountBytes(const StepModel& model, const std::vector<uint8_t>& kept) {
  MovedBytes moved;
  std::vector<uint8_t> dirty(model.bytes.size(), 1);
  // The second time around, the state at the start is the steady one.
  for (int round = 0; round < 2; ++round) {
    moved = {};
    for (uint32_t u = 0; u < model.uses.size(); ++u) {
      const FacetUse& use = model.uses[u];
      const int64_t bytes = model.bytes[use.facet];
      uint8_t& is_dirty = dirty[use.facet];
      is_dirty |= use.dirties() ? 1 : 0;
      if (use.discards()) {
        is_dirty = 0;
      } else if (kept[u] == 0) {
        moved.unloads += is_dirty != 0 ? bytes : 0;
        moved.loads += use.next_needs_content ? bytes : 0;
        is_dirty = 0;
      }
    }
  }
  return moved;
}

double CostOf(const StepModel& model, const std::vector<uint8_t>& kept, const Weights& weights) {
  const MovedBytes moved = CountBytes(model, kept);
  return weights.load * static_cast<double>(moved.loads) + weights.unload * static_cast<double>(moved.unloads);
}

std::vector<uint8_t> ChooseFarthest(const StepModel& model, const Intervals& intervals, double tie_window) {
  std::vector<uint8_t> kept(model.uses.size());
  for (size_t u = 0; u < kept.size(); ++u) {
    kept[u] = model.uses[u].discards() ? 0 : 1;
  }
  Sweep sweep(model, intervals.covers, intervals.room, tie_window);
  std::vector<uint8_t> before = kept;
  for (int period = 0; period < kMostPeriods; ++period) {
    sweep.Run(&kept, false);
    if (period > 0 && kept == before) {
      break;
    }
    before = kept;
  }
  Repair(model, &kept);
  Fill(model, intervals, &kept);
  // The widened room is less than the real one except where an absence is shorter than its transfers.
  Repair(model, &kept);
  return kept;
}

}  // namespace misa::policy
