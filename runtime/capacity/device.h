// Devices as a planner sees them: memory, arithmetic, and the link to the tier below.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/policy/planner.h"

namespace misa::capacity {

struct DeviceProfile {
  std::string name;
  uint64_t capacity_bytes = 0;
  // Dense bf16, and the share of it that training reaches in its matrices (model FLOPs over time).
  double flops_per_second = 0;
  double utilization = 1;
  // fp32's rate (TF32 where the device has it) as a share of bf16's.
  double fp32_share = 1;
  double h2d_bytes_per_second = 0;
  double d2h_bytes_per_second = 0;
  double total_bytes_per_second = 0;  // both ways at once
  double latency_seconds = 0;         // before each copy
  // Of the device's own memory: what an optimizer's pass takes. 0: not known, and the pass counts as free.
  double memory_bytes_per_second = 0;
  uint64_t host_bytes = 0;      // memory of the tier below; 0: not known
  uint64_t base_line_bytes = 0; // what the driver's context and the libraries take
  uint64_t chunk_bytes = 0;     // facets are multiples of it
  double watermark = 0;         // share of the capacity that is not given out
};

// "" or a sentence.
std::string CheckDevice(const DeviceProfile& device);
policy::LinkRates LinkOf(const DeviceProfile& device);

const std::vector<DeviceProfile>& KnownDevices();
std::string KnownDeviceNames();
const DeviceProfile* FindDevice(const std::string& name);

// From JSON: name, capacity_bytes, flops_per_second (as reached, unless "utilization" is given), h2d_bytes_per_second,
// d2h_bytes_per_second, total_bytes_per_second, host_bytes; by choice utilization, fp32_share, memory_bytes_per_second,
// base_line_bytes, chunk_bytes, watermark, latency_seconds. A sentence that names what is missing, unknown or impossible.
policy::Result<DeviceProfile> ParseDevice(const std::string& text);

}  // namespace misa::capacity
