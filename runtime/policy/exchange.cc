// Exchange of intervals: what farthest-next-use and prices leave over in steps of few and unequal facets.
#include <algorithm>
#include <numeric>
#include <tuple>

#include "runtime/policy/residency.h"

namespace misa::policy {
namespace {

class Exchanger {
 public:
  Exchanger(const StepModel& model, const Intervals& intervals, const Weights& weights, std::vector<uint8_t>* kept)
      : model_(model), covers_(intervals.covers), weights_(weights), kept_(kept), left_(intervals.room) {
    for (uint32_t u = 0; u < covers_.size(); ++u) {
      if ((*kept)[u] != 0) {
        Take(u, -1);
      }
    }
    cost_ = CostOf(model, *kept, weights);
    // Those whose loads cost most are tried first; short ones take the least room for the same.
    order_.resize(covers_.size());
    std::iota(order_.begin(), order_.end(), 0u);
    std::sort(order_.begin(), order_.end(), [&](uint32_t a, uint32_t b) {
      return std::tuple(-Bytes(a), covers_[a].length, a) < std::tuple(-Bytes(b), covers_[b].length, b);
    });
    by_length_ = order_;
    std::stable_sort(by_length_.begin(), by_length_.end(),
                     [&](uint32_t a, uint32_t b) { return covers_[a].length < covers_[b].length; });
  }

  void Run(size_t most_visits) {
    bool better = true;
    while (better) {
      better = false;
      for (const uint32_t u : order_) {
        if ((*kept_)[u] != 0 || !Matters(u)) {
          continue;
        }
        if (visits_ > most_visits) {
          return;
        }
        better = Try(u) || better;
      }
    }
  }

 private:
  int64_t Bytes(uint32_t u) const { return model_.bytes[model_.uses[u].facet]; }
  bool Matters(uint32_t u) const { return !model_.uses[u].discards() && model_.uses[u].next_needs_content; }
  double Saving(uint32_t u) const {
    const FacetUse& use = model_.uses[u];
    return static_cast<double>(Bytes(u)) *
           ((use.next_needs_content ? weights_.load : 0) + (use.dirties() ? weights_.unload : 0));
  }

  template <typename Visit>
  void ForCover(uint32_t u, Visit visit) const {
    const Cover& cover = covers_[u];
    for (size_t i = 0, p = cover.start; i < cover.length; ++i, p = p + 1 < left_.size() ? p + 1 : 0) {
      visit(p);
    }
  }
  void Take(uint32_t u, int64_t sign) {
    ForCover(u, [&](size_t p) { left_[p] += sign * Bytes(u); });
  }
  bool Covers(uint32_t u, size_t p) const {
    const Cover& cover = covers_[u];
    const size_t ahead = p >= cover.start ? p - cover.start : p + left_.size() - cover.start;
    return ahead < cover.length;
  }
  bool Fits(uint32_t u) const {
    const int64_t bytes = Bytes(u);
    bool fits = true;
    ForCover(u, [&](size_t p) { fits = fits && left_[p] >= bytes; });
    return fits;
  }
  void Set(uint32_t u, bool keep) {
    (*kept_)[u] = keep ? 1 : 0;
    Take(u, keep ? -1 : 1);
    changed_.push_back(u);
  }

  bool Try(uint32_t wanted) {
    changed_.clear();
    Set(wanted, true);
    bool holds = true;
    for (size_t i = 0, p = covers_[wanted].start; i < covers_[wanted].length && holds;
         ++i, p = p + 1 < left_.size() ? p + 1 : 0) {
      while (left_[p] < 0 && holds) {
        holds = RemoveAt(p, wanted);
      }
    }
    if (holds) {
      visits_ += by_length_.size();
      for (const uint32_t u : by_length_) {
        if ((*kept_)[u] == 0 && Matters(u) && Fits(u)) {
          Set(u, true);
        }
      }
      const double cost = CostOf(model_, *kept_, weights_);
      if (cost < cost_) {
        cost_ = cost;
        return true;
      }
    }
    for (size_t i = changed_.size(); i-- > 0;) {
      const uint32_t u = changed_[i];
      const bool keep = (*kept_)[u] == 0;
      (*kept_)[u] = keep ? 1 : 0;
      Take(u, keep ? -1 : 1);
    }
    return false;
  }

  // The interval at this position goes that costs least for the room that is missing.
  bool RemoveAt(size_t p, uint32_t wanted) {
    visits_ += covers_.size();
    const int64_t missing = -left_[p];
    uint32_t victim = wanted;
    double least = 0;
    for (uint32_t u = 0; u < covers_.size(); ++u) {
      if (u == wanted || (*kept_)[u] == 0 || !Covers(u, p)) {
        continue;
      }
      const double cost = Saving(u) / static_cast<double>(std::min(Bytes(u), missing));
      if (victim == wanted || cost < least || (cost == least && Bytes(u) < Bytes(victim))) {
        victim = u;
        least = cost;
      }
    }
    if (victim == wanted) {
      return false;
    }
    Set(victim, false);
    return true;
  }

  const StepModel& model_;
  const std::vector<Cover>& covers_;
  const Weights weights_;
  std::vector<uint8_t>* kept_;
  std::vector<int64_t> left_;  // room at each position beside what is kept
  double cost_ = 0;
  std::vector<uint32_t> order_;
  std::vector<uint32_t> by_length_;
  std::vector<uint32_t> changed_;
  size_t visits_ = 0;
};

}  // namespace

void Exchange(const StepModel& model, const Intervals& intervals, const Weights& weights, size_t most_visits,
              std::vector<uint8_t>* kept) {
  Exchanger(model, intervals, weights, kept).Run(most_visits);
}

}  // namespace misa::policy
