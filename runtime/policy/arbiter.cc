#include "runtime/policy/arbiter.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>

#include "runtime/policy/step_model.h"

namespace misa::policy {
namespace {

// Differences in the share of time that is lost under this are noise.
constexpr double kEqualStall = 1e-3;

struct Knot {
  double bytes = 0;
  double stall = 0;  // share of time
};

// Share of time lost over bytes: piecewise linear, never rising, from a claim's least to its most.
std::vector<Knot> CurveOf(const Claim& claim) {
  const double least = static_cast<double>(claim.least_bytes);
  const double most = static_cast<double>(claim.most_bytes);
  std::vector<Knot> curve;
  if (claim.influence.empty()) {
    curve.push_back({least, 1});
    if (most > least) curve.push_back({most, 0});
    return curve;
  }
  std::vector<Knot> knots;
  double lowest = 1;
  for (const StallPoint& point : claim.influence) {
    const double share = point.step_seconds > 0 ? std::clamp(point.stall_seconds / point.step_seconds, 0.0, 1.0) : 0;
    // More memory never makes a plan worse: where it seems so, the planner missed the better one.
    lowest = std::min(lowest, share);
    knots.push_back({static_cast<double>(point.budget_bytes), lowest});
  }
  const auto at = [&](double bytes) {
    if (bytes <= knots.front().bytes) return knots.front().stall;
    for (size_t k = 1; k < knots.size(); ++k) {
      if (bytes > knots[k].bytes) continue;
      const double part = (bytes - knots[k - 1].bytes) / (knots[k].bytes - knots[k - 1].bytes);
      return knots[k - 1].stall + part * (knots[k].stall - knots[k - 1].stall);
    }
    return knots.back().stall;
  };
  curve.push_back({least, at(least)});
  for (const Knot& knot : knots) {
    if (knot.bytes > least && knot.bytes < most) curve.push_back(knot);
  }
  if (most > least) curve.push_back({most, at(most)});
  return curve;
}

double StallAt(const std::vector<Knot>& curve, double bytes) {
  if (bytes <= curve.front().bytes) return curve.front().stall;
  for (size_t k = 1; k < curve.size(); ++k) {
    if (bytes > curve[k].bytes) continue;
    const double part = (bytes - curve[k - 1].bytes) / (curve[k].bytes - curve[k - 1].bytes);
    return curve[k - 1].stall + part * (curve[k].stall - curve[k - 1].stall);
  }
  return curve.back().stall;
}

// The fewest bytes that lose no more than `stall`.
double FewestBytes(const std::vector<Knot>& curve, double stall) {
  if (curve.front().stall <= stall) return curve.front().bytes;
  for (size_t k = 1; k < curve.size(); ++k) {
    if (curve[k].stall > stall) continue;
    const double part = (curve[k - 1].stall - stall) / (curve[k - 1].stall - curve[k].stall);
    return curve[k - 1].bytes + part * (curve[k].bytes - curve[k - 1].bytes);
  }
  return curve.back().bytes;
}

struct Segment {
  double bytes = 0;
  double per_byte = 0;  // weighted share of time that a byte saves
};

// The lower convex hull of the curve between two budgets, so that what saves most comes first.
std::vector<Segment> HullSegments(const std::vector<Knot>& curve, double from, double to, double weight) {
  std::vector<Knot> hull;
  const auto add = [&](Knot knot) {
    while (hull.size() >= 2) {
      const Knot& a = hull[hull.size() - 2];
      const Knot& b = hull.back();
      if ((b.stall - a.stall) * (knot.bytes - b.bytes) < (knot.stall - b.stall) * (b.bytes - a.bytes)) break;
      hull.pop_back();
    }
    hull.push_back(knot);
  };
  add({from, StallAt(curve, from)});
  for (const Knot& knot : curve) {
    if (knot.bytes > from && knot.bytes < to) add(knot);
  }
  if (to > from) add({to, StallAt(curve, to)});
  std::vector<Segment> segments;
  for (size_t k = 1; k < hull.size(); ++k) {
    const double bytes = hull[k].bytes - hull[k - 1].bytes;
    segments.push_back({bytes, weight * (hull[k - 1].stall - hull[k].stall) / bytes});
  }
  return segments;
}

std::string CheckClaims(const std::vector<Claim>& claims, uint64_t available_bytes) {
  uint64_t least = 0;
  for (size_t i = 0; i < claims.size(); ++i) {
    const Claim& claim = claims[i];
    const std::string which = "claim " + std::to_string(i);
    if (!(claim.weight > 0) || !std::isfinite(claim.weight)) return which + " has a weight that is not above 0";
    if (claim.least_bytes > claim.most_bytes) {
      return which + " needs at least " + std::to_string(claim.least_bytes) + " bytes and asks for at most " +
             std::to_string(claim.most_bytes);
    }
    for (size_t k = 0; k < claim.influence.size(); ++k) {
      const StallPoint& point = claim.influence[k];
      if (!std::isfinite(point.stall_seconds) || !std::isfinite(point.step_seconds) || point.stall_seconds < 0 ||
          (k > 0 && point.budget_bytes <= claim.influence[k - 1].budget_bytes)) {
        return which + " has an influence that does not rise in its budgets or has a time that makes no sense";
      }
    }
    if (claim.least_bytes > available_bytes - std::min(least, available_bytes)) {
      return "the least that works for all (" + std::to_string(least + claim.least_bytes) + " bytes for the first " +
             std::to_string(i + 1) + ") is more than the " + std::to_string(available_bytes) + " bytes there are";
    }
    least += claim.least_bytes;
  }
  return "";
}

// Fills up in proportion to the weights, each from its least to its most.
std::vector<double> FillByWeight(const std::vector<Claim>& claims, const std::vector<double>& least,
                                 const std::vector<double>& most, double available) {
  // The level is a claim's bytes for each unit of weight. Between two of these levels the sum is linear in it.
  std::vector<double> levels;
  for (size_t i = 0; i < claims.size(); ++i) {
    levels.push_back(least[i] / claims[i].weight);
    levels.push_back(most[i] / claims[i].weight);
  }
  std::sort(levels.begin(), levels.end());
  const auto bytes_at = [&](size_t i, double level) { return std::clamp(level * claims[i].weight, least[i], most[i]); };
  const auto sum_at = [&](double level) {
    double sum = 0;
    for (size_t i = 0; i < claims.size(); ++i) sum += bytes_at(i, level);
    return sum;
  };
  // The last of the levels that fits, then as far beyond it as there is room.
  size_t low = 0, high = levels.size();
  while (high - low > 1) {
    const size_t middle = (low + high) / 2;
    (sum_at(levels[middle]) <= available ? low : high) = middle;
  }
  double level = levels[low];
  if (high < levels.size()) {
    const double below = sum_at(level);
    const double above = sum_at(levels[high]);
    if (above > below) level += (levels[high] - level) * (available - below) / (above - below);
  }
  std::vector<double> bytes(claims.size());
  for (size_t i = 0; i < claims.size(); ++i) bytes[i] = bytes_at(i, level);
  return bytes;
}

std::vector<double> LeastBytes(const std::vector<Claim>& claims) {
  std::vector<double> least;
  for (const Claim& claim : claims) least.push_back(static_cast<double>(claim.least_bytes));
  return least;
}

// The most that is of use: beyond it no stall is saved.
std::vector<double> UsefulBytes(const std::vector<Claim>& claims, const std::vector<std::vector<Knot>>& curves) {
  std::vector<double> useful;
  for (size_t i = 0; i < claims.size(); ++i) {
    const bool known = !claims[i].influence.empty();
    useful.push_back(known ? FewestBytes(curves[i], curves[i].back().stall + kEqualStall)
                           : static_cast<double>(claims[i].most_bytes));
  }
  return useful;
}

std::vector<std::vector<Knot>> CurvesOf(const std::vector<Claim>& claims) {
  std::vector<std::vector<Knot>> curves;
  for (const Claim& claim : claims) curves.push_back(CurveOf(claim));
  return curves;
}

// Moves bytes from where they save little to where they save much.
class Trade {
 public:
  Trade(const std::vector<Claim>& claims, const std::vector<std::vector<Knot>>& curves,
        const std::vector<double>& useful, const ArbiterOptions& options, std::vector<double>* bytes)
      : claims_(claims), curves_(curves), useful_(useful), options_(options), bytes_(*bytes), shares_(*bytes) {}

