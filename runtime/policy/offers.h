// Recomputation and int8 copies in a step's model: an interval that takes up an offer is one whose content is born
// anew.
#pragma once

#include <cstdint>
#include <vector>

#include "runtime/policy/planner.h"
#include "runtime/policy/step_model.h"

namespace misa::policy {

// An interval (from this use to the facet's next one) that takes up an offer.
struct TakenOffer {
  uint32_t use = 0;
  Offer offer;
  double saved_seconds = 0;  // of the link, at least
};

// Every interval with the offer that saves most of the link for its compute, of the kinds asked for; the best first.
std::vector<TakenOffer> RankOffers(const StepModel& model, const std::vector<Offer>& offers, bool recompute, bool int8);

// The step as it is when the first `count` of `ranked` are taken up. Those that do not fit beside the uses are left out
// of `ranked`.
StepModel TakeOffers(const StepModel& model, size_t count, std::vector<TakenOffer>* ranked);

// States them in a plan for that step. Returns those that the plan has use for: where there was room for all of a
// facet, its int8 copy is not.
std::vector<TakenOffer> StateOffers(const StepModel& model, const std::vector<TakenOffer>& taken, Plan* plan);

}  // namespace misa::policy
