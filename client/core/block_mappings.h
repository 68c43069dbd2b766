// Large blocks of memory that are mappings of their own, and those of them that were freed and are kept for the next tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "client/core/meter.h"

namespace misa {

// Sizes are multiples of the page. Thread-safe.
//
// Fresh memory costs the thread that touches it first a fault and a zeroed page, which at a training step's rate of tensors
// is several hundredths of the step. So freed blocks are kept while the budget has room for them, and a request of another
// size is met by moving kept pages to a new address (mremap), not by giving them back and asking for zeroed ones.
class BlockMappings {
 public:
  // Up to `most_kept_bytes` are kept. The meter counts blocks in use as other tensors, kept ones as kept.
  BlockMappings(DeviceMeter* meter, uint64_t most_kept_bytes) : meter_(meter), most_kept_bytes_(most_kept_bytes) {}

  // A block made of kept memory, counted as another tensor from now on; null where too little is kept.
  void* Reuse(size_t size);
  // A new block, in huge pages where it is large enough and the system has any; not counted. Null where there is no memory.
  void* Make(size_t size);
  // Keeps the block or frees it. False where it is none of these.
  bool Free(void* block, bool keep);
  // Frees a block that was not counted; false where it is none of these.
  bool Drop(void* block);
  // Gives at least `bytes` of kept memory back to the system, as far as there is any.
  void Reclaim(uint64_t bytes);

  // For pthread_atfork: a child must not inherit a lock that nobody there will ever open.
  void LockForFork() { mutex_.lock(); }
  void UnlockAfterFork() { mutex_.unlock(); }

 private:
  // The kernel moves one mapping at a time, so a block remembers what it was put together from, in order of address.
  using Pieces = std::vector<size_t>;
  struct Kept {
    char* begin = nullptr;
    size_t size = 0;
    Pieces pieces;
  };

  void* Assemble(size_t size);
  // Takes up to `most` bytes of the first piece off the block's beginning; returns how many. They stay mapped.
  static size_t CutFront(Kept* block, size_t most);

  DeviceMeter* const meter_;
  const uint64_t most_kept_bytes_;
  std::mutex mutex_;
  std::unordered_map<void*, Kept> used_;
  std::deque<Kept> kept_;  // in the order of their freeing
};

}  // namespace misa
