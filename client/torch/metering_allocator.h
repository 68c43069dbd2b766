// Counts every CPU allocation of tensors, and keeps the sum with the pool under the budget.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace misa::torch_client {

// Replaces torch's CPU allocator for the life of the process; once, later calls do nothing. Tensors made before are not
// counted.
void InstallMeteringAllocator();

// From now on large tensors are mappings of their own in huge pages, kept for the next one of their size when they are
// freed as long as the budget does not need the room, and everything else goes back to the system. Before this call
// allocations are what they are without misa, only counted.
void ServeManaged();
// Tensors made before that call and freed since lie between others in malloc's heap: gives their pages back to the system.
void TrimFreed();
// The end of ServeManaged: what was kept goes back.
void GiveBackFreed();

// Who makes room where an allocation would pass the budget: counts `bytes` as other tensors' and returns "", or a
// sentence, which the allocation then throws. Null: allocations pass uncounted against the budget.
void SetRoomMaker(std::function<std::string(uint64_t bytes)> maker);

}  // namespace misa::torch_client
