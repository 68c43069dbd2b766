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
constexpr int kMostRoundings = 12;
constexpr size_t kRoundingWork = 12000;  // uses over all roundings; two are always made

// Content from the use that made it dirty up to its death or next write: absences in it share one copy down. A facet
// that nothing writes is one chain without a copy.
struct Chain {
  uint32_t first = 0;  // in members
  uint32_t end = 0;
  bool copies = false;
};

class Pricing {
 public:
  Pricing(const StepModel& model, const Intervals& intervals, const Weights& weights)
      : model_(model),
        intervals_(intervals),
        weights_(weights),
        price_(intervals.room.size(), 0),
        sums_(intervals.room.size() + 1, 0),
        keep_(model.uses.size(), 0) {
    BuildChains();
  }

  std::vector<uint8_t> Choose() {
    const size_t uses = model_.uses.size() + 1;
    const int roundings = static_cast<int>(
        std::clamp<size_t>(kRoundingWork / uses, 2, static_cast<size_t>(kMostRoundings)));
    std::vector<uint8_t> best;
    double least = 0;
    for (int i = 1; i <= kIterations; ++i) {
      Decide();
      MovePrices(1.0 / std::sqrt(static_cast<double>(i)));
      // Roundings are spread over the second half, when prices have settled.
      const int half = kIterations / 2;
      if (i > half && (i - half) * roundings / half != (i - 1 - half) * roundings / half) {
        std::vector<uint8_t> kept = Round();
        const MovedBytes moved = CountBytes(model_, kept);
        const double cost = weights_.load * static_cast<double>(moved.loads) +
                            weights_.unload * static_cast<double>(moved.unloads);
        if (best.empty() || cost < least) {
          best = std::move(kept);
          least = cost;
        }
      }
    }
    return best;
  }