  void Run() {
    GiveUpPlateaus();
    HandOut();
    Exchange();
  }

 private:
  bool known(size_t i) const { return !claims_[i].influence.empty(); }
  double Saved(size_t i, double from, double to) const {
    return claims_[i].weight * (StallAt(curves_[i], from) - StallAt(curves_[i], to));
  }
  // What a claim could get from where it is, best first, at the back.
  std::vector<Segment> Gets(size_t i) const {
    std::vector<Segment> gets = HullSegments(curves_[i], bytes_[i], std::max(bytes_[i], useful_[i]), claims_[i].weight);
    std::reverse(gets.begin(), gets.end());
    return gets;
  }
  static size_t Best(const std::vector<std::vector<Segment>>& gets) {
    size_t best = gets.size();
    for (size_t i = 0; i < gets.size(); ++i) {
      if (!gets[i].empty() && (best == gets.size() || gets[i].back().per_byte > gets[best].back().per_byte)) best = i;
    }
    return best;
  }
  // On a curve with steps a part of a segment may save nothing, though the whole would.
  bool Worth(size_t i, double moved, const Segment& segment) const {
    return Saved(i, bytes_[i], bytes_[i] + moved) >= 0.5 * moved * segment.per_byte;
  }

  // Bytes that save their claim nothing.
  void GiveUpPlateaus() {
    for (size_t i = 0; i < claims_.size(); ++i) {
      if (!known(i)) continue;
      const double fewest = FewestBytes(curves_[i], StallAt(curves_[i], bytes_[i]));
      if (fewest >= bytes_[i]) continue;
      spare_ += bytes_[i] - fewest;
      bytes_[i] = fewest;
    }
  }

