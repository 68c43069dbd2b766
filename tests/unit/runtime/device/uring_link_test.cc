#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <thread>

#include "runtime/device/link.h"

namespace misa {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr uint64_t kBlock = 4096;
constexpr uint64_t kMiB = 1 << 20;
constexpr auto kLoad = Transfer::Direction::kLoad;
constexpr auto kUnload = Transfer::Direction::kUnload;
constexpr double kDeadline = 60;

// Memory with the alignment that direct I/O wants.
class Buffer {
 public:
  explicit Buffer(uint64_t bytes) : bytes_(bytes), data_(static_cast<char*>(std::aligned_alloc(kBlock, bytes))) {}
  ~Buffer() { std::free(data_); }
  char* data() { return data_; }
  uint64_t bytes() const { return bytes_; }
  void Fill(uint64_t seed) {
    std::mt19937_64 random(seed);
    for (uint64_t i = 0; i < bytes_; i += 8) {
      const uint64_t word = random();
      std::memcpy(data_ + i, &word, 8);
    }
  }
  bool Equals(Buffer& other) const { return std::memcmp(data_, other.data_, bytes_) == 0; }

 private:
  const uint64_t bytes_;
  char* const data_;
};

class UringLinkTest : public ::testing::Test {
 protected:
  void Open(uint64_t bytes, int flags = O_RDWR) {
    const char* folder = std::getenv("TMPDIR");
    std::string path = std::string(folder != nullptr ? folder : "/tmp") + "/misa-link-XXXXXX";
    const int made = mkstemp(path.data());
    ASSERT_GE(made, 0) << path;
    ASSERT_EQ(ftruncate(made, static_cast<off_t>(bytes)), 0);
    close(made);
    int fd = open(path.c_str(), flags | O_CLOEXEC | O_DIRECT);
    if (fd < 0) fd = open(path.c_str(), flags | O_CLOEXEC);  // a file system without direct I/O
    unlink(path.c_str());
    ASSERT_GE(fd, 0);
    std::string error;
    link_ = MakeUringLink(fd, &error);
    if (!link_) GTEST_SKIP() << error;
  }

  // Waits for so many more completions; by tag.
  std::map<uint64_t, Completion> Complete(size_t count) {
    std::vector<Completion> completions;
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(kDeadline);
    while (completions.size() < count && std::chrono::steady_clock::now() < end) link_->Wait(0.5, &completions);
    EXPECT_EQ(completions.size(), count);
    std::map<uint64_t, Completion> by_tag;
    for (const Completion& completion : completions) {
      EXPECT_TRUE(by_tag.emplace(completion.tag, completion).second) << "completed twice";
    }
    return by_tag;
  }

