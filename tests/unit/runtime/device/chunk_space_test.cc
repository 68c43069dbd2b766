#include "runtime/device/chunk_space.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>

namespace misa {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kChunk = 4096;

int MakeMemfd(uint64_t bytes) {
  const int fd = memfd_create("misa-chunks", MFD_CLOEXEC);
  EXPECT_GE(fd, 0);
  EXPECT_EQ(ftruncate(fd, static_cast<off_t>(bytes)), 0);
  return fd;
}

uint64_t Sum(const std::vector<Extent>& extents) {
  uint64_t sum = 0;
  for (const Extent& extent : extents) sum += extent.bytes;
  return sum;
}

uint64_t HeldPages(int fd) {
  struct stat facts {};
  EXPECT_EQ(fstat(fd, &facts), 0);
  return static_cast<uint64_t>(facts.st_blocks) * 512;
}

TEST(ChunkSpace, RoundsToWholeChunks) {
  ChunkSpace space(MakeMemfd(10 * kChunk), 10 * kChunk + 100, kChunk);
  EXPECT_EQ(space.bytes(), 10 * kChunk);
  EXPECT_EQ(space.empty_bytes(), 10 * kChunk);
  EXPECT_EQ(space.spare_bytes(), 0u);
  EXPECT_EQ(space.RoundUp(0), 0u);
  EXPECT_EQ(space.RoundUp(1), kChunk);
  EXPECT_EQ(space.RoundUp(kChunk), kChunk);
  EXPECT_EQ(space.RoundUp(kChunk + 1), 2 * kChunk);
}

TEST(ChunkSpace, TakesSpareOnesFirst) {
  ChunkSpace space(MakeMemfd(10 * kChunk), 10 * kChunk, kChunk);
  std::vector<Extent> a, b, empty;
  ASSERT_TRUE(space.Take(4 * kChunk, &a, &empty));
  EXPECT_EQ(Sum(empty), 4 * kChunk);
  space.Give(a);
  EXPECT_EQ(space.spare_bytes(), 4 * kChunk);
  empty.clear();
  ASSERT_TRUE(space.Take(6 * kChunk, &b, &empty));
  EXPECT_EQ(Sum(b), 6 * kChunk);
  EXPECT_EQ(Sum(empty), 2 * kChunk);
  EXPECT_EQ(space.spare_bytes(), 0u);
  EXPECT_EQ(space.empty_bytes(), 4 * kChunk);
}

TEST(ChunkSpace, WhatIsNotThereIsNotTaken) {
  ChunkSpace space(MakeMemfd(4 * kChunk), 4 * kChunk, kChunk);
  std::vector<Extent> a, b, empty;
  ASSERT_TRUE(space.Take(3 * kChunk, &a, &empty));
  empty.clear();
  EXPECT_FALSE(space.Take(2 * kChunk, &b, &empty));
  EXPECT_THAT(b, IsEmpty());
  EXPECT_THAT(empty, IsEmpty());
  EXPECT_EQ(space.empty_bytes(), kChunk);
}

// Every chunk is in exactly one place, whatever the order; what is whole again comes in one piece.
TEST(ChunkSpace, ConservesEveryChunk) {
  constexpr uint64_t kChunks = 64;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    std::mt19937_64 random(seed);
    ChunkSpace space(MakeMemfd(kChunks * kChunk), kChunks * kChunk, kChunk);
    struct Owned {
      std::vector<Extent> extents;
      bool pages = true;
    };
    std::vector<Owned> owned;
    std::vector<int> owner(kChunks, 0);
    const auto own = [&](const std::vector<Extent>& extents, int by) {
      for (const Extent& extent : extents) {
        ASSERT_EQ(extent.offset % kChunk, 0u);
        ASSERT_EQ(extent.bytes % kChunk, 0u);
        ASSERT_GT(extent.bytes, 0u);
        for (uint64_t c = extent.offset / kChunk; c < (extent.offset + extent.bytes) / kChunk; ++c) {
          ASSERT_LT(c, kChunks);
          owner[c] += by;
          ASSERT_TRUE(owner[c] == 0 || owner[c] == 1) << "chunk " << c << " has two users";
        }
      }
    };
    for (int step = 0; step < 2000; ++step) {
      if (random() % 2 == 0) {
        const uint64_t bytes = (1 + random() % 10) * kChunk;
        std::vector<Extent> extents, empty;
        const uint64_t spare = space.spare_bytes();
        const bool possible = spare + space.empty_bytes() >= bytes;
        ASSERT_EQ(space.Take(bytes, &extents, &empty), possible);
        if (possible) {
          ASSERT_EQ(Sum(extents), bytes);
          ASSERT_EQ(Sum(empty), bytes > spare ? bytes - spare : 0);
          ASSERT_NO_FATAL_FAILURE(own(extents, 1));
          owned.push_back({extents, true});
        }
      } else if (random() % 4 == 0) {
        const uint64_t spare = space.spare_bytes();
        const uint64_t wanted = random() % (12 * kChunk);
        const std::vector<Extent> extents = space.TakeSpare(wanted);
        ASSERT_EQ(Sum(extents), std::min(space.RoundUp(wanted), spare));
        ASSERT_NO_FATAL_FAILURE(own(extents, 1));
        if (!extents.empty()) owned.push_back({extents, false});
      } else if (!owned.empty()) {
        const size_t i = random() % owned.size();
        ASSERT_NO_FATAL_FAILURE(own(owned[i].extents, -1));
        if (owned[i].pages) {
          space.Give(owned[i].extents);
        } else {
          space.GiveEmpty(owned[i].extents);
        }
        owned.erase(owned.begin() + static_cast<std::ptrdiff_t>(i));
      }
      uint64_t held = 0;
      for (const Owned& o : owned) held += Sum(o.extents);
      ASSERT_EQ(held + space.spare_bytes() + space.empty_bytes(), space.bytes());
    }
    for (const Owned& o : owned) space.Give(o.extents);
    space.GiveEmpty(space.TakeSpare(space.bytes()));
    EXPECT_EQ(space.empty_bytes(), space.bytes());
    std::vector<Extent> all, empty;
    ASSERT_TRUE(space.Take(space.bytes(), &all, &empty));
    EXPECT_EQ(all.size(), 1u);
  }
}

