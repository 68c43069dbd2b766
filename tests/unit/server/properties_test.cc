#include "runtime/device/cpu/properties.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <limits>

#include "server/lease/process.h"

namespace misa::device {
namespace {

void Write(const std::string& path, const std::string& text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path) << text;
}

TEST(Properties, TheSmallestCgroupLimitOnTheWayUpCounts) {
  char name[] = "/tmp/misa-cgroup-XXXXXX";
  const std::string root = mkdtemp(name);
  EXPECT_EQ(CgroupLimitBytes("0::/a/b\n", root), std::numeric_limits<uint64_t>::max());
  Write(root + "/a/b/memory.max", "max\n");
  Write(root + "/a/memory.max", "5000\n");
  EXPECT_EQ(CgroupLimitBytes("0::/a/b\n", root), 5000u);
  Write(root + "/memory/x/memory.limit_in_bytes", "4000\n");
  EXPECT_EQ(CgroupLimitBytes("0::/a/b\n7:cpu,memory:/x\n", root), 4000u);
  // In a container the path is the host's, and the group's own limit stands at the root.
  Write(root + "/memory/memory.limit_in_bytes", "3000\n");
  EXPECT_EQ(CgroupLimitBytes("7:memory:/docker/abc\n", root), 3000u);
  EXPECT_EQ(CgroupLimitBytes("garbage", root), std::numeric_limits<uint64_t>::max());
  std::filesystem::remove_all(root);
}

TEST(Properties, AreStable) {
  EXPECT_GT(UsableMemoryBytes(), 0u);
  EXPECT_EQ(CpuUuid(), CpuUuid());
  EXPECT_EQ(CpuUuid().substr(0, 4), "CPU-");
  EXPECT_NE(CpuName(), "");
}

TEST(Process, TellsItsOwnStartAndEnd) {
  EXPECT_GT(server::ProcessStartTime(getpid()), 0u);
  EXPECT_EQ(server::ProcessStartTime(-1), 0u);
  const UniqueFd self = server::OpenPidfd(getpid());
  ASSERT_TRUE(self.valid());
  EXPECT_FALSE(server::HasEnded(self.get()));
}

}  // namespace
}  // namespace misa::device
