// Device work with an injected disk.
#include "server/lease/holdings.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <unistd.h>

namespace misa::server {
namespace {

using ::testing::HasSubstr;

class FakeFile : public device::TierFile {
 public:
  FakeFile(uint64_t* room, int* open) : room_(room), open_(open) { ++*open_; }
  ~FakeFile() override {
    *room_ += bytes_;
    --*open_;
  }
  device::TierOutcome Reserve(uint64_t bytes) override {
    if (bytes <= bytes_) return {};
    if (bytes - bytes_ > *room_) return {device::TierOutcome::kFull, "the fake disk is full"};
    *room_ -= bytes - bytes_;
    bytes_ = bytes;
    return {};
  }
  int fd() const override { return 0; }
  uint64_t bytes() const override { return bytes_; }

 private:
  uint64_t* const room_;
  int* const open_;
  uint64_t bytes_ = 0;
};

class FakeDisk : public device::LowerTier {
 public:
  const char* name() const override { return "disk"; }
  device::TierOutcome Create(std::unique_ptr<device::TierFile>* file) override {
    if (broken) return {device::TierOutcome::kFailed, "the fake disk is broken"};
    *file = std::make_unique<FakeFile>(&room, &open);
    return {};
  }
  uint32_t block_bytes() const override { return 512; }
  uint64_t FreeBytes() const override { return room; }

  uint64_t room = 1000;
  int open = 0;
  bool broken = false;
};

class HoldingsTest : public ::testing::Test {
 protected:
  FakeDisk disk_;
  std::string send_problem_;
  std::vector<std::string> sent_;
  int last_fd_ = -1;
  Holdings holdings_{&disk_, [this](LeaseId, const std::string& json, int fd) {
                       if (send_problem_.empty()) {
                         sent_.push_back(json);
                         if (last_fd_ >= 0) close(last_fd_);
                         last_fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 10);
                       }
                       return send_problem_;
                     }};
  ~HoldingsTest() override {
    if (last_fd_ >= 0) close(last_fd_);
  }
};

TEST_F(HoldingsTest, ScrubsWhatAnotherProcessStillHolds) {
  ASSERT_TRUE(holdings_.Create({1, "s1", 65536, 65536}).ok());
  ASSERT_THAT(sent_, ::testing::ElementsAre(HasSubstr("\"chunks\"")));
  const char byte = 'x';
  ASSERT_EQ(pwrite(last_fd_, &byte, 1, 100), 1);
  EXPECT_EQ(holdings_.Release(1), "");
  char read_back = 'y';
  ASSERT_EQ(pread(last_fd_, &read_back, 1, 100), 1);
  EXPECT_EQ(read_back, '\0');
  EXPECT_EQ(holdings_.Release(1), "");  // once more is no fault
}

TEST_F(HoldingsTest, MemoryThatCannotBeSentIsNotKept) {
  send_problem_ = "the socket is closed";
  EXPECT_EQ(holdings_.Create({1, "s1", 65536, 65536}).code, Code::kUnavailable);
  EXPECT_EQ(holdings_.Reserve({1, 100}).code, Code::kInternal);
}

TEST_F(HoldingsTest, AFullDiskKeepsWhatWasReserved) {
  ASSERT_TRUE(holdings_.Create({1, "s1", 65536, 65536}).ok());
  EXPECT_EQ(holdings_.Reserve({1, 2000}).code, Code::kExhausted);
  EXPECT_EQ(disk_.open, 0);
  ASSERT_TRUE(holdings_.Reserve({1, 600}).ok());
  EXPECT_EQ(sent_.size(), 2u);
  EXPECT_EQ(holdings_.Reserve({1, 1200}).code, Code::kExhausted);
  EXPECT_EQ(disk_.room, 400u);
  ASSERT_TRUE(holdings_.Reserve({1, 1000}).ok());
  EXPECT_EQ(sent_.size(), 2u);  // the file is sent once
  holdings_.Release(1);
  EXPECT_EQ(disk_.room, 1000u);
  EXPECT_EQ(disk_.open, 0);
}

TEST_F(HoldingsTest, ABrokenDiskIsAnError) {
  ASSERT_TRUE(holdings_.Create({1, "s1", 65536, 65536}).ok());
  disk_.broken = true;
  EXPECT_EQ(holdings_.Reserve({1, 1}).code, Code::kInternal);
}

}  // namespace
}  // namespace misa::server