  void HandOut() {
    std::vector<std::vector<Segment>> gets;
    for (size_t i = 0; i < claims_.size(); ++i) gets.push_back(Gets(i));
    while (spare_ > 0) {
      const size_t i = Best(gets);
      if (i == gets.size() || gets[i].back().per_byte <= 0) return;
      Segment& segment = gets[i].back();
      const double moved = std::min(segment.bytes, spare_);
      if (!Worth(i, moved, segment)) {
        gets[i].clear();
        continue;
      }
      bytes_[i] += moved;
      spare_ -= moved;
      segment.bytes -= moved;
      if (segment.bytes <= 0) gets[i].pop_back();
    }
  }

  // What saves its claim something, up to a small part of its share, for what saves others clearly more.
  void Exchange() {
    const size_t count = claims_.size();
    std::vector<std::vector<Segment>> gets(count), gives(count);
    for (size_t i = 0; i < count; ++i) {
      if (!known(i)) continue;
      gets[i] = Gets(i);
      const double kept = std::max(static_cast<double>(claims_[i].least_bytes), (1 - options_.most_taken) * shares_[i]);
      const double fewest = std::min(bytes_[i], FewestBytes(curves_[i], StallAt(curves_[i], kept)));
      // What saves least is nearest to where it is, at the back.
      gives[i] = HullSegments(curves_[i], fewest, bytes_[i], claims_[i].weight);
    }
    while (true) {
      const size_t getter = Best(gets);
      if (getter == count || gets[getter].back().per_byte <= 0) return;
      size_t giver = count;
      for (size_t i = 0; i < count; ++i) {
        if (i == getter || gives[i].empty()) continue;
        if (giver == count || gives[i].back().per_byte < gives[giver].back().per_byte) giver = i;
      }
      if (giver == count) return;
      Segment& gain = gets[getter].back();
      Segment& loss = gives[giver].back();
      if (gain.per_byte < options_.least_gain * loss.per_byte) return;
      const double moved = std::min(gain.bytes, loss.bytes);
      const double saved = Saved(getter, bytes_[getter], bytes_[getter] + moved);
      const double lost = Saved(giver, bytes_[giver] - moved, bytes_[giver]);
      if (!Worth(getter, moved, gain) || saved < options_.least_gain * lost) {
        gets[getter].clear();
        continue;
      }
      bytes_[getter] += moved;
      bytes_[giver] -= moved;
      // A claim does one of the two.
      gives[getter].clear();
      gets[giver].clear();
      gain.bytes -= moved;
      loss.bytes -= moved;
      if (gain.bytes <= 0) gets[getter].pop_back();
      if (loss.bytes <= 0) gives[giver].pop_back();
    }
  }

