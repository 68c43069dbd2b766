#include "client/core/block_mappings.h"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

namespace misa {
namespace {

// From this size on a block lies in huge pages: fresh memory costs one fault for 2 MiB then, not 512.
constexpr size_t kHugePage = 2ull << 20;
// A block of more pieces is not kept: mappings are a limited resource of a process.
constexpr size_t kMostPieces = 16;

// Address space for a block, aligned to huge pages where it is large enough; null where there is none.
char* Reserve(size_t size, int protection) {
  const size_t reserved = size >= kHugePage ? size + kHugePage : size;
  void* raw = mmap(nullptr, reserved, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  char* begin = static_cast<char*>(raw);
  if (reserved == size) return begin;
  char* block = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(begin) + kHugePage - 1) / kHugePage * kHugePage);
  if (block > begin) munmap(begin, static_cast<size_t>(block - begin));
  char* end = begin + reserved;
  if (end > block + size) munmap(block + size, static_cast<size_t>(end - (block + size)));
  return block;
}

}  // namespace

void* BlockMappings::Reuse(size_t size) {
  std::lock_guard<std::mutex> lock(mutex_);
  // The one freed last is the one most likely still in the cache.
  for (auto it = kept_.rbegin(); it != kept_.rend(); ++it) {
    if (it->size != size) continue;
    void* block = it->begin;
    used_[block] = std::move(*it);
    kept_.erase(std::next(it).base());
    meter_->MoveKeptToOther(size);
    return block;
  }
  return size >= kHugePage ? Assemble(size) : nullptr;
}

void* BlockMappings::Assemble(size_t size) {
  size_t held = 0;
  for (const Kept& block : kept_) held += block.size;
  if (held < size) return nullptr;
  char* target = Reserve(size, PROT_NONE);
  if (target == nullptr) return nullptr;
  Kept made{target, size, {}};
  size_t done = 0;
  // The oldest first: the newest may be asked for by their own size soon.
  while (done < size) {
    Kept& source = kept_.front();
    char* from = source.begin;
    const size_t moved = CutFront(&source, size - done);
    if (source.size == 0) kept_.pop_front();
    if (mremap(from, moved, moved, MREMAP_MAYMOVE | MREMAP_FIXED, target + done) == MAP_FAILED) {
      // No content is at stake: what has been moved so far, and this piece, go back to the system.
      munmap(from, moved);
      munmap(target, size);
      meter_->SubtractKept(done + moved);
      return nullptr;
    }
    made.pieces.push_back(moved);
    done += moved;
  }
  used_[target] = std::move(made);
  meter_->MoveKeptToOther(size);
  return target;
}

size_t BlockMappings::CutFront(Kept* block, size_t most) {
  size_t& piece = block->pieces.front();
  const size_t cut = std::min(piece, most);
  piece -= cut;
  if (piece == 0) block->pieces.erase(block->pieces.begin());
  block->begin += cut;
  block->size -= cut;
  return cut;
}

void* BlockMappings::Make(size_t size) {
  char* block = Reserve(size, PROT_READ | PROT_WRITE);
  if (block == nullptr) return nullptr;
  if (size >= kHugePage) madvise(block, size, MADV_HUGEPAGE);  // a wish: where the system has none, small pages do
  std::lock_guard<std::mutex> lock(mutex_);
  used_[block] = Kept{block, size, {size}};
  return block;
}

bool BlockMappings::Free(void* block, bool keep) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = used_.find(block);
  if (found == used_.end()) return false;
  Kept freed = std::move(found->second);
  used_.erase(found);
  if (keep && freed.pieces.size() <= kMostPieces && meter_->kept_bytes() + freed.size <= most_kept_bytes_) {
    meter_->MoveOtherToKept(freed.size);
    kept_.push_back(std::move(freed));
    return true;
  }
  // Unmapped while it is still locked out: once it is, the address may be another block's.
  munmap(freed.begin, freed.size);
  meter_->SubtractOther(freed.size);
  return true;
}

bool BlockMappings::Drop(void* block) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = used_.find(block);
  if (found == used_.end()) return false;
  munmap(found->second.begin, found->second.size);
  used_.erase(found);
  return true;
}

void BlockMappings::Reclaim(uint64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  uint64_t given = 0;
  while (given < bytes && !kept_.empty()) {
    Kept& oldest = kept_.front();
    // Whole huge pages, and no crumbs: a rest that is smaller than one goes along.
    const uint64_t missing = std::min<uint64_t>(bytes - given, oldest.size);  // `bytes` may be more than there is
    const uint64_t wanted = (missing + kHugePage - 1) / kHugePage * kHugePage;
    const uint64_t most = oldest.size < wanted + kHugePage ? oldest.size : wanted;
    char* from = oldest.begin;
    const size_t cut = CutFront(&oldest, most);
    if (oldest.size == 0) kept_.pop_front();
    munmap(from, cut);
    meter_->SubtractKept(cut);
    given += cut;
  }
}

}  // namespace misa
