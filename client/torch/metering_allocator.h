// Counts every CPU allocation of tensors, and keeps the sum with the pool under the budget.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace misa::torch_client {

// Replaces torch's CPU allocator for the life of the process; once, later calls do nothing. Tensors made before are not
// counted.
void InstallMeteringAllocator();

// From now on freed tensors give their memory back to the system at once, and large ones are mappings of their own in huge
// pages. Before this call allocations are what they are without misa, only counted.
void KeepNothingFreed();

// Who makes room where an allocation would pass the budget: counts `bytes` as other tensors' and returns "", or a
// sentence, which the allocation then throws. Null: allocations pass uncounted against the budget.
void SetRoomMaker(std::function<std::string(uint64_t bytes)> maker);

}  // namespace misa::torch_client
