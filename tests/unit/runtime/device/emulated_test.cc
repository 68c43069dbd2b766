// The host tier and the twins' figures.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#include "runtime/device/emulated/compute_rate.h"
#include "runtime/device/emulated/host_tier.h"
#include "runtime/device/emulated/twin.h"

namespace misa::device {
namespace {

using ::testing::HasSubstr;

uint64_t BackedBytes(int fd) {
  struct stat status {};
  EXPECT_EQ(fstat(fd, &status), 0);
  return static_cast<uint64_t>(status.st_blocks) * 512;
}

TEST(HostTier, ReservesBeforeItPromisesAndGrowsInPlace) {
  HostTier tier([] { return uint64_t{1} << 30; });
  std::unique_ptr<TierFile> file;
  ASSERT_TRUE(tier.Create(&file).ok());
  EXPECT_STREQ(tier.name(), "host");
  ASSERT_TRUE(file->Reserve(1 << 20).ok());
  EXPECT_EQ(BackedBytes(file->fd()), 1u << 20);
  ASSERT_EQ(pwrite(file->fd(), "here", 4, 4096), 4);
  ASSERT_TRUE(file->Reserve(3 << 20).ok());
  EXPECT_EQ(BackedBytes(file->fd()), 3u << 20);
  ASSERT_TRUE(file->Reserve(1 << 20).ok());  // never less
  EXPECT_EQ(file->bytes(), 3u << 20);
  char text[5] = {};
  ASSERT_EQ(pread(file->fd(), text, 4, 4096), 4);
  EXPECT_STREQ(text, "here");
  EXPECT_EQ(ftruncate(file->fd(), 0), -1) << "a trainer must not take the memory away under a copy";
}

TEST(HostTier, ScrubbingGivesThePagesBackWhoeverHoldsTheFile) {
  HostTier tier([] { return uint64_t{1} << 30; });
  std::unique_ptr<TierFile> file;
  ASSERT_TRUE(tier.Create(&file).ok());
  ASSERT_TRUE(file->Reserve(1 << 20).ok());
  ASSERT_EQ(pwrite(file->fd(), "secret", 6, 0), 6);
  const int other = dup(file->fd());
  EXPECT_EQ(file->Scrub(), "");
  file.reset();
  EXPECT_EQ(BackedBytes(other), 0u);
  char text[7] = {};
  ASSERT_EQ(pread(other, text, 6, 0), 6);
  EXPECT_EQ(std::string(text, 6), std::string(6, '\0'));
  close(other);
}

TEST(HostTier, WhatCannotBeReservedChangesNothing) {
  uint64_t available = 1 << 20;
  HostTier tier([&available] { return available; });
  std::unique_ptr<TierFile> file;
  ASSERT_TRUE(tier.Create(&file).ok());
  ASSERT_TRUE(file->Reserve(1 << 20).ok());
  available = 2 << 20;
  const TierOutcome outcome = file->Reserve((3 << 20) + 4096);
  EXPECT_EQ(outcome.kind, TierOutcome::kFull);
  EXPECT_THAT(outcome.sentence, HasSubstr("2MiB (2097152 bytes) of memory can be had now; nothing was reserved"));
  EXPECT_EQ(file->bytes(), 1u << 20);
  EXPECT_EQ(BackedBytes(file->fd()), 1u << 20);
}

// A layer's load takes as long as the forward of tau tokens, whatever the machine and the element.
TEST(Twins, KeepTheTokensThatHideALayersLoad) {
  ASSERT_EQ(Twins().size(), 3u);
  for (const Twin& twin : Twins()) {
    EXPECT_EQ(FindTwin(twin.name), &twin);
    for (const double flops : {5e10, 3e14}) {
      for (const double element_bytes : {2.0, 4.0}) {
        const policy::LinkRates rates = TwinRates(twin, flops, element_bytes, twin.duplex_factor);
        constexpr double kParameters = 1e6;
        const double load_seconds = kParameters * element_bytes / rates.load;
        const double token_seconds = 2 * kParameters / flops;
        EXPECT_NEAR(load_seconds / token_seconds, twin.hiding_tokens, 1e-6 * twin.hiding_tokens);
        EXPECT_NEAR(rates.duplex_unload / rates.unload, twin.duplex_factor, 1e-9);
      }
    }
  }
  EXPECT_EQ(FindTwin("rtx-9999"), nullptr);
  // The real devices' own figures: 150 TFLOP/s behind 26 GB/s.
  EXPECT_NEAR(TwinRates(*FindTwin("a100-80g"), 150e12, 2, 1).load, 26e9, 0.3e9);
}

TEST(ComputeRate, IsThatOfAProcessor) {
  const double rate = MeasureComputeRate(0.01);
  EXPECT_GT(rate, 1e8);
  EXPECT_LT(rate, 1e13);
}

}  // namespace
}  // namespace misa::device
