#include "runtime/policy/schedule.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <queue>
#include <string>
#include <tuple>

#include "runtime/policy/range_min.h"

namespace misa::policy {
namespace {

enum class Where : uint8_t { kAway, kLoading, kDevice, kUnloading };

class Simulation {
 public:
  Simulation(const StepModel& model, const std::vector<uint8_t>& kept, const ScheduleOptions& options)
      : model_(model),
        kept_(kept),
        options_(options),
        count_(static_cast<int64_t>(model.positions())),
        where_(model.bytes.size(), Where::kAway),
        dirty_(model.bytes.size(), false),
        content_(model.bytes.size(), true),
        free_(StaticRoom()),
        room_(free_) {
    Begin();
  }

  // Runs to the end of one more period; false where nothing can go on.
  bool RunPeriod() {
    const int64_t end = (period_ + 1) * count_;
    periods_.resize(static_cast<size_t>(period_) + 2);
    periods_[static_cast<size_t>(period_)].start = arrival_;
    // Every round of the loop starts or ends a transfer or a position.
    const int64_t most_rounds = 4 * static_cast<int64_t>(model_.uses.size()) + 4 * count_ + 16;
    for (int64_t round = 0; position_ < end; ++round) {
      if (round > most_rounds || !Advance()) {
        return false;
      }
    }
    ++period_;
    return true;
  }

  struct Period {
    std::vector<Action> actions;
    double start = 0;
    double stall = 0;
    uint64_t loaded = 0;
    uint64_t unloaded = 0;
  };
  const Period& period(int64_t index) const { return periods_[static_cast<size_t>(index)]; }
  double now() const { return now_; }

 private:
  struct Job {
    int64_t due = 0;  // unrolled position of the use
    uint32_t use = 0;
    bool operator>(const Job& other) const { return std::tie(due, use) > std::tie(other.due, other.use); }
  };
  struct Transfer {
    bool busy = false;
    uint32_t use = 0;  // load: the use it is for; unload: the use after which the facet goes
    int64_t due = 0;
    double left = 0;  // bytes
  };

  size_t At(int64_t position) const { return static_cast<size_t>(position % count_); }
  int64_t BytesOf(uint32_t use) const { return model_.bytes[model_.uses[use].facet]; }

  // Room for loads ahead at each position: what uses, kept facets and facets on their way down leave over.
  std::vector<int64_t> StaticRoom() {
    std::vector<int64_t> room(static_cast<size_t>(count_));
    for (size_t p = 0; p < room.size(); ++p) {
      room[p] = model_.capacity[p] - model_.used[p];
    }
    std::vector<int64_t> change(room.size() + 1, 0);
    for (uint32_t u = 0; u < model_.uses.size(); ++u) {
      const FacetUse& use = model_.uses[u];
      if (use.discards()) {
        continue;
      }
      uint32_t length = use.distance - 1;
      if (kept_[u] == 0) {
        const bool dirty =
            use.dirties() || kept_[use.previous] != 0;  // a facet that came clean and was not written is clean
        const double seconds = options_.unload_room * static_cast<double>(BytesOf(u)) / model_.link.duplex_unload;
        length = dirty ? std::min(length, PositionsIn(use.position, seconds)) : 0;
      }
      const size_t first = At(use.position + 1);
      const size_t end = first + length;
      change[first] -= BytesOf(u);
      change[std::min(end, room.size())] += BytesOf(u);
      if (end > room.size()) {
        change[0] -= BytesOf(u);
        change[end - room.size()] += BytesOf(u);
      }
    }
    int64_t taken = 0;
    for (size_t p = 0; p < room.size(); ++p) {
      taken += change[p];
      room[p] += taken;
    }
    return room;
  }
  uint32_t PositionsIn(uint32_t position, double seconds) const {
    uint32_t reached = 0;
    double passed = 0;
    while (passed < seconds && reached < count_ / 4) {
      ++reached;
      passed += model_.compute[At(position + reached)];
    }
    return reached;
  }

  // What a period like all others would find at its start: the kept facets are there, the others are away.
  void Begin() {
    for (uint32_t u = 0; u < model_.uses.size(); ++u) {
      const FacetUse& use = model_.uses[u];
      if (int64_t{use.position} + use.distance < count_) {
        continue;  // not the last use in a period
      }
      if (kept_[u] != 0) {
        where_[use.facet] = Where::kDevice;
        dirty_[use.facet] = true;
        held_ += BytesOf(u);
      } else {
        content_[use.facet] = use.next_needs_content;
        if (use.next_needs_content) {
          jobs_.push({int64_t{use.position} + use.distance - count_, use.next});
        }
      }
    }
    CountBirths();
  }

