#include "runtime/device/chunk_space.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>

namespace misa {
namespace {

// Between a mapping's birth and the word that children do not inherit it, no thread may fork.
std::mutex& ForkMutex() {
  static std::mutex* mutex = [] {
    pthread_atfork([] { ForkMutex().lock(); }, [] { ForkMutex().unlock(); }, [] { ForkMutex().unlock(); });
    return new std::mutex;  // never destroyed: a fork may come later than static destructors
  }();
  return *mutex;
}

}  // namespace

ChunkSpace::ChunkSpace(int memfd, uint64_t bytes, uint64_t chunk_bytes)
    : memfd_(memfd), bytes_(bytes / chunk_bytes * chunk_bytes), chunk_bytes_(chunk_bytes) {
  if (bytes_ > 0) Insert(&empty_, {0, bytes_});
  empty_bytes_ = bytes_;
}

ChunkSpace::~ChunkSpace() { close(memfd_); }

void ChunkSpace::Insert(FreeMap* map, Extent extent) {
  auto next = map->lower_bound(extent.offset);
  if (next != map->begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == extent.offset) {
      extent.offset = before->first;
      extent.bytes += before->second;
      map->erase(before);
    }
  }
  if (next != map->end() && extent.offset + extent.bytes == next->first) {
    extent.bytes += next->second;
    map->erase(next);
  }
  (*map)[extent.offset] = extent.bytes;
}

uint64_t ChunkSpace::Extract(FreeMap* map, uint64_t bytes, std::vector<Extent>* out) {
  uint64_t taken = 0;
  // One extent that fits whole keeps the number of mappings small; the smallest such one keeps large ones whole.
  auto best = map->end();
  for (auto it = map->begin(); it != map->end(); ++it) {
    if (it->second >= bytes && (best == map->end() || it->second < best->second)) best = it;
  }
  while (taken < bytes && !map->empty()) {
    auto it = best != map->end() ? best : map->begin();
    if (best == map->end()) {
      for (auto candidate = map->begin(); candidate != map->end(); ++candidate) {
        if (candidate->second > it->second) it = candidate;
      }
    }
    const uint64_t part = std::min(it->second, bytes - taken);
    out->push_back({it->first, part});
    const Extent rest{it->first + part, it->second - part};
    map->erase(it);
    if (rest.bytes > 0) (*map)[rest.offset] = rest.bytes;
    best = map->end();
    taken += part;
  }
  return taken;
}

bool ChunkSpace::Take(uint64_t bytes, std::vector<Extent>* extents, std::vector<Extent>* empty_taken) {
  if (spare_bytes_ + empty_bytes_ < bytes) return false;
  const uint64_t from_spare = std::min(bytes, spare_bytes_);
  if (from_spare > 0) spare_bytes_ -= Extract(&spare_, from_spare, extents);
  if (bytes > from_spare) {
    empty_bytes_ -= Extract(&empty_, bytes - from_spare, empty_taken);
    extents->insert(extents->end(), empty_taken->begin(), empty_taken->end());
  }
  return true;
}

void ChunkSpace::Give(const std::vector<Extent>& extents) {
  for (const Extent& extent : extents) {
    Insert(&spare_, extent);
    spare_bytes_ += extent.bytes;
  }
}

void ChunkSpace::GiveEmpty(const std::vector<Extent>& extents) {
  for (const Extent& extent : extents) {
    Insert(&empty_, extent);
    empty_bytes_ += extent.bytes;
  }
}

std::vector<Extent> ChunkSpace::TakeSpare(uint64_t bytes) {
  std::vector<Extent> extents;
  const uint64_t wanted = std::min((bytes + chunk_bytes_ - 1) / chunk_bytes_ * chunk_bytes_, spare_bytes_);
  if (wanted > 0) spare_bytes_ -= Extract(&spare_, wanted, &extents);
  return extents;
}