class Mapped : public ::testing::Test {
 protected:
  static constexpr uint64_t kBytes = 32 * kChunk;

  std::vector<Extent> Take(uint64_t chunks) {
    std::vector<Extent> extents, empty;
    EXPECT_TRUE(space_.Take(chunks * kChunk, &extents, &empty));
    EXPECT_EQ(space_.Back(empty), "");
    return extents;
  }

  const int fd_ = MakeMemfd(kBytes);
  ChunkSpace space_{fd_, kBytes, kChunk};
};

TEST_F(Mapped, ContentIsWhereTheExtentsAre) {
  auto* address = static_cast<char*>(ChunkSpace::ReserveAddress(4 * kChunk));
  ASSERT_NE(address, nullptr);
  // Pieces out of order, so that the mapping is made of several.
  const std::vector<Extent> a = Take(2), b = Take(2), c = Take(2);
  const std::vector<Extent> mixed = {c[0], a[0]};
  ASSERT_EQ(space_.Map(address, mixed), "");
  for (uint64_t i = 0; i < 4 * kChunk; ++i) address[i] = static_cast<char>(i * 7);
  ChunkSpace::Unmap(address, 4 * kChunk);
  // Other chunks at the same address, then the first ones again.
  ASSERT_EQ(space_.Map(address, b), "");
  EXPECT_TRUE(std::all_of(address, address + 2 * kChunk, [](char value) { return value == 0; }));
  std::memset(address, 1, 2 * kChunk);
  ChunkSpace::Unmap(address, 2 * kChunk);
  ASSERT_EQ(space_.Map(address, mixed), "");
  for (uint64_t i = 0; i < 4 * kChunk; ++i) ASSERT_EQ(address[i], static_cast<char>(i * 7)) << i;
  // The same chunks at another address.
  auto* other = static_cast<char*>(ChunkSpace::ReserveAddress(2 * kChunk));
  ASSERT_EQ(space_.Map(other, a), "");
  EXPECT_EQ(std::memcmp(other, address + 2 * kChunk, 2 * kChunk), 0);
  ChunkSpace::FreeAddress(other, 2 * kChunk);
  ChunkSpace::FreeAddress(address, 4 * kChunk);
}

TEST_F(Mapped, WhatIsReleasedFreesItsMemoryAndReadsAsZeros) {
  auto* address = static_cast<char*>(ChunkSpace::ReserveAddress(4 * kChunk));
  const std::vector<Extent> extents = Take(4);
  EXPECT_EQ(HeldPages(fd_), 4 * kChunk);
  ASSERT_EQ(space_.Map(address, extents), "");
  std::memset(address, 0x5a, 4 * kChunk);
  ChunkSpace::Unmap(address, 4 * kChunk);
  space_.Release(extents);
  EXPECT_EQ(HeldPages(fd_), 0u);
  ASSERT_EQ(space_.Back(extents), "");
  EXPECT_EQ(HeldPages(fd_), 4 * kChunk);
  ASSERT_EQ(space_.Map(address, extents), "");
  EXPECT_TRUE(std::all_of(address, address + 4 * kChunk, [](char value) { return value == 0; }));
  ChunkSpace::FreeAddress(address, 4 * kChunk);
}