  bool Advance() {
    bool changed = true;
    while (changed) {
      changed = StartUnload();
      changed = StartLoad() || changed;
      changed = StartCompute() || changed;
    }
    const bool both = load_.busy && unload_.busy;
    const double load_rate = both ? model_.link.duplex_load : model_.link.load;
    const double unload_rate = both ? model_.link.duplex_unload : model_.link.unload;
    double next = std::numeric_limits<double>::infinity();
    if (load_.busy) {
      next = std::min(next, load_.left / load_rate);
    }
    if (unload_.busy) {
      next = std::min(next, unload_.left / unload_rate);
    }
    if (computing_) {
      next = std::min(next, compute_end_ - now_);
    }
    if (next == std::numeric_limits<double>::infinity()) {
      return false;
    }
    next = std::max(next, 0.0);
    // Which events are next is decided before the subtraction rounds.
    const bool load_ends = load_.busy && load_.left / load_rate <= next;
    const bool unload_ends = unload_.busy && unload_.left / unload_rate <= next;
    const bool compute_ends = computing_ && compute_end_ - now_ <= next;
    load_.left -= load_.busy ? next * load_rate : 0;
    unload_.left -= unload_.busy ? next * unload_rate : 0;
    now_ = compute_ends ? compute_end_ : now_ + next;
    if (unload_ends) {
      EndUnload();
    }
    if (load_ends) {
      load_.busy = false;
      const uint32_t facet = model_.uses[load_.use].facet;
      where_[facet] = Where::kDevice;
      dirty_[facet] = false;
    }
    if (compute_ends) {
      EndCompute();
    }
    return true;
  }

  bool StartUnload() {
    if (unload_.busy || queue_.empty()) {
      return false;
    }
    unload_ = queue_.front();
    queue_.pop_front();
    unload_.busy = true;
    unload_.left = static_cast<double>(BytesOf(unload_.use));
    // The use before the present one is the last that has ended.
    Emit(position_ - 1, Action::kUnload, model_.uses[unload_.use].facet, BytesOf(unload_.use));
    return true;
  }

  void EndUnload() {
    unload_.busy = false;
    held_ -= BytesOf(unload_.use);
    Leave(unload_.use, unload_.due);
    if (!computing_) {
      CountBirths();
    }
  }

  // The facet of this use is off the device, and its content below where there is any to keep.
  void Leave(uint32_t use, int64_t due) {
    const FacetUse& left = model_.uses[use];
    where_[left.facet] = Where::kAway;
    dirty_[left.facet] = false;
    content_[left.facet] = left.next_needs_content;
    if (left.next_needs_content) {
      jobs_.push({due, left.next});
    }
  }

  bool StartLoad() {
    if (load_.busy || jobs_.empty()) {
      return false;
    }
    const Job job = jobs_.top();
    const int64_t bytes = BytesOf(job.use);
    const int64_t capacity = model_.capacity[At(position_)];
    const int64_t births = job.due > position_ ? births_ : 0;
    if (held_ + births + bytes > capacity) {
      return false;
    }
    // A facet that the compute waits for has its room in the position's own; one loaded ahead must leave the positions
    // before its use theirs.
    if (job.due > position_) {
      // The room grows only where a position ends.
      if (full_at_ == position_ && full_for_ == job.use) {
        return false;
      }
      const size_t length = static_cast<size_t>(job.due - position_);
      if (room_.Min(At(position_), length) < bytes) {
        full_at_ = position_;
        full_for_ = job.use;
        return false;
      }
      room_.Add(At(position_), length, -bytes);
    }
    jobs_.pop();
    const uint32_t facet = model_.uses[job.use].facet;
    where_[facet] = Where::kLoading;
    held_ += bytes;
    load_.busy = true;
    load_.use = job.use;
    load_.left = static_cast<double>(bytes);
    Emit(position_, Action::kLoad, facet, bytes);
    return true;
  }

  bool StartCompute() {
    if (computing_) {
      return false;
    }
    const size_t p = At(position_);
    for (uint32_t u = model_.first_use[p]; u < model_.first_use[p + 1]; ++u) {
      const uint32_t facet = model_.uses[u].facet;
      const bool born = where_[facet] == Where::kAway && !content_[facet];
      if (where_[facet] != Where::kDevice && !born) {
        return false;
      }
    }
    if (held_ + births_ > model_.capacity[p]) {
      return false;
    }
    for (uint32_t u = model_.first_use[p]; u < model_.first_use[p + 1]; ++u) {
      const uint32_t facet = model_.uses[u].facet;
      if (where_[facet] != Where::kDevice) {
        where_[facet] = Where::kDevice;
        held_ += model_.bytes[facet];
      }
    }
    births_ = 0;
    computing_ = true;
    compute_end_ = now_ + model_.compute[p];
    periods_[static_cast<size_t>(position_ / count_)].stall += now_ - arrival_;
    return true;
  }

