// Scaled twins: emulated devices whose link stands to this machine's compute as a real GPU's link stands to the GPU's.
#pragma once

#include <string>
#include <vector>

#include "runtime/device/link_model.h"

namespace misa::device {

// What carries over from the real device. A layer of P parameters takes 2 P t operations for t tokens of forward, and its
// weights of e bytes an element take e P / B seconds over a link of B bytes a second. So with F operations a second the
// tokens whose forward hides the load are tau = (e / 2) F / B. That number is what a twin keeps.
struct Twin {
  std::string name;
  std::string description;
  double hiding_tokens = 0;   // tau, for the 2-byte weights the device trains with
  double duplex_factor = 0;   // a direction's rate beside the other one, as a part of its rate alone
};

const std::vector<Twin>& Twins();
// nullptr where there is none of this name.
const Twin* FindTwin(const std::string& name);
// "rtx-3090, a100-80g, h200".
std::string TwinNames();

// Before each copy moves: what a driver's copy call takes on real devices.
inline constexpr double kDefaultLatencySeconds = 10e-6;

// The link on which a trainer with `element_bytes` an element, computing `flops` operations a second, has the twin's tau:
// B = (e / 2) F / tau in either direction. Here elements have 4 bytes (float32) where the device has 2, so that B is twice
// what 2-byte elements would get: time against compute is the same, bytes are doubled on both sides.
policy::LinkRates TwinRates(const Twin& twin, double flops, double element_bytes, double duplex_factor);

}  // namespace misa::device
