#include "runtime/memory/pool.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <utility>

#include "runtime/memory/byte_size.h"

namespace misa {
namespace {

uint64_t SaturatingAdd(uint64_t a, uint64_t b) {
  return a > std::numeric_limits<uint64_t>::max() - b ? std::numeric_limits<uint64_t>::max() : a + b;
}

}  // namespace

Pool::Pool(std::string name, uint64_t capacity_bytes)
    : name_(std::move(name)), capacity_(capacity_bytes), free_(capacity_bytes) {}

std::string Pool::Lease(uint64_t bytes) {
  if (bytes > free_) {
    return "the " + name_ + " pool has no room for " + FormatByteSize(bytes) + " (" + std::to_string(bytes) +
           " bytes): " + FormatByteSize(free_) + " (" + std::to_string(free_) + " bytes) of its " +
           FormatByteSize(capacity_) + " are free";
  }
  return Move(&free_, &leased_, bytes, "free", "leased");
}

std::string Pool::Return(uint64_t bytes) { return Move(&leased_, &free_, bytes, "leased", "free"); }

std::string Pool::BeginReclaim(uint64_t bytes) { return Move(&leased_, &reclaiming_, bytes, "leased", "reclaiming"); }

std::string Pool::EndReclaim(uint64_t bytes) { return Move(&reclaiming_, &free_, bytes, "reclaiming", "free"); }

std::string Pool::EndOrphan(uint64_t bytes) { return Move(&orphaned_, &free_, bytes, "orphaned", "free"); }

uint64_t Pool::AddOrphan(uint64_t bytes) {
  const uint64_t taken = std::min(bytes, free_);
  Move(&free_, &orphaned_, taken, "free", "orphaned");
  return taken;
}

std::string Pool::Check() const {
  const uint64_t sum = SaturatingAdd(SaturatingAdd(free_, leased_), SaturatingAdd(reclaiming_, orphaned_));
  if (sum == capacity_) return "";
  return "the " + name_ + " pool lost count: free " + std::to_string(free_) + " + leased " + std::to_string(leased_) +
         " + reclaiming " + std::to_string(reclaiming_) + " + orphaned " + std::to_string(orphaned_) + " is not its " +
         std::to_string(capacity_) + " bytes";
}

std::string Pool::Move(uint64_t* from, uint64_t* to, uint64_t bytes, const char* from_name, const char* to_name) {
  if (bytes > *from) {
    return "the " + name_ + " pool cannot move " + std::to_string(bytes) + " bytes from " + from_name + " to " + to_name +
           ": only " + std::to_string(*from) + " bytes are " + from_name;
  }
  *from -= bytes;
  *to = SaturatingAdd(*to, bytes);
  assert(Check().empty());
  return "";
}

}  // namespace misa
