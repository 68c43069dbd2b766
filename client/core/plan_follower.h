// Records the trace of each step and follows a plan made for it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "runtime/policy/planner.h"
#include "runtime/policy/trace.h"

namespace misa {

// Not thread-safe; the executor's lock guards it.
class PlanFollower {
 public:
  // Of one step. What follows in the same step is executed like all else, but not recorded: a step that never ends (an
  // evaluation over a whole data set) must not fill the memory. It is not taken for a period then.
  static constexpr size_t kMostPositions = 1 << 19;

  // A new position of the step begins. Seconds since the previous position's begin, stalls taken out, and the peak of
  // other tensors since then, go to the previous position.
  void Begin(const policy::Use* uses, size_t count, double compute_seconds, uint64_t other_bytes);
  // More access to a facet of the present position.
  void AddAccess(uint32_t facet, uint8_t access);
  // The facet's content died: its last use in this step discards.
  void MarkDiscard(uint32_t facet);

  // The step has ended: its trace becomes the expected one, unless a section was followed in it (an evaluation between two
  // steps is no new way to train; where it comes in every step, the second equal one tells). Returns it with its digest.
  std::shared_ptr<const policy::Trace> EndStep(double compute_seconds, uint64_t other_bytes);
  uint64_t digest() const { return last_digest_; }

  // In force from the next EndStep on; a sentence where the plan does not fit the traces seen last.
  std::string Offer(std::shared_ptr<const policy::Plan> plan, uint64_t version, uint64_t trace_digest);
  uint64_t version() const { return plan_ ? version_ : 0; }

  // A period inside steps (evaluation, accumulation), with a plan of one period for it, in place of the one of this key. Once
  // a plan is in force for the steps, uses that leave the expected trace where the section begins again are followed round
  // and round in it, until they leave that.
  void SetSection(uint32_t key, std::shared_ptr<const policy::Trace> trace, std::shared_ptr<const policy::Plan> plan);
  bool in_section() const { return section_ != nullptr; }

  // Actions of the plan that are due at the present position, in order; where positions were left out, what is left of
  // theirs (policy::CatchUp). A load is due when its position has begun; an unload when a later position than its own has.
  void TakeDue(std::vector<policy::Action>* actions);
  // All of this period's that the step's end leaves over.
  void TakeRest(std::vector<policy::Action>* actions);

  // Distance in positions to the facet's next use by the expected trace; UINT32_MAX where it has none or no trace is known.
  uint32_t NextUse(uint32_t facet) const;
  bool knows_trace() const { return expected_.trace != nullptr; }
  uint64_t departures() const { return departures_; }
  // Position in the expected trace, for events.
  uint32_t cursor() const { return cursor_; }

 private:
  // A trace to find positions in.
  struct Path {
    std::shared_ptr<const policy::Trace> trace;
    std::vector<uint64_t> groups;
    std::unordered_map<uint32_t, std::vector<uint32_t>> positions;  // facet -> its positions, ascending

    void Set(std::shared_ptr<const policy::Trace> of);
    // Distance in positions from `now` on to the facet's next use, round and round; UINT32_MAX where it has none.
    uint32_t NextUse(uint32_t facet, uint32_t now) const;
  };
  struct Section {
    Path path;
    std::shared_ptr<const policy::Plan> plan;
  };

  static uint64_t GroupHash(const policy::Use* uses, size_t count);
  static uint64_t PairHash(uint64_t before, uint64_t now) { return before * 0x9e3779b97f4a7c15ull + now; }
  void InstallExpected(std::shared_ptr<const policy::Trace> trace);
  // The use goes on in a section; true where one was entered.
  bool EnterSection(uint64_t before, uint64_t hash);
  // The use, which is not the section's next, goes on in the expected trace, somewhere.
  void LeaveSection(uint64_t hash);
  void TakeSectionDue(std::vector<policy::Action>* actions);
  // What takes the device from anywhere to the plan's steady state at a position, with `due` of its actions behind it:
  // first what has to go, then what has to come in the order of its use.
  static void Enter(const policy::Plan& plan, const Path& path, size_t due, uint32_t position,
                    std::vector<policy::Action>* actions);
  // The plan's actions up to `end`, at `position` of its cycle.
  void TakeUpTo(size_t end, uint32_t position, bool skipped, std::vector<policy::Action>* actions);
  void NextPeriod();

  policy::Trace recording_;
  bool cut_off_ = false;  // the step had more positions than are recorded
  Path expected_;
  std::unordered_set<uint64_t> expected_pairs_;  // of positions that follow each other
  uint64_t expected_digest_ = 0;
  uint64_t last_digest_ = 0;  // of the step before
  uint64_t previous_digest_ = 0;
  uint32_t previous_positions_ = 0;  // of the step with that digest
  uint32_t cursor_ = 0;
  bool begun_ = false;  // a position of this step has begun
  bool skipped_ = false;  // positions were left out since actions were last taken
  uint64_t departures_ = 0;

  std::shared_ptr<const policy::Plan> plan_;
  std::shared_ptr<const policy::Plan> offered_;
  uint64_t version_ = 0;
  uint64_t offered_version_ = 0;
  uint32_t offered_positions_ = 0;
  uint32_t plan_positions_ = 0;  // of one period of the plan
  uint32_t period_ = 0;          // of the plan's cycle
  size_t next_action_ = 0;

  std::map<uint32_t, Section> sections_;
  Section* section_ = nullptr;  // that is followed now
  uint32_t section_cursor_ = 0;
  size_t section_action_ = 0;  // the next one
  bool section_entered_ = false;  // and nothing was taken since
  std::vector<policy::Action> section_rest_;  // that its last round left over
  bool strayed_ = false;  // a section was followed in this step
  bool reenter_ = false;  // the device is not as the plan expects it: a section was followed since
  uint64_t last_hash_ = 0;
};

}  // namespace misa
