// What is on the device when a position begins is a state; a period is a path through layers of states, one a position,
// and a schedule that repeats is a cycle. The best one is the cycle of least mean cost (Lawler 1976: guess the mean,
// look for a cycle below it, take that one's mean as the next guess), in whole numbers, so that it is exact.
//
// A facet leaves only where a use needs its room, and no more leave than must: to hold more never costs more.
#include "runtime/policy/optimum.h"

#include <algorithm>
#include <limits>
#include <string>
#include <unordered_map>
#include <vector>

namespace misa::policy {
namespace {

using Wide = __int128;

constexpr size_t kMostFacets = 32;
// Loads weigh so much more than unloads that no cycle of up to 32 periods trades one for the other.
constexpr int64_t kLoadWeight = 1024;

// Two bits a facet: on the device, dirty.
using State = uint64_t;
bool IsHere(State state, size_t facet) { return (state >> (2 * facet) & 1) != 0; }
bool IsDirty(State state, size_t facet) { return (state >> (2 * facet) & 2) != 0; }
State Without(State state, size_t facet) { return state & ~(State{3} << (2 * facet)); }
State With(State state, size_t facet, bool dirty) { return state | ((dirty ? State{3} : State{1}) << (2 * facet)); }

struct Cost {
  int64_t loaded = 0;
  int64_t unloaded = 0;
  int64_t misses = 0;

  void Add(const Cost& other) {
    loaded += other.loaded;
    unloaded += other.unloaded;
    misses += other.misses;
  }
};

struct Edge {
  uint32_t from = 0;
  uint32_t to = 0;  // in the next position's layer; after the last position, in the first one's
  Cost cost;
};

class Graph {
 public:
  Graph(const StepModel& model, uint64_t most_states) : model_(model), most_states_(most_states) {
    layers_.resize(model.positions());
    edges_.resize(model.positions());
  }

  // All states that a start from an empty device leads to; false where there are too many.
  bool Explore() {
    std::vector<State> fresh = {0};
    Known(0, 0);
    while (!fresh.empty()) {
      std::vector<State> now = std::move(fresh);
      fresh.clear();
      for (size_t p = 0; p < layers_.size(); ++p) {
        std::vector<State> next;
        const size_t to = (p + 1) % layers_.size();
        for (const State state : now) {
          Follow(p, state, to, &next);
          if (states_ > most_states_) {
            return false;
          }
        }
        (to == 0 ? fresh : now) = std::move(next);
      }
    }
    return true;
  }

  size_t boundary_states() const { return layers_[0].size(); }
  size_t positions() const { return layers_.size(); }
  size_t layer_size(size_t position) const { return layers_[position].size(); }
  const std::vector<Edge>& edges(size_t position) const { return edges_[position]; }

 private:
  // Index of a state in its layer, and whether it was new.
  std::pair<uint32_t, bool> Known(size_t position, State state) {
    const auto [found, fresh] = layers_[position].try_emplace(state, static_cast<uint32_t>(layers_[position].size()));
    states_ += fresh ? 1 : 0;
    return {found->second, fresh};
  }

  void Follow(size_t position, State state, size_t to, std::vector<State>* next) {
    const uint32_t from = layers_[position].at(state);
    Cost cost;
    int64_t held = 0;
    for (size_t f = 0; f < model_.bytes.size(); ++f) {
      held += IsHere(state, f) ? model_.bytes[f] : 0;
    }
    uint64_t used = 0;
    for (uint32_t u = model_.first_use[position]; u < model_.first_use[position + 1]; ++u) {
      const FacetUse& use = model_.uses[u];
      used |= uint64_t{1} << use.facet;
      if (!IsHere(state, use.facet)) {
        held += model_.bytes[use.facet];
        if (use.needs_content) {
          cost.loaded += model_.bytes[use.facet];
          ++cost.misses;
        }
      }
    }
    std::vector<uint32_t> others;
    for (uint32_t f = 0; f < model_.bytes.size(); ++f) {
      if (IsHere(state, f) && (used >> f & 1) == 0) {
        others.push_back(f);
      }
    }
    std::vector<uint32_t> gone;
    Evict(others, 0, held - model_.capacity[position], &gone, [&] {
      State after = state;
      Cost with = cost;
      for (const uint32_t f : gone) {
        with.unloaded += IsDirty(state, f) ? model_.bytes[f] : 0;
        after = Without(after, f);
      }
      for (uint32_t u = model_.first_use[position]; u < model_.first_use[position + 1]; ++u) {
        const FacetUse& use = model_.uses[u];
        const bool dirty = use.dirties() || IsDirty(after, use.facet);
        after = use.discards() ? Without(after, use.facet) : With(after, use.facet, dirty);
      }
      const auto [index, fresh] = Known(to, after);
      if (fresh) {
        next->push_back(after);
      }
      edges_[position].push_back({from, index, with});
    });
  }

