#include "server/calibration.h"

#include <gmock/gmock.h>

#include <filesystem>

#include "runtime/device/cpu/disk_tier.h"

namespace misa::server {
namespace {

class FullDisk : public device::LowerTier {
 public:
  const char* name() const override { return "disk"; }
  device::TierOutcome Create(std::unique_ptr<device::TierFile>*) override {
    return {device::TierOutcome::kFull, "the disk is full"};
  }
  uint32_t block_bytes() const override { return 4096; }
  uint64_t FreeBytes() const override { return 0; }
};

TEST(Calibration, MeasuresEveryDirectionAndLeavesNothingBehind) {
  char name[] = "/tmp/misa-calibrate-XXXXXX";
  const std::string folder = mkdtemp(name);
  device::DirectDiskTier disk(folder);
  const std::string problem = disk.Open();
  if (!problem.empty()) {
    std::filesystem::remove_all(folder);
    GTEST_SKIP() << problem;
  }
  policy::LinkRates link;
  ASSERT_EQ(Calibrate(&disk, 32 << 20, 5.0 / 8, &link), "");
  EXPECT_GT(link.load, 0);
  EXPECT_GT(link.unload, 0);
  EXPECT_LE(link.duplex_load, link.load);
  EXPECT_LE(link.duplex_unload, link.unload);
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  std::filesystem::remove_all(folder);
}

TEST(Calibration, SaysWhyNothingWasMeasured) {
  FullDisk disk;
  policy::LinkRates link = DefaultLink();
  EXPECT_EQ(Calibrate(&disk, 32 << 20, 0.1, &link), "the disk is full");
  EXPECT_EQ(link.load, DefaultLink().load);
}

}  // namespace
}  // namespace misa::server
