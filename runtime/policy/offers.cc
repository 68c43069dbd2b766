#include "runtime/policy/offers.h"

#include <algorithm>
#include <tuple>

namespace misa::policy {
namespace {

// Whether what the tier below holds may differ from the device's content after some use of the facet.
std::vector<uint8_t> EverDirty(const StepModel& model) {
  std::vector<uint8_t> dirty(model.bytes.size(), 0);
  for (const FacetUse& use : model.uses) {
    dirty[use.facet] |= use.dirties() ? 1 : 0;
  }
  return dirty;
}

// The link's seconds that an interval spares when it takes up the offer instead of a swap. An int8 copy takes room,
// which whatever it displaces has to be loaded into again.
double SavedSeconds(const StepModel& model, uint32_t use, const Offer& offer, bool dirty) {
  const double bytes = static_cast<double>(model.bytes[model.uses[use].facet]);
  if (offer.kind == Offer::kInt8) {
    return (bytes - static_cast<double>(offer.bytes)) / model.link.load;
  }
  return bytes / model.link.load + (dirty ? bytes / model.link.unload : 0);
}

template <typename Visit>
void ForInside(const StepModel& model, const FacetUse& use, Visit visit) {
  const size_t count = model.positions();
  for (uint32_t step = 1; step < use.distance; ++step) {
    visit((use.position + step) % count);
  }
}

// The position at which an action becomes due.
uint32_t Due(const Action& action) {
  const bool after = action.kind == Action::kUnload || action.kind == Action::kDrop || action.kind == Action::kQuantize;
  return action.position + (after ? 1 : 0);
}

}  // namespace

std::vector<TakenOffer> RankOffers(const StepModel& model, const std::vector<Offer>& offers, bool recompute,
                                   bool int8) {
  const std::vector<uint8_t> dirty = EverDirty(model);
  std::vector<std::vector<const Offer*>> by_facet(model.bytes.size());
  for (const Offer& offer : offers) {
    if (offer.kind == Offer::kRecompute ? recompute : int8) {
      by_facet[offer.facet].push_back(&offer);
    }
  }
  std::vector<std::pair<double, TakenOffer>> ranked;
  constexpr double kNoCost = 1e-12;
  for (uint32_t u = 0; u < model.uses.size(); ++u) {
    const FacetUse& use = model.uses[u];
    if (!use.next_needs_content || use.distance < 2) {
      continue;  // nothing to spare: the content is dead, or used again at once
    }
    std::pair<double, TakenOffer> best{-1, {}};
    for (const Offer* offer : by_facet[use.facet]) {
      const double saved = SavedSeconds(model, u, *offer, dirty[use.facet] != 0);
      if (saved / (offer->seconds + kNoCost) > best.first) {
        best = {saved / (offer->seconds + kNoCost), {u, *offer, saved}};
      }
    }
    if (best.first > 0) {
      ranked.push_back(best);
    }
  }
  std::stable_sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  std::vector<TakenOffer> result;
  for (const auto& [ratio, taken] : ranked) {
    result.push_back(taken);
  }
  return result;
}

StepModel TakeOffers(const StepModel& model, size_t count, std::vector<TakenOffer>* ranked) {
  const std::vector<uint8_t> dirty = EverDirty(model);
  StepModel step = model;
  std::vector<TakenOffer> fit;
  for (size_t i = 0; i < std::min(count, ranked->size()); ++i) {
    const TakenOffer& taken = (*ranked)[i];
    FacetUse& use = step.uses[taken.use];
    FacetUse& next = step.uses[use.next];
    if (taken.offer.kind == Offer::kInt8) {
      const auto bytes = static_cast<int64_t>(taken.offer.bytes);
      bool fits = true;
      ForInside(step, use, [&](size_t p) { fits = fits && step.capacity[p] - step.used[p] >= bytes; });
      if (!fits) {
        continue;
      }
      ForInside(step, use, [&](size_t p) { step.capacity[p] -= bytes; });
    } else {
      use.access |= kDiscard;
      // What is made anew may differ from what the tier below holds: it is dirty then.
      next.access |= dirty[use.facet] != 0 ? kCreate : 0;
    }
    use.next_needs_content = false;
    next.needs_content = false;
    step.compute[next.position] += taken.offer.seconds;
    step.compute_total += taken.offer.seconds;
    fit.push_back(taken);
  }
  *ranked = std::move(fit);
  return step;
}

std::vector<TakenOffer> StateOffers(const StepModel& model, const std::vector<TakenOffer>& taken, Plan* plan) {
  std::vector<TakenOffer> stated;
  const auto count = static_cast<uint32_t>(model.positions());
  for (const TakenOffer& one : taken) {
    const FacetUse& use = model.uses[one.use];
    const uint32_t back = model.uses[use.next].position;
    if (one.offer.kind == Offer::kRecompute) {
      plan->offer_seconds += one.offer.seconds;
      stated.push_back(one);
      plan->actions.push_back({use.position, Action::kDrop, use.facet});
      plan->actions.push_back({back, Action::kRecompute, use.facet});
      continue;
    }
    // The plan lets the facet go somewhere in the interval, unless there was room for all of it.
    const auto leaves = std::find_if(plan->actions.begin(), plan->actions.end(), [&](const Action& action) {
      return action.kind == Action::kUnload && action.facet == use.facet &&
             (action.position + count - use.position) % count < use.distance;
    });
    if (leaves != plan->actions.end()) {
      plan->offer_seconds += one.offer.seconds;
      stated.push_back(one);
      leaves->kind = Action::kQuantize;
      plan->actions.push_back({back, Action::kDequantize, use.facet});
    }
  }
  std::stable_sort(plan->actions.begin(), plan->actions.end(),
                   [](const Action& a, const Action& b) { return Due(a) < Due(b); });
  return stated;
}

}  // namespace misa::policy
