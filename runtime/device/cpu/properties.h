// What the cpu device is: its name, its identity, and the memory this process may use.
#pragma once

#include <cstdint>
#include <string>

namespace misa::device {

// The processor's model name.
std::string CpuName();
// "CPU-" and a digest of the machine's id: equal over restarts, different between machines, and not the id itself.
std::string CpuUuid();
// The smaller of the machine's memory and the limits of the cgroups (v1 and v2) this process is in.
uint64_t UsableMemoryBytes();
// Of those, what can be had now without taking it from anybody (free, or cache that can go).
uint64_t AvailableMemoryBytes();
// Out of the text of /proc/self/cgroup and a root to read the limits under; for tests.
uint64_t CgroupLimitBytes(const std::string& proc_cgroup, const std::string& root);

}  // namespace misa::device