  const std::vector<Claim>& claims_;
  const std::vector<std::vector<Knot>>& curves_;
  const std::vector<double>& useful_;
  const ArbiterOptions& options_;
  std::vector<double>& bytes_;
  const std::vector<double> shares_;
  double spare_ = 0;
};

uint64_t Round(double bytes, const Claim& claim, uint64_t granule) {
  const uint64_t whole = bytes > 0 ? static_cast<uint64_t>(bytes + 0.5) : 0;
  if (whole >= claim.most_bytes) return claim.most_bytes;
  return std::max(claim.least_bytes, whole / granule * granule);
}

bool Near(uint64_t a, uint64_t b, double share) {
  const double difference = std::abs(static_cast<double>(a) - static_cast<double>(b));
  return difference <= share * static_cast<double>(b);
}

}  // namespace

Result<std::vector<StallPoint>> MeasureInfluence(const PlanInput& input, size_t points) {
  Result<std::vector<StallPoint>> result;
  const uint64_t smallest = SmallestBudget(input) + input.reserve_bytes;
  std::vector<bool> used(input.facet_bytes.size(), false);
  uint64_t largest = input.reserve_bytes;
  uint64_t other = 0;
  for (const TraceEntry& entry : input.trace.entries) {
    other = std::max(other, entry.other_bytes);
    for (const Use& use : entry.uses) {
      if (use.facet >= used.size() || used[use.facet]) continue;
      used[use.facet] = true;
      largest += input.facet_bytes[use.facet];
    }
  }
  largest = std::max(largest + other, smallest);
  PlanInput at = input;
  for (size_t k = 0; k < points; ++k) {
    const double part = points > 1 ? static_cast<double>(k) / static_cast<double>(points - 1) : 1;
    at.budget_bytes = smallest + static_cast<uint64_t>(part * static_cast<double>(largest - smallest));
    if (!result.value.empty() && at.budget_bytes <= result.value.back().budget_bytes) continue;
    const Result<Plan> plan = MakePlan(at);
    if (!plan.ok()) {
      result.error = plan.error;
      return result;
    }
    result.value.push_back({at.budget_bytes, plan.value.stall_seconds, plan.value.step_seconds});
  }
  return result;
}

double StallShare(const Claim& claim, uint64_t budget_bytes) {
  return StallAt(CurveOf(claim), static_cast<double>(budget_bytes));
}

Result<std::vector<uint64_t>> WeightedShares(const std::vector<Claim>& claims, uint64_t available_bytes) {
  Result<std::vector<uint64_t>> result;
  result.error = CheckClaims(claims, available_bytes);
  if (!result.ok() || claims.empty()) return result;
  const std::vector<double> useful = UsefulBytes(claims, CurvesOf(claims));
  const std::vector<double> shares =
      FillByWeight(claims, LeastBytes(claims), useful, static_cast<double>(available_bytes));
  for (size_t i = 0; i < claims.size(); ++i) result.value.push_back(Round(std::floor(shares[i]), claims[i], 1));
  return result;
}

Result<std::vector<uint64_t>> Arbitrate(const std::vector<Claim>& claims, uint64_t available_bytes,
                                        const ArbiterOptions& options) {
  Result<std::vector<uint64_t>> result;
  result.error = CheckClaims(claims, available_bytes);
  if (!result.ok() || claims.empty()) return result;
  const std::vector<std::vector<Knot>> curves = CurvesOf(claims);
  const std::vector<double> useful = UsefulBytes(claims, curves);
  const double available = static_cast<double>(available_bytes);
  std::vector<double> bytes = FillByWeight(claims, LeastBytes(claims), useful, available);
  const std::vector<double> shares = bytes;
  Trade(claims, curves, useful, options, &bytes).Run();
  // What saves no stall as far as is known: a step may need more tomorrow, so it lies with those who asked for it.
  std::vector<double> most;
  for (size_t i = 0; i < claims.size(); ++i)
    most.push_back(std::max(bytes[i], static_cast<double>(claims[i].most_bytes)));
  bytes = FillByWeight(claims, bytes, most, available);

  std::vector<uint64_t> fresh;
  for (size_t i = 0; i < claims.size(); ++i) {
    // Down, never up: the sum must hold. What rounding loses is less than a granule for each.
    fresh.push_back(Round(std::floor(bytes[i]), claims[i], std::max<uint64_t>(1, options.granule_bytes)));
  }
  // A budget near to its new one stays, as long as all fit.
  result.value = fresh;
  for (size_t i = 0; i < claims.size(); ++i) {
    const uint64_t held = claims[i].held_bytes;
    if (held < claims[i].least_bytes || held > claims[i].most_bytes || !Near(fresh[i], held, options.hysteresis))
      continue;
    // Nor does staying make anybody worse off than what is promised.
    const double promised = (1 - options.most_taken - options.hysteresis) * shares[i];
    const double bytes_held = static_cast<double>(held);
    if (bytes_held < promised && StallAt(curves[i], bytes_held) > StallAt(curves[i], promised) + kEqualStall) continue;
    result.value[i] = held;
  }
  uint64_t sum = std::accumulate(result.value.begin(), result.value.end(), uint64_t{0});
  std::vector<size_t> order(claims.size());
  std::iota(order.begin(), order.end(), size_t{0});
  const auto excess = [&](size_t i) { return result.value[i] - std::min(result.value[i], fresh[i]); };
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return excess(a) != excess(b) ? excess(a) > excess(b) : a < b; });
  for (const size_t i : order) {
    if (sum <= available_bytes) break;
    sum -= excess(i);
    result.value[i] = std::min(result.value[i], fresh[i]);
  }
  return result;
}

}  // namespace misa::policy
