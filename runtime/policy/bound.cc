#include "runtime/policy/bound.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "runtime/policy/circle_order.h"
#include "runtime/policy/step_bound.h"

// Lower bounds of a step: facets may be split to the byte, and transfers are free to overlap anything.

namespace misa::policy {
namespace {

constexpr int kMostPeriods = 48;
constexpr size_t kWindowStarts = 64;

// Bytes that would have to be kept on the device over some positions to save their transfer.
struct Arc {
  uint32_t start = 0;   // first position covered
  uint32_t length = 0;  // positions covered, under one period
  int64_t bytes = 0;
};

// The least bytes a period, in the long run, of arcs that cannot be kept whole while each position p has `room[p]`.
// On a line, evicting from the arc that ends farthest whenever a position overflows loses the fewest bytes on every
// prefix (Belady 1966; for intervals with fractions: Carlisle and Lloyd 1995, Faigle and Nawijn 1995, by exchange).
// A periodic schedule repeated K times is a schedule on the line, so with D(K) the greedy's loss over K periods from an
// empty device, D(K) <= K * best. Where the greedy comes back to a state it was in, the loss between the two is exactly
// what `best` is, a period; else D(K) / K is returned, still a bound.
double LeastLoss(const std::vector<Arc>& arcs, const std::vector<int64_t>& room) {
  const size_t count = room.size();
  std::vector<uint32_t> first(arcs.size(), PositionLists::kNone);
  std::vector<uint32_t> end(arcs.size(), 0);
  std::vector<uint32_t> last(arcs.size(), PositionLists::kNone);
  for (uint32_t a = 0; a < arcs.size(); ++a) {
    end[a] = static_cast<uint32_t>((size_t{arcs[a].start} + arcs[a].length) % count);
    if (arcs[a].length > 0) {
      first[a] = arcs[a].start;
      last[a] = end[a];
    }
  }
  const PositionLists starts(first, count);
  const PositionLists ends(last, count);
  CircleOrder farthest(end, count);
  std::vector<int64_t> left(arcs.size(), 0);  // bytes of the open instance still kept
  std::map<std::vector<int64_t>, std::pair<int, double>> seen;
  int64_t held = 0;
  double lost = 0;
  for (int period = 1; period <= kMostPeriods; ++period) {
    for (size_t p = 0; p < count; ++p) {
      for (const uint32_t* a = ends.begin(p); a != ends.end(p); ++a) {
        held -= left[*a];
        left[*a] = 0;
        farthest.Erase(*a);
      }
      for (const uint32_t* a = starts.begin(p); a != starts.end(p); ++a) {
        left[*a] = arcs[*a].bytes;
        held += left[*a];
        farthest.Insert(*a);
      }
      while (held > room[p]) {
        const uint32_t a = farthest.Farthest(p);
        if (a == CircleOrder::kNone) {
          break;
        }
        const int64_t gone = std::min(left[a], held - room[p]);
        left[a] -= gone;
        held -= gone;
        lost += static_cast<double>(gone);
        if (left[a] == 0) {
          farthest.Erase(a);
        }
      }
    }
    const auto [state, fresh] = seen.insert({left, {period, lost}});
    if (!fresh) {
      return (lost - state->second.second) / (period - state->second.first);
    }
  }
  return lost / kMostPeriods;
}

// A read interval: content that an earlier use left behind must be kept between the two uses, or loaded.
double LeastLoads(const StepModel& model) {
  std::vector<Arc> arcs;
  std::vector<int64_t> room(model.positions());
  for (size_t p = 0; p < room.size(); ++p) {
    room[p] = model.capacity[p] - model.used[p];
  }
  for (const FacetUse& use : model.uses) {
    if (use.next_needs_content) {
      arcs.push_back(
          {static_cast<uint32_t>((use.position + 1) % room.size()), use.distance - 1, model.bytes[use.facet]});
    }
  }
  return LeastLoss(arcs, room);
}

// A dirty chain: content written at one use is, up to its last use before it dies or is written again, either on the
// device all along or was copied down at least once. A facet's own uses inside its chain already count in `used`, so
// there the chain is given the facet's room back: that only relaxes the problem.
double LeastUnloads(const StepModel& model) {
  const size_t count = model.positions();
  std::vector<Arc> arcs;
  std::vector<int64_t> room(count);
  for (size_t p = 0; p < count; ++p) {
    room[p] = model.capacity[p] - model.used[p];
  }
  for (const FacetUse& first : model.uses) {
    if (!first.dirties()) {
      continue;
    }
    uint64_t reach = 0;
    const FacetUse* use = &first;
    // Ends at the latest back at the first, which dirties.
    while (use->next_needs_content) {
      reach += use->distance;
      use = &model.uses[use->next];
      if (use->dirties()) {
        break;
      }
      if (use->next_needs_content) {
        room[use->position] += model.bytes[use->facet];
      }
    }
    if (reach > 0) {
      arcs.push_back({static_cast<uint32_t>((first.position + 1) % count), static_cast<uint32_t>(reach - 1),
                      model.bytes[first.facet]});
    }
  }
  return LeastLoss(arcs, room);
}

// Within a step: between the starts of the compute of position a and of a later position b, all content read from a to
// b that was not on the device at a's start is loaded, and the device held at most capacity[a] then. The rest of the
// period takes its compute. For every a and b: T >= (read(a..b) - capacity[a]) / load + compute(b..a + period).
double PrefixSeconds(const StepModel& model) {
  const size_t count = model.positions();
  const double load = std::max(model.link.load, model.link.duplex_load);
  // Positions since the facet's use before: only its first use in the window counts, content born inside it was never
  // below.
  struct Read {
    uint32_t since = 0;
    double bytes = 0;
  };
  std::vector<Read> reads;
  std::vector<uint32_t> first_read(count + 1, 0);
  for (size_t p = 0; p < count; ++p) {
    for (uint32_t u = model.first_use[p]; u < model.first_use[p + 1]; ++u) {
      const FacetUse& use = model.uses[u];
      if (use.needs_content) {
        reads.push_back({model.uses[use.previous].distance, static_cast<double>(model.bytes[use.facet])});
      }
    }
    first_read[p + 1] = static_cast<uint32_t>(reads.size());
  }
  double longest = 0;
  const size_t starts = std::min(count, kWindowStarts);
  for (size_t k = 0; k < starts; ++k) {
    const size_t a = k * count / starts;
    double read = 0;
    double passed = 0;  // compute of a … b - 1
    for (size_t step = 0, b = a; step < count; ++step, b = b + 1 < count ? b + 1 : 0) {
      for (uint32_t r = first_read[b]; r < first_read[b + 1]; ++r) {
        read += reads[r].since > step ? reads[r].bytes : 0;
      }
      const double missing = read - static_cast<double>(model.capacity[a]);
      if (missing > 0) {
        longest = std::max(longest, missing / load + model.compute_total - passed);
      }
      passed += model.compute[b];
    }
  }
  return longest;
}

}  // namespace

Bound BoundOf(const StepModel& model) {
  const double loads = LeastLoads(model);
  const double unloads = LeastUnloads(model);
  Bound bound;
  bound.load_bytes = static_cast<uint64_t>(std::floor(loads));
  bound.unload_bytes = static_cast<uint64_t>(std::floor(unloads));
  bound.step_seconds = std::max({model.compute_total, LinkSeconds(loads, unloads, model.link), PrefixSeconds(model)});
  return bound;
}

Result<Bound> LowerBound(const PlanInput& input) {
  Result<Bound> result;
  const Result<StepModel> model = BuildStepModel(input);
  result.error = model.error;
  if (model.ok()) {
    result.value = BoundOf(model.value);
  }
  return result;
}

}  // namespace misa::policy