TEST_F(Mapped, AFailureLeavesNothingBehind) {
  auto* address = static_cast<char*>(ChunkSpace::ReserveAddress(4 * kChunk));
  const std::vector<Extent> extents = Take(2);
  // The second extent lies past every file's end: its offset is no offset at all.
  const std::vector<Extent> bad = {extents[0], {uint64_t{1} << 63, kChunk}};
  EXPECT_THAT(space_.Map(address, bad), HasSubstr("could not be mapped"));
  char byte = 0;
  int pipe_fds[2];
  ASSERT_EQ(pipe(pipe_fds), 0);
  EXPECT_EQ(write(pipe_fds[1], address, 1), -1);  // inaccessible, asked of the kernel
  EXPECT_EQ(errno, EFAULT);
  const uint64_t before = HeldPages(fd_);
  EXPECT_THAT(space_.Back({{8 * kChunk, kChunk}, {uint64_t{1} << 63, kChunk}}), HasSubstr("no memory"));
  EXPECT_EQ(HeldPages(fd_), before);
  ASSERT_EQ(space_.Map(address, extents), "");
  EXPECT_EQ(write(pipe_fds[1], address, 1), 1);
  EXPECT_EQ(read(pipe_fds[0], &byte, 1), 1);
  close(pipe_fds[0]);
  close(pipe_fds[1]);
  ChunkSpace::FreeAddress(address, 4 * kChunk);
}

