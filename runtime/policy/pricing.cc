// Lagrangian relaxation of the capacities (Fisher, Management Science 27, 1981; the subgradient step is Held, Wolfe and
// Crowder's, 1974): positions charge for their room, facets decide alone, prices rise where demand is over the room.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "runtime/policy/range_min.h"
#include "runtime/policy/residency.h"

namespace misa::policy {
namespace {

constexpr int kIterations = 120;
constexpr int kLeastIterations = 16;
constexpr size_t kPricingWork = 48000;  // uses over all iterations
constexpr int kPatience = 5;            // iterations without a better dual, after which steps are halved
constexpr size_t kMostExchangeUses = 2000;
constexpr size_t kExchangeVisits = 40000;
constexpr double kLeastPace = 1e-2;  // steps so small change nothing any more
constexpr double kNearEnough = 1.0;  // a choice so near to what all choices cost is the best for all that matters
constexpr int kMostRoundings = 12;
constexpr size_t kRoundingWork = 12000;  // uses over all roundings; one is always made at the end

// Content from the use that made it dirty up to its death or next write: absences in it share one copy down. A facet
// that nothing writes is one chain without a copy.
struct Chain {
  uint32_t first = 0;  // in members
  uint32_t end = 0;
  double copy = 0;  // what it costs
};

class Pricing {
 public:
  Pricing(const StepModel& model, const Intervals& intervals, const Weights& weights)
      : model_(model),
        intervals_(intervals),
        weights_(weights),
        count_(intervals.room.size()),
        price_(count_, 0),
        sums_(2 * count_ + 1, 0),
        demand_(2 * count_ + 1, 0) {
    BuildChains();
    for (const int64_t room : intervals.room) {
      room_.push_back(static_cast<double>(std::max<int64_t>(room, 0)));
    }
  }

  std::vector<uint8_t> Choose(double enough) {
    const size_t uses = model_.uses.size() + 1;
    const int iterations = static_cast<int>(std::clamp<size_t>(
        kPricingWork / uses, static_cast<size_t>(kLeastIterations), static_cast<size_t>(kIterations)));
    const int roundings =
        static_cast<int>(std::clamp<size_t>(kRoundingWork / uses, 1, static_cast<size_t>(kMostRoundings)));
    std::vector<uint8_t> best;
    double least = 0;      // cost of the best choice so far
    double most_sure = 0;  // the most that any prices have shown every choice to cost
    double pace = 1;
    int since_better = 0;
    for (int i = 1; i <= iterations; ++i) {
      const double sure = Decide();
      if (sure > most_sure * (1 + 1e-4)) {
        since_better = 0;
      } else if (++since_better >= kPatience) {
        pace /= 2;
        since_better = 0;
      }
      most_sure = std::max(most_sure, sure);
      // Roundings are spread over the second half, when prices have settled; the first tells how far there is to go.
      const int half = iterations / 2;
      if (i == 1 || (i > half && (i - half) * roundings / half != (i - 1 - half) * roundings / half)) {
        std::vector<uint8_t> kept = Round();
        const MovedBytes moved = CountBytes(model_, kept);
        const double cost =
            weights_.load * static_cast<double>(moved.loads) + weights_.unload * static_cast<double>(moved.unloads);
        if (best.empty() || cost < least) {
          best = std::move(kept);
          least = cost;
        }
      }
      if (least <= enough || least <= most_sure * kNearEnough || pace < kLeastPace ||
          !MovePrices(pace * std::max(least - sure, 0.0))) {
        break;
      }
    }
    if (least > enough && least > most_sure * kNearEnough && model_.uses.size() <= kMostExchangeUses) {
      Exchange(model_, intervals_, weights_, kExchangeVisits, &best);
      Repair(model_, &best);
    }
    return best;
  }

 private:
  // One use of a chain, laid out in the order of chains.
  struct Member {
    uint32_t use = 0;
    uint32_t start = 0;  // of its cover
    uint32_t end = 0;    // may be past the period
    double bytes = 0;
    double load = 0;  // what its load costs
    double rent = 0;  // what its room costs at present prices
    bool keep = false;
  };

  void BuildChains() {
    std::vector<uint8_t> done(model_.uses.size(), 0);
    const auto follow = [&](uint32_t u, bool copies) {
      Chain chain;
      chain.first = static_cast<uint32_t>(members_.size());
      chain.copy = copies ? weights_.unload * static_cast<double>(model_.bytes[model_.uses[u].facet]) : 0;
      while (done[u] == 0 && !model_.uses[u].discards()) {
        done[u] = 1;
        const FacetUse& use = model_.uses[u];
        const Cover& cover = intervals_.covers[u];
        const double bytes = static_cast<double>(model_.bytes[use.facet]);
        members_.push_back({u, cover.start, cover.start + cover.length, bytes,
                            use.next_needs_content ? weights_.load * bytes : 0, 0, false});
        // Content that nothing reads again is copied down all the same if it has to go.
        if (!use.next_needs_content || model_.uses[use.next].dirties()) {
          break;
        }
        u = use.next;
      }
      chain.end = static_cast<uint32_t>(members_.size());
      if (chain.end > chain.first) {
        chains_.push_back(chain);
      }
    };
    for (uint32_t u = 0; u < model_.uses.size(); ++u) {
      if (model_.uses[u].dirties()) {
        follow(u, true);
      }
    }
    for (uint32_t u = 0; u < model_.uses.size(); ++u) {
      follow(u, false);
    }
  }

