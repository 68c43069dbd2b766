#include "runtime/device/cpu/properties.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>
#include <vector>

namespace misa::device {
namespace {

constexpr uint64_t kNoLimit = std::numeric_limits<uint64_t>::max();

std::string ReadText(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

// A limit file holds a number, or "max".
uint64_t ReadLimit(const std::string& path) {
  std::ifstream in(path);
  uint64_t value = 0;
  if (in >> value) return value;
  return kNoLimit;
}

uint64_t MemoryInfo(const std::string& wanted) {
  std::ifstream in("/proc/meminfo");
  std::string key;
  uint64_t kib = 0;
  std::string unit;
  while (in >> key >> kib >> unit) {
    if (key == wanted) return kib * 1024;
  }
  return 0;
}

}  // namespace

std::string CpuName() {
  std::ifstream in("/proc/cpuinfo");
  std::string line;
  while (std::getline(in, line)) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) return line.substr(colon + 2);
  }
  return "CPU";
}

std::string CpuUuid() {
  std::string id = ReadText("/etc/machine-id");
  if (id.size() < 8) id = ReadText("/proc/sys/kernel/random/boot_id");
  // Two FNV-1a digests with different salts: the machine's id itself should not be published.
  std::string uuid = "CPU-";
  for (const char salt : {'a', 'b'}) {
    uint64_t hash = 14695981039346656037ull;
    for (const char c : "misa" + std::string(1, salt) + id) {
      hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
    }
    static constexpr char kHex[] = "0123456789abcdef";
    for (int shift = 60; shift >= 0; shift -= 4) uuid += kHex[(hash >> shift) & 15];
  }
  return uuid;
}

uint64_t CgroupLimitBytes(const std::string& proc_cgroup, const std::string& root) {
  uint64_t limit = kNoLimit;
  std::istringstream lines(proc_cgroup);
  std::string line;
  while (std::getline(lines, line)) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    std::string path = line.substr(second + 1);
    const bool v2 = controllers.empty();
    if (!v2 && ("," + controllers + ",").find(",memory,") == std::string::npos) continue;
    const std::string file = v2 ? "/memory.max" : "/memory.limit_in_bytes";
    // v2 stands at the root, or at unified/ beside v1's hierarchies.
    const std::vector<std::string> mounts = v2 ? std::vector<std::string>{root, root + "/unified"}
                                               : std::vector<std::string>{root + "/memory"};
    // A limit holds for everything below it: the smallest on the way up counts. In a container the path may not be
    // there, and the root is then the container's own group.
    while (true) {
      for (const std::string& mount : mounts) limit = std::min(limit, ReadLimit(mount + path + file));
      if (path.empty() || path == "/") break;
      path.resize(path.rfind('/'));
    }
  }
  return limit;
}

uint64_t UsableMemoryBytes() {
  return std::min(MemoryInfo("MemTotal:"), CgroupLimitBytes(ReadText("/proc/self/cgroup"), "/sys/fs/cgroup"));
}

uint64_t AvailableMemoryBytes() { return std::min(MemoryInfo("MemAvailable:"), UsableMemoryBytes()); }

}  // namespace misa::device
