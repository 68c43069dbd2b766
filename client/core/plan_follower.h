// Records the trace of each step and follows the plan made for it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/policy/planner.h"
#include "runtime/policy/trace.h"
#include "runtime/predict/bidder.h"
#include "runtime/predict/recent.h"

namespace misa {

// Steps need not be alike: tasks take turns, an evaluation comes in between. The last few different traces are remembered,
// each with its plan; at a step's end the next one's trace is predicted (runtime/predict), and a step that turns out to be
// another one of those is followed from where that shows.
// Not thread-safe; the executor's lock guards it.
class PlanFollower {
 public:
  // Of one step, and of all that are remembered. What follows in the same step is executed like all else, but not recorded: a
  // step that never ends (an evaluation over a whole data set) must not fill the memory. It is not taken for a period then.
  static constexpr size_t kMostPositions = 1 << 19;

  PlanFollower();

  // A new position of the step begins. Seconds since the previous position's begin, stalls taken out, and the peak of
  // other tensors since then, go to the previous position.
  void Begin(const policy::Use* uses, size_t count, double compute_seconds, uint64_t other_bytes);
  // More access to a facet of the present position.
  void AddAccess(uint32_t facet, uint8_t access);
  // The facet's content died: its last use in this step discards.
  void MarkDiscard(uint32_t facet);

  // The step has ended: the trace of the next one is expected from here on. Returns what the ended one had.
  std::shared_ptr<const policy::Trace> EndStep(double compute_seconds, uint64_t other_bytes);
  // Of the last step that was recorded whole.
  uint64_t digest() const { return ended_digest_; }
  // Of the trace that is expected now; 0 before the first step's end.
  uint64_t expected_digest() const { return expected_ != nullptr ? expected_->digest : 0; }

  // In force in the steps that are expected to have this trace, from the next EndStep on; a sentence where the plan does not
  // fit any trace that is remembered. A step whose own trace has no plan keeps to the newest one.
  std::string Offer(std::shared_ptr<const policy::Plan> plan, uint64_t version, uint64_t trace_digest);
  uint64_t version() const { return plan_ ? version_ : 0; }

  // Actions of the plan that are due at the present position, in order; where positions were left out, what is left of
  // theirs (policy::CatchUp). A load is due when its position has begun; an unload when a later position than its own has.
  // Where the step before was another one, loads of what the plan finds on the device at its start come first.
  void TakeDue(std::vector<policy::Action>* actions);
  // All of this period's that the step's end leaves over.
  void TakeRest(std::vector<policy::Action>* actions);

  // Distance in positions to the facet's next use by the expected trace; UINT32_MAX where it has none or no trace is known.
  uint32_t NextUse(uint32_t facet) const;
  // The step before was another one than this, so the device holds what this one's plan does not reckon with.
  bool entered() const { return entered_; }
  // Of the first `count` facets those that the plan does not count on at the present position, farthest next use first.
  std::vector<uint32_t> Leftovers(uint32_t count) const;
  bool knows_trace() const { return expected_ != nullptr; }
  uint64_t departures() const { return departures_; }
  // Position in the expected trace, for events.
  uint32_t cursor() const { return cursor_; }

 private:
  // A trace that steps had, and what belongs to it.
  struct Known {
    uint64_t digest = 0;
    std::shared_ptr<const policy::Trace> trace;
    std::vector<uint64_t> groups;    // hash of each position's
    std::vector<uint64_t> prefixes;  // of all groups up to each position
    std::unordered_map<uint32_t, std::vector<uint32_t>> positions;  // facet -> its positions, ascending
    std::shared_ptr<const policy::Plan> plan;
    uint64_t version = 0;
    // What the plan finds on the device at its start, in the order of first use.
    std::vector<policy::Action> entry;
  };

  static uint64_t GroupHash(const policy::Use* uses, size_t count);
  Known* Remember(std::shared_ptr<const policy::Trace> trace, uint64_t digest);
  // Another trace that is remembered and is this step's up to the present position; nullptr where there is none.
  Known* SameSoFar();
  void Follow(std::shared_ptr<const policy::Plan> plan, uint64_t version, uint32_t positions);
  // The plan's actions up to `end`, at `position` of its cycle.
  void TakeUpTo(size_t end, uint32_t position, bool skipped, std::vector<policy::Action>* actions);
  void NextPeriod();

  policy::Trace recording_;
  uint64_t prefix_ = 0;  // of the groups of this step
  bool cut_off_ = false;  // the step had more positions than are recorded
  predict::Recent<Known> known_;
  std::unique_ptr<predict::Bidder> bidder_;  // over digests
  Known* expected_ = nullptr;                // among known_
  uint64_t ended_digest_ = 0;
  uint32_t cursor_ = 0;
  bool begun_ = false;  // a position of this step has begun
  bool skipped_ = false;  // positions were left out since actions were last taken
  bool entered_ = false;
  bool enter_ = false;  // what the plan starts from is still to be asked for
  uint64_t departures_ = 0;

  std::shared_ptr<const policy::Plan> plan_;
  uint64_t version_ = 0;
  // The newest one, until the next EndStep.
  std::shared_ptr<const policy::Plan> offered_;
  uint64_t offered_version_ = 0;
  uint32_t offered_positions_ = 0;
  uint32_t plan_positions_ = 0;  // of one period of the plan
  uint32_t period_ = 0;          // of the plan's cycle
  size_t next_action_ = 0;
};

}  // namespace misa
