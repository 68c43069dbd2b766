#include "runtime/capacity/device.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

namespace misa::capacity {
namespace {

using nlohmann::json;

constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr uint64_t kMostBytes = uint64_t{1} << 58;
// A context takes 120 to 550 MB, the matrix libraries' workspace the rest.
constexpr uint64_t kCudaBaseLine = uint64_t{600} << 20;
constexpr uint64_t kCudaChunk = uint64_t{2} << 20;
constexpr uint64_t kCpuChunk = uint64_t{64} << 10;
constexpr double kWatermark = 0.1;

DeviceProfile Gpu(const char* name, uint64_t gibibytes, double tflops, double utilization, double link_gb,
                  double both_gb, double memory_gb) {
  DeviceProfile device;
  device.name = name;
  device.capacity_bytes = gibibytes * kGiB;
  device.flops_per_second = tflops * 1e12;
  device.utilization = utilization;
  device.fp32_share = 0.5;
  device.h2d_bytes_per_second = link_gb * 1e9;
  device.d2h_bytes_per_second = link_gb * 1e9;
  device.total_bytes_per_second = both_gb * 1e9;
  device.memory_bytes_per_second = memory_gb * 1e9;
  device.base_line_bytes = kCudaBaseLine;
  device.chunk_bytes = kCudaChunk;
  device.watermark = kWatermark;
  return device;
}

std::string CheckPositive(const std::string& name, double value, bool zero_allowed) {
  if (std::isfinite(value) && (value > 0 || (zero_allowed && value == 0))) {
    return "";
  }
  return "The device's " + name + " is " + std::to_string(value) + "; it must be a finite number " +
         (zero_allowed ? "of at least 0." : "above 0.");
}

}  // namespace

std::string CheckDevice(const DeviceProfile& device) {
  const struct {
    const char* name;
    double value;
    bool zero_allowed;
  } numbers[] = {
      {"flops_per_second", device.flops_per_second, false},
      {"utilization", device.utilization, false},
      {"fp32_share", device.fp32_share, false},
      {"h2d_bytes_per_second", device.h2d_bytes_per_second, false},
      {"d2h_bytes_per_second", device.d2h_bytes_per_second, false},
      {"total_bytes_per_second", device.total_bytes_per_second, false},
      {"memory_bytes_per_second", device.memory_bytes_per_second, true},
      {"watermark", device.watermark, true},
      {"latency_seconds", device.latency_seconds, true},
  };
  for (const auto& [name, value, zero_allowed] : numbers) {
    if (std::string error = CheckPositive(name, value, zero_allowed); !error.empty()) {
      return error;
    }
  }
  if (device.utilization > 1 || device.fp32_share > 1 || device.watermark >= 1) {
    return "The device's utilization and fp32_share are shares of at most 1, and its watermark one below 1.";
  }
  if (device.total_bytes_per_second < std::max(device.h2d_bytes_per_second, device.d2h_bytes_per_second) * 0.5) {
    return "The device's total_bytes_per_second is less than half of what one direction does alone; it is the rate of "
           "both directions together.";
  }
  for (const auto& [name, bytes] :
       {std::pair{"capacity_bytes", device.capacity_bytes}, std::pair{"chunk_bytes", device.chunk_bytes}}) {
    if (bytes == 0 || bytes > kMostBytes) {
      return std::string("The device's ") + name + " is " + std::to_string(bytes) +
             "; it must be above 0 and at most 2^58.";
    }
  }
  if (device.chunk_bytes > kGiB || device.host_bytes > kMostBytes) {
    return "The device's chunk_bytes is at most 1 GiB and its host_bytes at most 2^58.";
  }
  const double left = static_cast<double>(device.capacity_bytes) * (1 - device.watermark);
  if (static_cast<double>(device.base_line_bytes) >= left) {
    return "The device's base_line_bytes leave nothing of its capacity_bytes.";
  }
  return "";
}

policy::LinkRates LinkOf(const DeviceProfile& device) {
  policy::LinkRates link;
  link.load = device.h2d_bytes_per_second;
  link.unload = device.d2h_bytes_per_second;
  const double share = std::min(1.0, device.total_bytes_per_second / (link.load + link.unload));
  link.duplex_load = link.load * share;
  link.duplex_unload = link.unload * share;
  return link;
}

// Rates of vendors' sheets for dense bf16; utilization from what training reaches on them: about 50 TFLOP/s on an RTX
// 3090, 150 on an A100, 450 on an H100 or H200. Links: pinned memory, PCIe 4 x16 for the first four.
const std::vector<DeviceProfile>& KnownDevices() {
  static const std::vector<DeviceProfile> devices = {
      Gpu("rtx-3090", 24, 71, 0.70, 26, 38, 936),  Gpu("rtx-4090", 24, 165, 0.60, 26, 38, 1008),
      Gpu("a100-40g", 40, 312, 0.48, 26, 38, 1555), Gpu("a100-80g", 80, 312, 0.48, 26, 38, 2039),
      Gpu("h100", 80, 989, 0.455, 55, 80, 3350),   Gpu("h200", 140, 989, 0.455, 55, 80, 4800),
  };
  return devices;
}

std::string KnownDeviceNames() {
  std::string names;
  for (const DeviceProfile& device : KnownDevices()) {
    names += (names.empty() ? "" : ", ") + device.name;
  }
  return names;
}

const DeviceProfile* FindDevice(const std::string& name) {
  const auto found = std::find_if(KnownDevices().begin(), KnownDevices().end(),
                                  [&](const DeviceProfile& device) { return device.name == name; });
  return found == KnownDevices().end() ? nullptr : &*found;
}

policy::Result<DeviceProfile> ParseDevice(const std::string& text) {
  policy::Result<DeviceProfile> result;
  const auto fail = [&](const std::string& what) {
    result.value = {};
    result.error = what;
    return result;
  };
  const json in = json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!in.is_object()) {
    return fail("The device's description is not a JSON object.");
  }
  DeviceProfile& device = result.value;
  device.chunk_bytes = kCpuChunk;
  const struct {
    const char* name;
    double* value;
    bool needed;
  } numbers[] = {
      {"flops_per_second", &device.flops_per_second, true},
      {"utilization", &device.utilization, false},
      {"fp32_share", &device.fp32_share, false},
      {"h2d_bytes_per_second", &device.h2d_bytes_per_second, true},
      {"d2h_bytes_per_second", &device.d2h_bytes_per_second, true},
      {"total_bytes_per_second", &device.total_bytes_per_second, true},
      {"memory_bytes_per_second", &device.memory_bytes_per_second, false},
      {"watermark", &device.watermark, false},
      {"latency_seconds", &device.latency_seconds, false},
  };
  const struct {
    const char* name;
    uint64_t* value;
    bool needed;
  } sizes[] = {
      {"capacity_bytes", &device.capacity_bytes, true},
      {"host_bytes", &device.host_bytes, true},
      {"base_line_bytes", &device.base_line_bytes, false},
      {"chunk_bytes", &device.chunk_bytes, false},
  };
  std::vector<std::string> keys = {"name"};
  for (const auto& [name, value, needed] : numbers) {
    keys.emplace_back(name);
    if (!in.contains(name)) {
      if (needed) {
        return fail(std::string("The device's description lacks \"") + name + "\".");
      }
      continue;
    }
    if (!in[name].is_number()) {
      return fail(std::string("The device's \"") + name + "\" is " + in[name].dump() + ", and must be a number.");
    }
    *value = in[name].get<double>();
  }
  for (const auto& [name, value, needed] : sizes) {
    keys.emplace_back(name);
    if (!in.contains(name)) {
      if (needed) {
        return fail(std::string("The device's description lacks \"") + name + "\".");
      }
      continue;
    }
    // Measured sizes come as 1.6e10 as well.
    const double number = in[name].is_number() ? in[name].get<double>() : -1;
    if (!(number >= 0 && number <= static_cast<double>(kMostBytes))) {
      return fail(std::string("The device's \"") + name + "\" is " + in[name].dump() +
                  ", and must be a number of bytes between 0 and 2^58.");
    }
    *value = in[name].is_number_unsigned() ? in[name].get<uint64_t>() : static_cast<uint64_t>(number);
  }
  if (!in.contains("name") || !in["name"].is_string() || in["name"].get<std::string>().empty()) {
    return fail("The device's description lacks \"name\".");
  }
  device.name = in["name"].get<std::string>();
  for (const auto& [key, value] : in.items()) {
    // A misspelt key must not silently leave its default in force.
    if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
      std::string all;
      for (const std::string& name : keys) {
        all += (all.empty() ? "" : ", ") + name;
      }
      return fail("The device's description has the unknown key \"" + key + "\"; known are " + all + ".");
    }
  }
  if (const std::string wrong = CheckDevice(device); !wrong.empty()) {
    return fail(wrong);
  }
  return result;
}

}  // namespace misa::capacity
