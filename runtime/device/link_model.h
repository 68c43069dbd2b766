// When copies over a link end: a pure model on whatever clock its caller has.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "runtime/device/link.h"
#include "runtime/policy/planner.h"

namespace misa {

struct LinkModelOptions {
  // A direction's rate alone, and while the other direction moves bytes too.
  policy::LinkRates rates;
  // Before a copy's first byte moves; the direction is idle in that time.
  double latency_seconds = 0;

  // "" or a sentence: every rate finite and above 0, a direction never faster beside the other than alone.
  std::string Check() const;
};

// One copy engine for each direction: copies of a direction run one after the other, in order. A copy that was queued
// when the one before it ended begins at that very moment, however late the caller looks, so that lateness never adds up.
class LinkModel {
 public:
  using Direction = Transfer::Direction;
  struct Ended {
    uint64_t tag = 0;
    double seconds = 0;  // on the caller's clock
  };

  explicit LinkModel(const LinkModelOptions& options) : options_(options) {}

  // `now` never goes back; one before the last call's is taken as that one.
  void Submit(Direction direction, uint64_t bytes, uint64_t tag, double now);
  // The copies that ended up to `now` and were not taken yet, in the order in which they ended.
  std::vector<Ended> TakeEnded(double now);
  // When the next copy ends, if nothing else is submitted; infinity where none is under way.
  double NextEnd() const;
  bool idle() const { return engines_[0].queue.empty() && engines_[1].queue.empty(); }

 private:
  struct Copy {
    uint64_t tag = 0;
    double latency_left = 0;
    double bytes_left = 0;
  };
  struct Engine {
    std::deque<Copy> queue;
  };

  double Rate(size_t direction) const;
  // Seconds until something changes: a latency is over, or a copy ends.
  double NextChange() const;
  // Lets so many seconds pass, at most NextChange(). True where a copy ended.
  bool Pass(double seconds);
  void AdvanceTo(double now);

  LinkModelOptions options_;
  double now_ = 0;
  Engine engines_[2];
  std::vector<Ended> ended_;
};

}  // namespace misa