// What a child sees of these addresses: 0 for nothing.
int AccessInChild(const char* address) {
  const pid_t pid = fork();
  if (pid == 0) {
    int fds[2];
    if (pipe(fds) != 0) _exit(2);
    _exit(write(fds[1], address, 1) == -1 && errno == EFAULT ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

// What the kernel may do with an address for us: asked, not tried.
bool KernelReads(const char* address) {
  int fds[2];
  EXPECT_EQ(pipe(fds), 0);
  const bool can = write(fds[1], address, 1) == 1;
  close(fds[0]);
  close(fds[1]);
  return can;
}

bool KernelWrites(char* address) {
  int fds[2];
  EXPECT_EQ(pipe(fds), 0);
  EXPECT_EQ(write(fds[1], "x", 1), 1);
  const bool can = read(fds[0], address, 1) == 1;
  close(fds[0]);
  close(fds[1]);
  return can;
}

TEST_F(Mapped, AllowsWhatItIsTold) {
  auto* address = static_cast<char*>(ChunkSpace::ReserveAddress(4 * kChunk));
  const std::vector<Extent> a = Take(2), b = Take(2);
  ASSERT_EQ(space_.Map(address, {b[0], a[0]}), "");
  std::memset(address, 1, 4 * kChunk);
  for (const Access access : {Access::kRead, Access::kNone, Access::kWrite, Access::kNone, Access::kRead, Access::kWrite}) {
    ASSERT_TRUE(ChunkSpace::Protect(address, 4 * kChunk, access));
    for (uint64_t at : {uint64_t{0}, 4 * kChunk - 1}) {
      EXPECT_EQ(KernelReads(address + at), access != Access::kNone);
      EXPECT_EQ(KernelWrites(address + at), access == Access::kWrite);
    }
  }
  ChunkSpace::FreeAddress(address, 4 * kChunk);
}

TEST_F(Mapped, MovesIntoPlaceWithWhatItAllows) {
  auto* place = static_cast<char*>(ChunkSpace::ReserveAddress(4 * kChunk));
  auto* aside = static_cast<char*>(ChunkSpace::ReserveAddress(4 * kChunk));
  const std::vector<Extent> a = Take(2), b = Take(2), c = Take(2);
  const std::vector<Extent> mixed = {c[0], a[0]};
  ASSERT_EQ(space_.Map(aside, mixed), "");
  for (uint64_t i = 0; i < 4 * kChunk; ++i) aside[i] = static_cast<char>(i * 7);
  ASSERT_TRUE(ChunkSpace::Protect(aside, 4 * kChunk, Access::kRead));
  EXPECT_FALSE(KernelReads(place));
  ASSERT_EQ(ChunkSpace::Move(aside, place, mixed), "");
  EXPECT_FALSE(KernelReads(aside));
  EXPECT_FALSE(KernelWrites(place));
  for (uint64_t i = 0; i < 4 * kChunk; ++i) ASSERT_EQ(place[i], static_cast<char>(i * 7)) << i;
  EXPECT_EQ(AccessInChild(place), 0);
  ChunkSpace::FreeAddress(place, 4 * kChunk);
}

TEST_F(Mapped, OrdinaryMemoryTakesThePlace) {
  auto* place = static_cast<char*>(ChunkSpace::ReserveAddress(4 * kChunk));
  ASSERT_EQ(space_.Map(place, Take(4)), "");
  std::memset(place, 1, 4 * kChunk);
  auto* memory = static_cast<char*>(ChunkSpace::MakeMemory(4 * kChunk));
  std::memset(memory, 2, 4 * kChunk);
  ASSERT_TRUE(ChunkSpace::Replace(place, memory, 4 * kChunk));
  EXPECT_TRUE(std::all_of(place, place + 4 * kChunk, [](char value) { return value == 2; }));
  // Whole pages within the part go, what shares a page with others stays.
  ChunkSpace::Empty(place + 100, 2 * kChunk);
  EXPECT_EQ(place[4095], 2);
  EXPECT_EQ(place[4096], 0);
  EXPECT_EQ(place[8191], 0);
  EXPECT_EQ(place[8192], 2);
  ChunkSpace::FreeAddress(place, 4 * kChunk);
}

TEST_F(Mapped, AForkedChildInheritsNothing) {
  auto* address = static_cast<char*>(ChunkSpace::ReserveAddress(4 * kChunk));
  EXPECT_EQ(AccessInChild(address), 0);
  const std::vector<Extent> a = Take(1), b = Take(2), c = Take(1);
  ASSERT_EQ(space_.Map(address, {b[0], a[0], c[0]}), "");
  std::memset(address, 1, 4 * kChunk);
  for (uint64_t chunk = 0; chunk < 4; ++chunk) EXPECT_EQ(AccessInChild(address + chunk * kChunk), 0) << chunk;
  ChunkSpace::Unmap(address, 4 * kChunk);
  EXPECT_EQ(AccessInChild(address), 0);
  ASSERT_EQ(space_.Map(address, {a[0], b[0]}), "");
  EXPECT_EQ(AccessInChild(address), 0);
  ChunkSpace::FreeAddress(address, 4 * kChunk);
}

// Looks for a mapping of the memfd with nothing but system calls: other threads' locks may be held in a child.
int ChildSeesMapping() {
  const int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (maps < 0) return 2;
  static char text[1 << 20];
  size_t size = 0;
  for (ssize_t got; size < sizeof(text) && (got = read(maps, text + size, sizeof(text) - size)) > 0;) {
    size += static_cast<size_t>(got);
  }
  close(maps);
  return memmem(text, size, "memfd:misa-chunks", 17) == nullptr ? 0 : 1;
}

// Data-loader workers are forked whenever the user's loop wants them, also while the mover maps.
TEST(ChunkSpaceFork, AChildForkedWhileAThreadMapsInheritsNothing) {
  constexpr uint64_t kBytes = 256 * kChunk;
  ChunkSpace space(MakeMemfd(kBytes), kBytes, kChunk);
  std::vector<Extent> extents;
  for (uint64_t c = 0; c < 256; c += 2) extents.push_back({(c * 37 % 256) * kChunk, kChunk});
  ASSERT_EQ(space.Back(extents), "");
  void* address = ChunkSpace::ReserveAddress(kBytes);
  std::atomic<bool> stop{false};
  std::thread mapper([&] {
    while (!stop.load()) {
      EXPECT_EQ(space.Map(address, extents), "");
      ChunkSpace::Unmap(address, extents.size() * kChunk);
    }
  });
  int seen = 0;
  for (int i = 0; i < 100; ++i) {
    const pid_t pid = fork();
    if (pid == 0) _exit(ChildSeesMapping());
    int status = -1;
    ASSERT_EQ(waitpid(pid, &status, 0), pid);
    ASSERT_TRUE(WIFEXITED(status));
    ASSERT_NE(WEXITSTATUS(status), 2);
    seen += WEXITSTATUS(status);
  }
  stop.store(true);
  mapper.join();
  EXPECT_EQ(seen, 0);
  ChunkSpace::FreeAddress(address, kBytes);
}

}  // namespace
}  // namespace misa