  // Twice around, so that no cover wraps.
  void SumPrices() {
    double sum = 0;
    for (size_t p = 0; p < count_; ++p) {
      sums_[p] = sum;
      sum += price_[p];
    }
    for (size_t p = 0; p <= count_; ++p) {
      sums_[count_ + p] = sum + (p < count_ ? sums_[p] : sum);
    }
  }

  // Every chain for itself at present prices. Returns what all choices cost at least: the chains' costs less the rents
  // of all room (the relaxation's dual).
  double Decide() {
    SumPrices();
    double dual = 0;
    for (const Chain& chain : chains_) {
      double all = 0;
      double some = chain.copy;
      for (uint32_t m = chain.first; m < chain.end; ++m) {
        Member& member = members_[m];
        member.rent = (sums_[member.end] - sums_[member.start]) * member.bytes;
        all += member.rent;
        some += std::min(member.rent, member.load);
      }
      dual += std::min(all, some);
      for (uint32_t m = chain.first; m < chain.end; ++m) {
        Member& member = members_[m];
        member.keep = all <= some || member.rent < member.load;
      }
    }
    for (size_t p = 0; p < count_; ++p) {
      dual -= price_[p] * room_[p];
    }
    return dual;
  }

  // Along the gradient, so far as would raise the dual by `gain` if it were a plane (Polyak 1969); false where there is
  // no gradient, and the prices are the best ones.
  bool MovePrices(double gain) {
    std::fill(demand_.begin(), demand_.end(), 0.0);
    for (const Member& member : members_) {
      if (member.keep) {
        demand_[member.start] += member.bytes;
        demand_[member.end] -= member.bytes;
      }
    }
    double sum = 0;
    for (size_t p = 0; p < 2 * count_; ++p) {
      sum += demand_[p];
      demand_[p] = sum;
    }
    double square = 0;
    for (size_t p = 0; p < count_; ++p) {
      const double over = demand_[p] + demand_[count_ + p] - room_[p];
      demand_[p] = over;
      square += over > 0 || price_[p] > 0 ? over * over : 0;
    }
    if (square == 0) {
      return false;
    }
    const double scale = gain / square;
    for (size_t p = 0; p < count_; ++p) {
      price_[p] = std::max(0.0, price_[p] + scale * demand_[p]);
    }
    return true;
  }

  // A choice that holds: what saves most for its rent first, chains whole or in parts, as long as they fit.
  std::vector<uint8_t> Round() {
    struct Item {
      double ratio = 0;
      uint32_t first = 0;
      uint32_t end = 0;
    };
    std::vector<Item> items;
    // Room that costs nothing now is still better left to short intervals.
    const double least_price = 1e-3 / static_cast<double>(count_);
    for (const Chain& chain : chains_) {
      double saved = chain.copy;
      double rent = 0;
      for (uint32_t m = chain.first; m < chain.end; ++m) {
        const Member& member = members_[m];
        const double mine = member.rent + least_price * member.bytes * (member.end - member.start);
        saved += member.load;
        rent += mine;
        if (chain.end - chain.first > 1) {
          items.push_back({member.load / (mine + 1e-300), m, m + 1});
        }
      }
      items.push_back({saved / (rent + 1e-300), chain.first, chain.end});
    }
    std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
      return a.ratio != b.ratio ? a.ratio > b.ratio : std::pair(a.first, a.end) < std::pair(b.first, b.end);
    });
    std::vector<uint8_t> kept(model_.uses.size(), 0);
    RangeMin left(intervals_.room);
    const auto take = [&](uint32_t m, int64_t sign) {
      const Member& member = members_[m];
      left.Add(member.start, member.end - member.start, -sign * model_.bytes[model_.uses[member.use].facet]);
      kept[member.use] = sign > 0 ? 1 : 0;
    };
    std::vector<uint32_t> taken;
    for (const Item& item : items) {
      taken.clear();
      bool fits = true;
      for (uint32_t m = item.first; m < item.end && fits; ++m) {
        const Member& member = members_[m];
        if (kept[member.use] != 0) {
          continue;
        }
        fits = left.Min(member.start, member.end - member.start) >= model_.bytes[model_.uses[member.use].facet];
        if (fits) {
          take(m, 1);
          taken.push_back(m);
        }
      }
      if (!fits) {
        for (const uint32_t m : taken) {
          take(m, -1);
        }
      }
    }
    // The widened room is less than the real one except where an absence is shorter than its transfers.
    Repair(model_, &kept);
    return kept;
  }

  const StepModel& model_;
  const Intervals& intervals_;
  const Weights weights_;
  const size_t count_;
  std::vector<double> room_;
  std::vector<Chain> chains_;
  std::vector<Member> members_;  // of all chains, one chain after the other
  std::vector<double> price_;    // of a byte at each position
  std::vector<double> sums_;     // of prices before a position, over two periods
  std::vector<double> demand_;   // over two periods
};

}  // namespace

std::vector<uint8_t> ChoosePriced(const StepModel& model, const Intervals& intervals, const Weights& weights,
                                  double enough) {
  return Pricing(model, intervals, weights).Choose(enough);
}

}  // namespace misa::policy
