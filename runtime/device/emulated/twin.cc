#include "runtime/device/emulated/twin.h"

namespace misa::device {

const std::vector<Twin>& Twins() {
  // PCIe 4.0 x16: 26 GB/s one way, 18 to 20 each way at once. No measurement of PCIe 5.0 both ways is known to us; the same
  // share is assumed.
  constexpr double kDuplex = 19.0 / 26.0;
  static const std::vector<Twin> twins = {
      {"rtx-3090", "RTX 3090 on PCIe 4.0", 2000, kDuplex},
      {"a100-80g", "A100 80 GB on PCIe 4.0 (150 TFLOP/s, 26 GB/s)", 5800, kDuplex},
      {"h200", "H200 on PCIe 5.0 (450 TFLOP/s, 55 GB/s)", 8200, kDuplex},
  };
  return twins;
}

const Twin* FindTwin(const std::string& name) {
  for (const Twin& twin : Twins()) {
    if (twin.name == name) return &twin;
  }
  return nullptr;
}

std::string TwinNames() {
  std::string names;
  for (const Twin& twin : Twins()) names += (names.empty() ? "" : ", ") + twin.name;
  return names;
}

policy::LinkRates TwinRates(const Twin& twin, double flops, double element_bytes, double duplex_factor) {
  const double rate = element_bytes / 2 * flops / twin.hiding_tokens;
  return {rate, rate, duplex_factor * rate, duplex_factor * rate};
}

}  // namespace misa::device