  void EndCompute() {
    computing_ = false;
    const size_t p = At(position_);
    for (uint32_t u = model_.first_use[p]; u < model_.first_use[p + 1]; ++u) {
      const FacetUse& use = model_.uses[u];
      dirty_[use.facet] = dirty_[use.facet] || use.dirties();
      content_[use.facet] = true;
      const int64_t due = position_ + use.distance;
      if (use.discards()) {
        held_ -= BytesOf(u);
        Leave(u, due);
      } else if (kept_[u] == 0) {
        if (dirty_[use.facet]) {
          where_[use.facet] = Where::kUnloading;
          queue_.push_back({false, u, due, 0});
        } else {
          Emit(position_, Action::kUnload, use.facet, 0);
          held_ -= BytesOf(u);
          Leave(u, due);
        }
      }
    }
    // What loads ahead took of this position is over; the next time around it is as at first.
    room_.Set(p, free_[p]);
    ++position_;
    arrival_ = now_;
    periods_.resize(std::max(periods_.size(), static_cast<size_t>(position_ / count_) + 1));
    CountBirths();
  }

  // Facets to be born take their room when the compute arrives: a load ahead must not be faster. One that is still on
  // its way down counts once it is there.
  void CountBirths() {
    births_ = 0;
    const size_t p = At(position_);
    for (uint32_t u = model_.first_use[p]; u < model_.first_use[p + 1]; ++u) {
      const uint32_t facet = model_.uses[u].facet;
      if (where_[facet] == Where::kAway && !content_[facet]) {
        births_ += model_.bytes[facet];
      }
    }
  }

  void Emit(int64_t position, Action::Kind kind, uint32_t facet, int64_t bytes) {
    // What belongs to a position before the first was begun by a period that is not simulated.
    if (position < 0) {
      return;
    }
    Period& period = periods_[static_cast<size_t>(position / count_)];
    period.actions.push_back({static_cast<uint32_t>(At(position)), kind, facet});
    (kind == Action::kLoad ? period.loaded : period.unloaded) += static_cast<uint64_t>(bytes);
  }

  const StepModel& model_;
  const std::vector<uint8_t>& kept_;
  const ScheduleOptions& options_;
  const int64_t count_;
  std::vector<Where> where_;
  std::vector<uint8_t> dirty_;
  std::vector<uint8_t> content_;  // whether a facet that is away has content below
  const std::vector<int64_t> free_;
  RangeMin room_;
  std::priority_queue<Job, std::vector<Job>, std::greater<>> jobs_;
  std::deque<Transfer> queue_;  // facets to copy down, in order of their last use
  Transfer load_;
  Transfer unload_;
  int64_t held_ = 0;      // bytes on the device, coming and going included
  int64_t births_ = 0;    // bytes that the position the compute is at will create
  int64_t full_at_ = -1;  // the position at which there was no room for a load ahead for this use
  uint32_t full_for_ = 0;
  int64_t position_ = 0;  // unrolled
  int64_t period_ = 0;
  bool computing_ = false;
  double now_ = 0;
  double arrival_ = 0;
  double compute_end_ = 0;
  std::vector<Period> periods_;
};

}  // namespace

Result<Schedule> MakeSchedule(const StepModel& model, const std::vector<uint8_t>& kept,
                              const ScheduleOptions& options) {
  Result<Schedule> result;
  Simulation simulation(model, kept, options);
  // Unloads that a period's last positions leave over begin in the next one, so a period is known one later.
  int last = 0;
  for (int period = 0; period < std::max(options.most_periods, 3); ++period) {
    if (!simulation.RunPeriod()) {
      result.error = "The simulated step cannot go on at period " + std::to_string(period) + ".";
      return result;
    }
    last = period;
    if (period >= 2 && simulation.period(period - 1).actions == simulation.period(period - 2).actions) {
      result.value.repeats = true;
      break;
    }
  }
  const auto& steady = simulation.period(last - 1);
  Plan& plan = result.value.plan;
  plan.actions = steady.actions;
  plan.step_seconds = simulation.period(last).start - steady.start;
  plan.stall_seconds = steady.stall;
  plan.loaded_bytes = steady.loaded;
  plan.unloaded_bytes = steady.unloaded;
  return result;
}

}  // namespace misa::policy
