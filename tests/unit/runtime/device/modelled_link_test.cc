// Real bytes over a modelled link: that they arrive, that failures are sentences, that nothing completes before its time.
// When copies end exactly is link_model_test's.
#include "runtime/device/modelled_link.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <map>
#include <random>
#include <thread>

namespace misa {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kMiB = 1 << 20;
constexpr auto kLoad = Transfer::Direction::kLoad;
constexpr auto kUnload = Transfer::Direction::kUnload;
constexpr double kDeadline = 60;
using Clock = std::chrono::steady_clock;

std::vector<char> Random(uint64_t bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<char> data(bytes);
  for (char& c : data) c = static_cast<char>(random());
  return data;
}

class ModelledLinkTest : public ::testing::Test {
 protected:
  void Open(uint64_t bytes, double rate = 1e12, double latency = 0, int flags = O_RDWR) {
    int fd = memfd_create("misa-link-test", MFD_CLOEXEC);
    ASSERT_GE(fd, 0);
    ASSERT_EQ(ftruncate(fd, static_cast<off_t>(bytes)), 0);
    if (flags != O_RDWR) {
      const int narrow = open(("/proc/self/fd/" + std::to_string(fd)).c_str(), flags | O_CLOEXEC);
      close(fd);
      fd = narrow;
      ASSERT_GE(fd, 0);
    }
    std::string error;
    link_ = MakeModelledLink(fd, {{rate, rate, rate, rate}, latency}, &error);
    ASSERT_NE(link_, nullptr) << error;
  }

  std::map<uint64_t, Completion> Complete(size_t count) {
    std::vector<Completion> completions;
    const auto end = Clock::now() + std::chrono::duration<double>(kDeadline);
    while (completions.size() < count && Clock::now() < end) link_->Wait(0.5, &completions);
    EXPECT_EQ(completions.size(), count);
    std::map<uint64_t, Completion> by_tag;
    for (const Completion& c : completions) EXPECT_TRUE(by_tag.emplace(c.tag, c).second) << "completed twice";
    return by_tag;
  }

  std::unique_ptr<Link> link_;
};

TEST_F(ModelledLinkTest, WhatIsUnloadedIsLoadedAgain) {
  const std::vector<uint64_t> sizes = {4096, 4 * kMiB, 4 * kMiB + 4096, 9 * kMiB};
  Open(32 * kMiB);
  std::vector<std::vector<char>> out, in;
  uint64_t offset = 0;
  for (uint64_t i = 0; i < sizes.size(); ++i) {
    out.push_back(Random(sizes[i], i));
    in.emplace_back(sizes[i]);
    link_->Submit({kUnload, out[i].data(), offset, sizes[i], i});
    offset += sizes[i];
  }
  EXPECT_EQ(link_->in_flight(), sizes.size());
  for (const auto& [tag, c] : Complete(sizes.size())) {
    EXPECT_THAT(c.error, IsEmpty());
    EXPECT_EQ(c.bytes, sizes[tag]);
    EXPECT_EQ(c.direction, kUnload);
  }
  offset = 0;
  for (uint64_t i = 0; i < sizes.size(); ++i) {
    link_->Submit({kLoad, in[i].data(), offset, sizes[i], i});
    offset += sizes[i];
  }
  Complete(sizes.size());
  EXPECT_EQ(in, out);
  EXPECT_EQ(link_->in_flight(), 0u);
}

TEST_F(ModelledLinkTest, NothingCompletesBeforeItsTime) {
  Open(2 * kMiB, /*rate=*/20.0 * kMiB, /*latency=*/0.01);
  std::vector<char> data = Random(2 * kMiB, 1), back(2 * kMiB);
  const auto start = Clock::now();
  link_->Submit({kUnload, data.data(), 0, kMiB, 1});
  link_->Submit({kUnload, data.data() + kMiB, kMiB, kMiB, 2});
  auto done = Complete(2);
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  EXPECT_GE(seconds, 0.12 - 1e-6);
  EXPECT_GE(done[1].seconds, 0.06 - 1e-6);
  EXPECT_GE(done[2].seconds, 0.06 - 1e-6);  // submitted after the first, and may be by much
  EXPECT_GE(link_->late_seconds(), 0);
  EXPECT_EQ(link_->known_rates().load, 20.0 * kMiB);
}

TEST_F(ModelledLinkTest, TheEndOfTheFileIsASentenceAndTheNextTransferWorks) {
  Open(6 * kMiB);
  std::vector<char> large(12 * kMiB), small(4096);
  link_->Submit({kLoad, large.data(), 0, large.size(), 1});
  link_->Submit({kLoad, small.data(), 100 * kMiB, small.size(), 2});
  link_->Submit({kLoad, small.data(), 0, small.size(), 3});
  auto done = Complete(3);
  EXPECT_THAT(done[1].error, HasSubstr("ended before the data did"));
  EXPECT_THAT(done[2].error, HasSubstr("ended before the data did"));
  EXPECT_THAT(done[3].error, IsEmpty());
}

TEST_F(ModelledLinkTest, AFileThatIsNotOpenForItIsASentence) {
  Open(kMiB, 1e12, 0, O_RDONLY);
  std::vector<char> data(4096);
  link_->Submit({kUnload, data.data(), 0, data.size(), 1});
  EXPECT_THAT(Complete(1)[1].error, HasSubstr("Bad file descriptor"));
  link_->Submit({kLoad, data.data(), 0, data.size(), 2});
  EXPECT_THAT(Complete(1)[2].error, IsEmpty());
}

TEST_F(ModelledLinkTest, MemoryThatIsNotThereIsASentence) {
  Open(kMiB);
  void* nothing = mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  link_->Submit({kLoad, static_cast<char*>(nothing), 0, 4096, 1});
  link_->Submit({kUnload, static_cast<char*>(nothing), 0, 4096, 2});
  auto done = Complete(2);
  EXPECT_THAT(done[1].error, HasSubstr("Bad address"));
  EXPECT_THAT(done[2].error, HasSubstr("Bad address"));
  munmap(nothing, 4096);
}

TEST_F(ModelledLinkTest, WakeEndsAWaitAndAWaitEndsByItself) {
  Open(kMiB);
  std::vector<Completion> completions;
  for (int i = 0; i < 3; ++i) {
    link_->Wake();
    const auto start = Clock::now();
    link_->Wait(kDeadline, &completions);
    std::thread waker([&] { link_->Wake(); });
    link_->Wait(kDeadline, &completions);
    waker.join();
    EXPECT_LT(Clock::now() - start, std::chrono::duration<double>(kDeadline / 2));
  }
  const auto start = Clock::now();
  link_->Wait(0.02, &completions);
  EXPECT_GE(Clock::now() - start, std::chrono::duration<double>(0.015));
  EXPECT_THAT(completions, IsEmpty());
}

TEST_F(ModelledLinkTest, GoesWithTransfersUnderWay) {
  Open(40 * kMiB, /*rate=*/1e6);
  std::vector<char> out = Random(4 * kMiB, 1), in(4 * kMiB);
  link_->Submit({kUnload, out.data(), 0, out.size(), 1});
  link_->Submit({kLoad, in.data(), 20 * kMiB, in.size(), 2});
  link_.reset();
}

TEST(ModelledLink, AnImpossibleModelIsASentence) {
  std::string error;
  EXPECT_EQ(MakeModelledLink(memfd_create("misa-link-test", MFD_CLOEXEC), {{0, 1, 1, 1}, 0}, &error), nullptr);
  EXPECT_THAT(error, HasSubstr("above 0"));
}

}  // namespace
}  // namespace misa