  // Every set of `others` that frees `needed` bytes and of which none could stay.
  template <typename Done>
  void Evict(const std::vector<uint32_t>& others, size_t index, int64_t needed, std::vector<uint32_t>* gone,
             const Done& done) {
    if (needed <= 0) {
      const bool all_must =
          std::all_of(gone->begin(), gone->end(), [&](uint32_t f) { return model_.bytes[f] + needed > 0; });
      if (all_must) {
        done();
      }
      return;
    }
    if (index == others.size()) {
      return;
    }
    gone->push_back(others[index]);
    Evict(others, index + 1, needed - model_.bytes[others[index]], gone, done);
    gone->pop_back();
    Evict(others, index + 1, needed, gone, done);
  }

  const StepModel& model_;
  const uint64_t most_states_;
  uint64_t states_ = 0;
  std::vector<std::unordered_map<State, uint32_t>> layers_;
  std::vector<std::vector<Edge>> edges_;
};

// A cycle, or its absence, of mean weight below `guess` (a cost in so many periods).
class CycleSearch {
 public:
  CycleSearch(const Graph& graph, int64_t load_weight) : graph_(graph), load_weight_(load_weight) {}

  Wide Weight(const Cost& cost) const { return Wide{load_weight_} * cost.loaded + cost.unloaded; }

  bool Find(const Cost& guess, uint32_t guess_periods, Cost* cycle, uint32_t* periods) {
    const size_t starts = graph_.boundary_states();
    std::vector<Wide> distance(starts, 0);
    previous_.assign(starts, kNone);
    step_.assign(starts, {});
    const Wide share = Weight(guess);  // a period's, times guess_periods
    for (size_t round = 0; round <= starts; ++round) {
      bool better = false;
      Sweep(distance, guess_periods);
      for (uint32_t s = 0; s < starts; ++s) {
        if (nodes_[s].from == kNone) {
          continue;
        }
        const Wide reached = nodes_[s].distance - share;
        if (reached < distance[s]) {
          distance[s] = reached;
          previous_[s] = nodes_[s].from;
          step_[s] = nodes_[s].cost;
          better = true;
        }
      }
      if (!better) {
        return false;
      }
      if (TakeCycle(cycle, periods)) {
        return true;
      }
    }
    return false;
  }

 private:
  static constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();
  struct Node {
    Wide distance = 0;
    uint32_t from = kNone;  // the period's first state
    Cost cost;
  };

  // The best path of one period to each state at its end.
  void Sweep(const std::vector<Wide>& distance, uint32_t scale) {
    nodes_.assign(distance.size(), {});
    for (uint32_t s = 0; s < distance.size(); ++s) {
      nodes_[s] = {distance[s], s, {}};
    }
    for (size_t p = 0; p < graph_.positions(); ++p) {
      std::vector<Node> next(graph_.layer_size((p + 1) % graph_.positions()));
      for (const Edge& edge : graph_.edges(p)) {
        const Node& from = nodes_[edge.from];
        if (from.from == kNone) {
          continue;
        }
        const Wide reached = from.distance + scale * Weight(edge.cost);
        Node& to = next[edge.to];
        if (to.from == kNone || reached < to.distance) {
          to = {reached, from.from, from.cost};
          to.cost.Add(edge.cost);
        }
      }
      nodes_ = std::move(next);
    }
  }

  // A cycle among the states' predecessors is one below the guess.
  bool TakeCycle(Cost* cycle, uint32_t* periods) const {
    std::vector<uint32_t> seen(previous_.size(), kNone);
    for (uint32_t s = 0; s < previous_.size(); ++s) {
      uint32_t at = s;
      while (at != kNone && seen[at] == kNone) {
        seen[at] = s;
        at = previous_[at];
      }
      if (at == kNone || seen[at] != s) {
        continue;
      }
      *cycle = {};
      *periods = 0;
      const uint32_t end = at;
      do {
        cycle->Add(step_[at]);
        ++*periods;
        at = previous_[at];
      } while (at != end);
      return true;
    }
    return false;
  }

  const Graph& graph_;
  const int64_t load_weight_;
  std::vector<uint32_t> previous_;
  std::vector<Cost> step_;
  std::vector<Node> nodes_;
};

}  // namespace

Result<Optimum> FindOptimum(const StepModel& model, uint64_t most_states) {
  Result<Optimum> result;
  if (model.bytes.size() > kMostFacets) {
    result.error = "The exact optimum is for up to " + std::to_string(kMostFacets) + " facets, and there are " +
                   std::to_string(model.bytes.size()) + "; ask for another policy, or for fewer units.";
    return result;
  }
  Graph graph(model, most_states);
  if (!graph.Explore()) {
    result.error = "The exact optimum would have to look at more than " + std::to_string(most_states) +
                   " states; ask for another policy, or for fewer units.";
    return result;
  }
  int64_t all = 1;
  for (const FacetUse& use : model.uses) {
    all += model.bytes[use.facet];
  }
  // Guesses go down from a cost that no period reaches.
  CycleSearch search(graph, std::min(all, int64_t{1} << 50) * kLoadWeight);
  Cost best{2 * all, 0, 0};
  uint32_t periods = 1;
  Cost found;
  uint32_t found_periods = 0;
  while (search.Find(best, periods, &found, &found_periods)) {
    best = found;
    periods = found_periods;
  }
  result.value = {periods, static_cast<uint64_t>(best.misses), static_cast<uint64_t>(best.loaded),
                  static_cast<uint64_t>(best.unloaded)};
  return result;
}

}  // namespace misa::policy
