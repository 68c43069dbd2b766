#include "runtime/device/link_model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace misa {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
// Less than this is nothing: bytes are whole, and rounding must not leave a part of one behind.
constexpr double kLeastBytes = 1e-3;
constexpr double kLeastSeconds = 1e-12;

size_t Index(Transfer::Direction direction) { return direction == Transfer::Direction::kLoad ? 0 : 1; }

}  // namespace

std::string LinkModelOptions::Check() const {
  for (const double rate : {rates.load, rates.unload, rates.duplex_load, rates.duplex_unload}) {
    if (!std::isfinite(rate) || rate <= 0) {
      return "A modelled link needs four rates in bytes per second above 0; one is " + std::to_string(rate) + ".";
    }
  }
  if (rates.duplex_load > rates.load || rates.duplex_unload > rates.unload) {
    return "A modelled link cannot be faster in a direction while the other one is busy than it is alone.";
  }
  if (!std::isfinite(latency_seconds) || latency_seconds < 0) {
    return "A modelled link's latency must be 0 or more seconds, and is " + std::to_string(latency_seconds) + ".";
  }
  return "";
}

void LinkModel::Submit(Direction direction, uint64_t bytes, uint64_t tag, double now) {
  AdvanceTo(now);
  engines_[Index(direction)].queue.push_back({tag, options_.latency_seconds, static_cast<double>(bytes)});
}

std::vector<LinkModel::Ended> LinkModel::TakeEnded(double now) {
  AdvanceTo(now);
  return std::exchange(ended_, {});
}

double LinkModel::NextEnd() const {
  if (!ended_.empty()) return ended_.front().seconds;
  LinkModel ahead(options_);
  ahead.now_ = now_;
  // One copy of each direction decides.
  for (size_t i = 0; i < 2; ++i) {
    if (!engines_[i].queue.empty()) ahead.engines_[i].queue.push_back(engines_[i].queue.front());
  }
  while (!ahead.idle()) {
    const double change = ahead.NextChange();
    ahead.now_ += change;
    if (ahead.Pass(change)) return ahead.now_;
  }
  return kNever;
}

double LinkModel::Rate(size_t direction) const {
  const auto flows = [this](size_t i) {
    return !engines_[i].queue.empty() && engines_[i].queue.front().latency_left <= 0;
  };
  const bool both = flows(0) && flows(1);
  if (direction == 0) return both ? options_.rates.duplex_load : options_.rates.load;
  return both ? options_.rates.duplex_unload : options_.rates.unload;
}

double LinkModel::NextChange() const {
  double next = kNever;
  for (size_t i = 0; i < 2; ++i) {
    if (engines_[i].queue.empty()) continue;
    const Copy& copy = engines_[i].queue.front();
    next = std::min(next, copy.latency_left > 0 ? copy.latency_left : copy.bytes_left / Rate(i));
  }
  return next;
}

bool LinkModel::Pass(double seconds) {
  // Rates of the whole time, before anything of it is booked.
  const double rates[2] = {Rate(0), Rate(1)};
  bool ended = false;
  for (size_t i = 0; i < 2; ++i) {
    Engine& engine = engines_[i];
    if (engine.queue.empty()) continue;
    Copy& copy = engine.queue.front();
    if (copy.latency_left > 0) {
      copy.latency_left -= seconds;
      if (copy.latency_left < kLeastSeconds) copy.latency_left = 0;
      if (copy.latency_left > 0 || copy.bytes_left > 0) continue;
    } else {
      copy.bytes_left -= seconds * rates[i];
    }
    if (copy.bytes_left > kLeastBytes) continue;
    ended_.push_back({copy.tag, now_});
    engine.queue.pop_front();
    ended = true;
  }
  return ended;
}

void LinkModel::AdvanceTo(double now) {
  while (now_ < now) {
    const double change = NextChange();
    if (change > now - now_) {
      const double passed = now - now_;
      now_ = now;
      if (change < kNever) Pass(passed);
      return;
    }
    now_ += change;
    Pass(change);
  }
}

}  // namespace misa
