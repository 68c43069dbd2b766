// What the guards of a session may be told: by the configuration, for all of them.
#pragma once

#include <string>
#include <vector>

#include "runtime/guard/loss_stability.h"
#include "runtime/guard/loss_swings.h"
#include "runtime/guard/pins.h"
#include "runtime/guard/sparse_attention.h"

namespace misa::server {

struct GuardOptions {
  // Importance decides nothing until the loss is stable.
  bool wait_for_stable_loss = true;
  guard::StabilityOptions stability;
  // While the loss swings, alpha and the hot threshold are raised.
  bool watch_swings = true;
  guard::SwingOptions swings;
  guard::SwingResponse response;
  // Kinds or names of modules that keep their place before hot ones, where importance decides.
  std::vector<std::string> pins = guard::DefaultPins();
  // Words in the names of attention modules whose window is two thirds.
  std::vector<std::string> sparse_attention = guard::SparseAttentionWords();

  bool operator==(const GuardOptions&) const = default;
};

}  // namespace misa::server