 private:
  void BuildChains() {
    std::vector<uint8_t> done(model_.uses.size(), 0);
    const auto follow = [&](uint32_t u, bool copies) {
      Chain chain;
      chain.first = static_cast<uint32_t>(members_.size());
      chain.copies = copies;
      while (done[u] == 0 && !model_.uses[u].discards()) {
        done[u] = 1;
        members_.push_back(u);
        // Content that nothing reads again is copied down all the same if it has to go.
        const uint32_t next = model_.uses[u].next;
        if (!model_.uses[u].next_needs_content || model_.uses[next].dirties()) {
          break;
        }
        u = next;
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

  double Bytes(uint32_t use) const { return static_cast<double>(model_.bytes[model_.uses[use].facet]); }
  double LoadCost(uint32_t use) const {
    return model_.uses[use].next_needs_content ? weights_.load * Bytes(use) : 0;
  }
  // What the room of an interval costs at present prices.
  double Rent(uint32_t use) const {
    const Cover& cover = intervals_.covers[use];
    const size_t count = price_.size();
    const size_t end = cover.start + cover.length;
    const double sum = end <= count ? sums_[end] - sums_[cover.start]
                                    : sums_[count] - sums_[cover.start] + sums_[end - count];
    return sum * Bytes(use);
  }
  void SumPrices() {
    for (size_t p = 0; p < price_.size(); ++p) {
      sums_[p + 1] = sums_[p] + price_[p];
    }
  }

  void Decide() {
    SumPrices();
    for (const Chain& chain : chains_) {
      double all = 0;
      double some = chain.copies ? weights_.unload * Bytes(members_[chain.first]) : 0;
      for (uint32_t m = chain.first; m < chain.end; ++m) {
        const double rent = Rent(members_[m]);
        all += rent;
        some += std::min(rent, LoadCost(members_[m]));
      }
      for (uint32_t m = chain.first; m < chain.end; ++m) {
        const uint32_t u = members_[m];
        keep_[u] = all <= some || Rent(u) < LoadCost(u) ? 1 : 0;
      }
    }
  }

  void MovePrices(double step) {
    const size_t count = price_.size();
    std::vector<double> demand(count + 1, 0);
    for (uint32_t u = 0; u < keep_.size(); ++u) {
      const Cover& cover = intervals_.covers[u];
      if (keep_[u] == 0 || cover.length == 0) {
        continue;
      }
      const size_t end = cover.start + cover.length;
      demand[cover.start] += Bytes(u);
      demand[std::min(end, count)] -= Bytes(u);
      if (end > count) {
        demand[0] += Bytes(u);
        demand[end - count] -= Bytes(u);
      }
    }
    double sum = 0;
    double square = 0;
    for (size_t p = 0; p < count; ++p) {
      sum += demand[p];
      demand[p] = sum - static_cast<double>(std::max<int64_t>(intervals_.room[p], 0));
      const bool counts = demand[p] > 0 || price_[p] > 0;
      square += counts ? demand[p] * demand[p] : 0;
    }
    if (square == 0) {
      return;
    }
    // A price of 2 over a whole period is what an average byte saves; the step is a share of that along the gradient.
    const double scale = step * 2 / std::sqrt(static_cast<double>(count)) / std::sqrt(square);
    for (size_t p = 0; p < count; ++p) {
      price_[p] = std::max(0.0, price_[p] + scale * demand[p]);
    }
  }

  // A choice that holds: what saves most for its rent first, chains whole or in parts, as long as they fit.
  std::vector<uint8_t> Round() {
    SumPrices();
    struct Item {
      double ratio = 0;
      uint32_t first = 0;
      uint32_t end = 0;
    };
    std::vector<Item> items;
    // Room that costs nothing now is still better left to short intervals.
    const double least_price = 1e-3 / static_cast<double>(price_.size());
    for (const Chain& chain : chains_) {
      double saved = chain.copies ? weights_.unload * Bytes(members_[chain.first]) : 0;
      double rent = 0;
      for (uint32_t m = chain.first; m < chain.end; ++m) {
        const uint32_t u = members_[m];
        const double mine = Rent(u) + least_price * Bytes(u) * intervals_.covers[u].length;
        saved += LoadCost(u);
        rent += mine;
        if (chain.end - chain.first > 1) {
          items.push_back({LoadCost(u) / (mine + 1e-300), m, m + 1});
        }
      }
      items.push_back({saved / (rent + 1e-300), chain.first, chain.end});
    }
    std::sort(items.begin(), items.end(), [](const Item& a, const Item& b) {
      return a.ratio != b.ratio ? a.ratio > b.ratio : std::pair(a.first, a.end) < std::pair(b.first, b.end);
    });
    std::vector<uint8_t> kept(model_.uses.size(), 0);
    RangeMin left(intervals_.room);
    const auto take = [&](uint32_t u, int64_t sign) {
      left.Add(intervals_.covers[u].start, intervals_.covers[u].length, -sign * model_.bytes[model_.uses[u].facet]);
      kept[u] = sign > 0 ? 1 : 0;
    };
    std::vector<uint32_t> taken;
    for (const Item& item : items) {
      taken.clear();
      bool fits = true;
      for (uint32_t m = item.first; m < item.end && fits; ++m) {
        const uint32_t u = members_[m];
        if (kept[u] != 0) {
          continue;
        }
        fits = left.Min(intervals_.covers[u].start, intervals_.covers[u].length) >=
               model_.bytes[model_.uses[u].facet];
        if (fits) {
          take(u, 1);
          taken.push_back(u);
        }
      }
      if (!fits) {
        for (const uint32_t u : taken) {
          take(u, -1);
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
  std::vector<Chain> chains_;
  std::vector<uint32_t> members_;  // uses of all chains, one chain after the other
  std::vector<double> price_;      // of a byte at each position
  std::vector<double> sums_;
  std::vector<uint8_t> keep_;
};

}  // namespace

std::vector<uint8_t> ChoosePriced(const StepModel& model, const Intervals& intervals, const Weights& weights) {
  return Pricing(model, intervals, weights).Choose();
}

}  // namespace misa::policy
