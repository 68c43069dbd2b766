// The chunks a session has leased on the cpu device: ranges of one memfd, mapped at addresses that never change.
//
// A chunk is in one of three conditions: in use by a facet, spare (holds pages, nobody uses it) or empty (no pages).
// Not thread-safe, but for Map, Unmap and the like on different ranges: the executor's lock guards the bookkeeping.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace misa {

struct Extent {
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// What whoever holds a pointer into a range may do with it.
enum class Access : uint8_t { kNone, kRead, kWrite };

class ChunkSpace {
 public:
  // Takes the memfd over. bytes and chunk_bytes as leased; chunk_bytes is a multiple of the page size.
  ChunkSpace(int memfd, uint64_t bytes, uint64_t chunk_bytes);
  ~ChunkSpace();
  ChunkSpace(const ChunkSpace&) = delete;
  ChunkSpace& operator=(const ChunkSpace&) = delete;

  uint64_t chunk_bytes() const { return chunk_bytes_; }
  uint64_t bytes() const { return bytes_; }
  uint64_t spare_bytes() const { return spare_bytes_; }
  uint64_t empty_bytes() const { return empty_bytes_; }
  uint64_t RoundUp(uint64_t bytes) const { return (bytes + chunk_bytes_ - 1) / chunk_bytes_ * chunk_bytes_; }

  // Takes extents that sum up to `bytes` (a multiple of chunk_bytes), spare ones first. The part that was empty is
  // returned in *empty_taken, of which the caller has made sure that the budget has it. Fails (false, nothing taken)
  // where fewer are free.
  bool Take(uint64_t bytes, std::vector<Extent>* extents, std::vector<Extent>* empty_taken);
  // Gives chunks that hold pages back; they become spare.
  void Give(const std::vector<Extent>& extents);
  // Gives chunks that hold no pages back (a Back that failed).
  void GiveEmpty(const std::vector<Extent>& extents);
  // Takes up to `bytes` of spare chunks out, for Release; they are in nobody's hands until GiveEmpty.
  std::vector<Extent> TakeSpare(uint64_t bytes);

  // Lets empty chunks have pages, zeroed. A sentence where the system has no memory for them; none has pages then.
  std::string Back(const std::vector<Extent>& extents) const;
  // Takes the pages away: memory is free at once, and what still writes there writes nowhere.
  void Release(const std::vector<Extent>& extents) const;

  // Reserves address space: inaccessible, not inherited by fork, freed with FreeAddress. nullptr where there is none.
  static void* ReserveAddress(uint64_t bytes);
  static void FreeAddress(void* address, uint64_t bytes);
  // Maps the extents one after the other at `address`, pages mapped in. A sentence on failure; nothing is mapped then.
  std::string Map(void* address, const std::vector<Extent>& extents) const;
  // Makes the range inaccessible again.
  static void Unmap(void* address, uint64_t bytes);
  // What a mapped range allows from now on; false where the system has no room for the change.
  static bool Protect(void* address, uint64_t bytes, Access access);
  // Takes the extents that are mapped at `from` to `to`, both reserved, with what the mapping allows and without a moment in
  // which `to` shows anything else; `from` is free afterwards. A sentence on failure; nothing is mapped at either then.
  static std::string Move(void* from, void* to, const std::vector<Extent>& extents);
  // Ordinary memory, zeroed; nullptr where there is none.
  static void* MakeMemory(uint64_t bytes);
  // Puts such memory into the place of what is mapped or reserved at `address`, in one go; false where that cannot be done.
  static bool Replace(void* address, void* memory, uint64_t bytes);
  // Gives the whole pages of a part of it back; it reads as zeros then.
  static void Empty(void* part, uint64_t bytes);

 private:
  using FreeMap = std::map<uint64_t, uint64_t>;  // offset -> bytes, neighbours merged
  static void Insert(FreeMap* map, Extent extent);
  static uint64_t Extract(FreeMap* map, uint64_t bytes, std::vector<Extent>* out);

  const int memfd_;
  const uint64_t bytes_;
  const uint64_t chunk_bytes_;
  FreeMap spare_;
  FreeMap empty_;
  uint64_t spare_bytes_ = 0;
  uint64_t empty_bytes_ = 0;
};

}  // namespace misa
