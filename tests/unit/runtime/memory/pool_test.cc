#include "runtime/memory/pool.h"

#include <gmock/gmock.h>

#include <limits>
#include <random>

namespace misa {
namespace {

using ::testing::HasSubstr;

TEST(Pool, FollowsALeaseThroughItsLife) {
  Pool pool("device", 100);
  EXPECT_EQ(pool.Lease(60), "");
  EXPECT_EQ(pool.free_bytes(), 40u);
  EXPECT_EQ(pool.Return(10), "");
  EXPECT_EQ(pool.BeginReclaim(50), "");
  EXPECT_EQ(pool.reclaiming_bytes(), 50u);
  EXPECT_EQ(pool.free_bytes(), 50u);
  EXPECT_EQ(pool.EndReclaim(50), "");
  EXPECT_EQ(pool.free_bytes(), 100u);
}

TEST(Pool, NamesWhatWasAskedAndWhatIsFree) {
  Pool pool("device", 100);
  ASSERT_EQ(pool.Lease(60), "");
  EXPECT_THAT(pool.Lease(41), HasSubstr("the device pool has no room for 41B"));
  EXPECT_THAT(pool.Lease(std::numeric_limits<uint64_t>::max()), HasSubstr("no room"));
  EXPECT_THAT(pool.EndReclaim(1), HasSubstr("only 0 bytes are reclaiming"));
  EXPECT_THAT(pool.Return(61), HasSubstr("only 60 bytes are leased"));
  EXPECT_EQ(pool.free_bytes(), 40u);
}

TEST(Pool, TakesNoMoreOrphansThanItHoldsRoomFor) {
  Pool pool("device", 100);
  EXPECT_EQ(pool.AddOrphan(70), 70u);
  EXPECT_EQ(pool.AddOrphan(70), 30u);
  EXPECT_EQ(pool.free_bytes(), 0u);
  EXPECT_EQ(pool.EndOrphan(100), "");
  EXPECT_EQ(pool.free_bytes(), 100u);
}

// Whatever is asked in whatever order, no byte is lost or made.
TEST(Pool, KeepsCountUnderRandomMoves) {
  std::mt19937_64 random(20240607);
  for (int round = 0; round < 50; ++round) {
    const uint64_t capacity = random() % 3 == 0 ? std::numeric_limits<uint64_t>::max() : random() % 10000;
    Pool pool("device", capacity);
    for (int step = 0; step < 2000; ++step) {
      const uint64_t bytes = random() % 8 == 0 ? random() : random() % 500;
      const uint64_t free_before = pool.free_bytes();
      switch (random() % 6) {
        case 0: EXPECT_EQ(pool.Lease(bytes).empty(), bytes <= free_before); break;
        case 1: pool.Return(bytes); break;
        case 2: pool.BeginReclaim(bytes); break;
        case 3: pool.EndReclaim(bytes); break;
        case 4: pool.AddOrphan(bytes); break;
        case 5: pool.EndOrphan(bytes); break;
      }
      ASSERT_EQ(pool.Check(), "");
      ASSERT_LE(pool.free_bytes(), capacity);
    }
  }
}

}  // namespace
}  // namespace misa