  std::unique_ptr<Link> link_;
};

TEST_F(UringLinkTest, WhatIsUnloadedIsLoadedAgain) {
  // Under, at and over the size of the blocks in which it is moved, and over what is in flight at once.
  const std::vector<uint64_t> sizes = {kBlock, 4 * kMiB, 4 * kMiB + kBlock, 9 * kMiB, 21 * kMiB + 3 * kBlock};
  uint64_t total = 0;
  for (uint64_t size : sizes) total += size;
  Open(total);
  if (!link_) return;
  std::vector<std::unique_ptr<Buffer>> out, in;
  uint64_t offset = 0;
  for (uint64_t i = 0; i < sizes.size(); ++i) {
    out.push_back(std::make_unique<Buffer>(sizes[i]));
    in.push_back(std::make_unique<Buffer>(sizes[i]));
    out[i]->Fill(i);
    in[i]->Fill(100 + i);
    link_->Submit({kUnload, out[i]->data(), offset, sizes[i], i});
    offset += sizes[i];
  }
  EXPECT_EQ(link_->in_flight(), sizes.size());
  auto done = Complete(sizes.size());
  EXPECT_EQ(link_->in_flight(), 0u);
  offset = 0;
  for (uint64_t i = 0; i < sizes.size(); ++i) {
    EXPECT_THAT(done[i].error, IsEmpty());
    EXPECT_EQ(done[i].bytes, sizes[i]);
    EXPECT_EQ(done[i].direction, kUnload);
    EXPECT_GE(done[i].seconds, 0);
    link_->Submit({kLoad, in[i]->data(), offset, sizes[i], i});
    offset += sizes[i];
  }
  done = Complete(sizes.size());
  for (uint64_t i = 0; i < sizes.size(); ++i) {
    EXPECT_THAT(done[i].error, IsEmpty());
    EXPECT_EQ(done[i].direction, kLoad);
    EXPECT_TRUE(in[i]->Equals(*out[i])) << i;
  }
}

TEST_F(UringLinkTest, BothDirectionsRunAtOnce) {
  constexpr uint64_t kEach = 6;
  constexpr uint64_t kSize = 5 * kMiB;
  Open(2 * kEach * kSize);
  if (!link_) return;
  std::vector<std::unique_ptr<Buffer>> first, second, loaded;
  for (uint64_t i = 0; i < kEach; ++i) {
    for (auto* buffers : {&first, &second, &loaded}) buffers->push_back(std::make_unique<Buffer>(kSize));
    first[i]->Fill(i);
    second[i]->Fill(50 + i);
    link_->Submit({kUnload, first[i]->data(), i * kSize, kSize, i});
  }
  Complete(kEach);
  for (uint64_t i = 0; i < kEach; ++i) {
    link_->Submit({kLoad, loaded[i]->data(), i * kSize, kSize, i});
    link_->Submit({kUnload, second[i]->data(), (kEach + i) * kSize, kSize, kEach + i});
  }
  for (const auto& [tag, completion] : Complete(2 * kEach)) EXPECT_THAT(completion.error, IsEmpty()) << tag;
  for (uint64_t i = 0; i < kEach; ++i) EXPECT_TRUE(loaded[i]->Equals(*first[i]));
  for (uint64_t i = 0; i < kEach; ++i) link_->Submit({kLoad, loaded[i]->data(), (kEach + i) * kSize, kSize, i});
  Complete(kEach);
  for (uint64_t i = 0; i < kEach; ++i) EXPECT_TRUE(loaded[i]->Equals(*second[i]));
}

TEST_F(UringLinkTest, TheEndOfTheFileIsASentenceAndTheNextTransferWorks) {
  Open(6 * kMiB);
  if (!link_) return;
  Buffer large(12 * kMiB), small(kBlock);
  link_->Submit({kLoad, large.data(), 0, large.bytes(), 1});                 // ends in its second block
  link_->Submit({kLoad, small.data(), 100 * kMiB, small.bytes(), 2});        // begins past the end
  link_->Submit({kLoad, small.data(), 0, small.bytes(), 3});
  auto done = Complete(3);
  EXPECT_THAT(done[1].error, HasSubstr("the file ended"));
  EXPECT_THAT(done[2].error, HasSubstr("the file ended"));
  EXPECT_THAT(done[3].error, IsEmpty());
  EXPECT_EQ(done[1].bytes, large.bytes());
  EXPECT_EQ(link_->in_flight(), 0u);
}

TEST_F(UringLinkTest, AnOffsetThatIsNoneIsASentence) {
  Open(kMiB);
  if (!link_) return;
  Buffer buffer(kBlock);
  link_->Submit({kUnload, buffer.data(), (uint64_t{1} << 63) + kBlock, kBlock, 1});
  EXPECT_THAT(Complete(1)[1].error, Not(IsEmpty()));
  link_->Submit({kUnload, buffer.data(), 0, kBlock, 2});
  EXPECT_THAT(Complete(1)[2].error, IsEmpty());
}

TEST_F(UringLinkTest, AFileThatIsNotOpenForItIsASentence) {
  Open(kMiB, O_RDONLY);
  if (!link_) return;
  Buffer buffer(9 * kMiB);
  buffer.Fill(1);
  link_->Submit({kUnload, buffer.data(), 0, buffer.bytes(), 1});
  EXPECT_THAT(Complete(1)[1].error, HasSubstr("Bad file descriptor"));
  link_->Submit({kLoad, buffer.data(), 0, kBlock, 2});
  EXPECT_THAT(Complete(1)[2].error, IsEmpty());
}

TEST_F(UringLinkTest, MemoryThatIsNotThereIsASentence) {
  Open(kMiB);
  if (!link_) return;
  void* nothing = mmap(nullptr, kBlock, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  link_->Submit({kLoad, static_cast<char*>(nothing), 0, kBlock, 1});
  link_->Submit({kUnload, static_cast<char*>(nothing), 0, kBlock, 2});
  auto done = Complete(2);
  EXPECT_THAT(done[1].error, HasSubstr("Bad address"));
  EXPECT_THAT(done[2].error, HasSubstr("Bad address"));
  munmap(nothing, kBlock);
}

// The limit on a file's size cuts a block in two: the first part is written, what is left fails.
TEST_F(UringLinkTest, AShortWriteIsNotTakenForAWholeOne) {
  Open(0);
  if (!link_) return;
  Buffer buffer(8 * kMiB);
  buffer.Fill(1);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit limit = before;
  limit.rlim_cur = 5 * kMiB;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  link_->Submit({kUnload, buffer.data(), 0, buffer.bytes(), 1});
  const std::string error = Complete(1)[1].error;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_THAT(error, HasSubstr("File too large"));
  link_->Submit({kUnload, buffer.data(), 0, buffer.bytes(), 2});
  EXPECT_THAT(Complete(1)[2].error, IsEmpty());
  Buffer loaded(8 * kMiB);
  link_->Submit({kLoad, loaded.data(), 0, loaded.bytes(), 3});
  EXPECT_THAT(Complete(1)[3].error, IsEmpty());
  EXPECT_TRUE(loaded.Equals(buffer));
}

TEST_F(UringLinkTest, AFileThatEndsWithinABlockIsASentence) {
  Open(kBlock + 100);
  if (!link_) return;
  Buffer buffer(2 * kBlock);
  link_->Submit({kLoad, buffer.data(), 0, buffer.bytes(), 1});
  EXPECT_THAT(Complete(1)[1].error, Not(IsEmpty()));
}

TEST_F(UringLinkTest, WakeEndsAWait) {
  Open(kMiB);
  if (!link_) return;
  std::vector<Completion> completions;
  using Clock = std::chrono::steady_clock;
  for (int i = 0; i < 3; ++i) {
    // Before it begins, and while it lasts.
    link_->Wake();
    const auto start = Clock::now();
    link_->Wait(kDeadline, &completions);
    std::thread waker([&] { link_->Wake(); });
    link_->Wait(kDeadline, &completions);
    waker.join();
    EXPECT_LT(Clock::now() - start, std::chrono::duration<double>(kDeadline / 2));
  }
  EXPECT_THAT(completions, IsEmpty());
  // Several wakes are one.
  link_->Wake();
  link_->Wake();
  link_->Wait(kDeadline, &completions);
  const auto start = Clock::now();
  link_->Wait(0.05, &completions);
  EXPECT_GE(Clock::now() - start, std::chrono::duration<double>(0.04));
}

TEST_F(UringLinkTest, AWaitEndsByItself) {
  Open(kMiB);
  if (!link_) return;
  std::vector<Completion> completions;
  const auto start = std::chrono::steady_clock::now();
  link_->Wait(0.02, &completions);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::duration<double>(0.015));
  EXPECT_THAT(completions, IsEmpty());
}

// Where the executor has given up waiting, the link goes with transfers under way.
TEST_F(UringLinkTest, GoesWithTransfersUnderWay) {
  Open(40 * kMiB);
  if (!link_) return;
  Buffer out(20 * kMiB), in(20 * kMiB);
  out.Fill(1);
  link_->Submit({kUnload, out.data(), 0, out.bytes(), 1});
  link_->Submit({kLoad, in.data(), 20 * kMiB, in.bytes(), 2});
  link_.reset();
}

TEST(UringLink, AFileThatIsNoneIsASentenceAtTheFirstTransfer) {
  std::string error;
  auto link = MakeUringLink(-1, &error);
  if (!link) GTEST_SKIP() << error;
  Buffer buffer(kBlock);
  link->Submit({kLoad, buffer.data(), 0, kBlock, 1});
  std::vector<Completion> completions;
  for (int i = 0; i < 100 && completions.empty(); ++i) link->Wait(0.5, &completions);
  ASSERT_EQ(completions.size(), 1u);
  EXPECT_THAT(completions[0].error, HasSubstr("Bad file descriptor"));
}

}  // namespace
}  // namespace misa