std::string ChunkSpace::Back(const std::vector<Extent>& extents) const {
  for (size_t i = 0; i < extents.size(); ++i) {
    int result;
    do {
      result = fallocate(memfd_, 0, static_cast<off_t>(extents[i].offset), static_cast<off_t>(extents[i].bytes));
    } while (result != 0 && errno == EINTR);
    if (result != 0) {
      const int error = errno;
      Release({extents.begin(), extents.begin() + static_cast<std::ptrdiff_t>(i) + 1});
      return "The system has no memory for " + std::to_string(extents[i].bytes) +
             " bytes of the session's leased chunks (" + std::strerror(error) + ").";
    }
  }
  return "";
}

void ChunkSpace::Release(const std::vector<Extent>& extents) const {
  for (const Extent& extent : extents) {
    fallocate(memfd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(extent.offset),
              static_cast<off_t>(extent.bytes));
  }
}

void* ChunkSpace::ReserveAddress(uint64_t bytes) {
  void* address = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) return nullptr;
  madvise(address, bytes, MADV_DONTFORK);
  madvise(address, bytes, MADV_DONTDUMP);
  return address;
}

void ChunkSpace::FreeAddress(void* address, uint64_t bytes) { munmap(address, bytes); }

std::string ChunkSpace::Map(void* address, const std::vector<Extent>& extents) const {
  char* at = static_cast<char*>(address);
  for (const Extent& extent : extents) {
    int error = 0;
    {
      // A data-loader worker must neither see nor keep alive what the trainer holds.
      std::lock_guard<std::mutex> lock(ForkMutex());
      void* mapped = mmap(at, extent.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memfd_,
                          static_cast<off_t>(extent.offset));
      if (mapped == MAP_FAILED || madvise(at, extent.bytes, MADV_DONTFORK) != 0) error = errno;
    }
    at += extent.bytes;
    if (error != 0) {
      // The part that failed too: a failed call may have taken the reservation away.
      Unmap(address, static_cast<uint64_t>(at - static_cast<char*>(address)));
      return std::string("The session's chunks could not be mapped (") + std::strerror(error) +
             "); where this says \"Cannot allocate memory\", vm.max_map_count may be too low.";
    }
  }
  // Only saves the faults later; a kernel that does not know it lets them happen.
  madvise(address, static_cast<uint64_t>(at - static_cast<char*>(address)), MADV_POPULATE_READ);
  return "";
}

void ChunkSpace::Unmap(void* address, uint64_t bytes) {
  if (bytes == 0) return;
  // Mapped over rather than unmapped: the addresses stay reserved.
  mmap(address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  madvise(address, bytes, MADV_DONTFORK);
}

bool ChunkSpace::Protect(void* address, uint64_t bytes, Access access) {
  const int allowed = access == Access::kNone    ? PROT_NONE
                      : access == Access::kRead ? PROT_READ
                                                : PROT_READ | PROT_WRITE;
  return mprotect(address, bytes, allowed) == 0;
}

std::string ChunkSpace::Move(void* from, void* to, const std::vector<Extent>& extents) {
  uint64_t bytes = 0;
  for (const Extent& extent : extents) bytes += extent.bytes;
  char* source = static_cast<char*>(from);
  char* target = static_cast<char*>(to);
  // One call for each extent: older kernels move no more than one mapping at once.
  for (const Extent& extent : extents) {
    if (mremap(source, extent.bytes, extent.bytes, MREMAP_MAYMOVE | MREMAP_FIXED, target) == MAP_FAILED) {
      const int error = errno;
      Unmap(to, bytes);
      FreeAddress(source, bytes - static_cast<uint64_t>(source - static_cast<char*>(from)));
      return std::string("The session's chunks could not be mapped (") + std::strerror(error) +
             "); where this says \"Cannot allocate memory\", vm.max_map_count may be too low.";
    }
    source += extent.bytes;
    target += extent.bytes;
  }
  return "";
}

void* ChunkSpace::MakeMemory(uint64_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

bool ChunkSpace::Replace(void* address, void* memory, uint64_t bytes) {
  return mremap(memory, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, address) != MAP_FAILED;
}

void ChunkSpace::Empty(void* part, uint64_t bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(part) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(part) + bytes) / page * page;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}

}  // namespace misa
