#include "client/core/block_mappings.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace misa {
namespace {

constexpr size_t kMiB = 1 << 20;

class BlockMappingsTest : public ::testing::Test {
 protected:
  char* Make(size_t size) {
    void* block = mappings_.Make(size);
    if (block != nullptr) meter_.AddOther(size);
    return static_cast<char*>(block);
  }

  DeviceMeter meter_;
  BlockMappings mappings_{&meter_, 64 * kMiB};
};

TEST_F(BlockMappingsTest, AFreedBlockServesARequestOfItsSize) {
  char* block = Make(512 << 10);
  ASSERT_TRUE(mappings_.Free(block, true));
  EXPECT_EQ(meter_.kept_bytes(), 512u << 10);
  EXPECT_EQ(meter_.other_bytes(), 0u);
  EXPECT_EQ(mappings_.Reuse(256 << 10), nullptr);
  EXPECT_EQ(mappings_.Reuse(512 << 10), block);
  EXPECT_EQ(meter_.kept_bytes(), 0u);
  EXPECT_EQ(meter_.total_bytes(), 512u << 10);
}

TEST_F(BlockMappingsTest, FreedBlocksOfOtherSizesArePutTogetherWithoutNewMemory) {
  char* first = Make(4 * kMiB);
  char* second = Make(4 * kMiB);
  std::memset(first, 1, 4 * kMiB);
  std::memset(second, 2, 4 * kMiB);
  ASSERT_TRUE(mappings_.Free(first, true));
  ASSERT_TRUE(mappings_.Free(second, true));
  EXPECT_EQ(mappings_.Reuse(10 * kMiB), nullptr);  // more than there is

  char* block = static_cast<char*>(mappings_.Reuse(6 * kMiB));
  ASSERT_NE(block, nullptr);
  // The pages came along: nothing was zeroed for it.
  EXPECT_EQ(block[0], 1);
  EXPECT_EQ(block[4 * kMiB], 2);
  std::memset(block, 3, 6 * kMiB);
  EXPECT_EQ(meter_.total_bytes(), 8 * kMiB);
  EXPECT_EQ(meter_.other_bytes(), 6 * kMiB);
  EXPECT_EQ(meter_.kept_bytes(), 2 * kMiB);

  char* rest = static_cast<char*>(mappings_.Reuse(2 * kMiB));
  ASSERT_NE(rest, nullptr);
  EXPECT_EQ(rest[0], 2);
  std::memset(rest, 4, 2 * kMiB);
  EXPECT_EQ(block[6 * kMiB - 1], 3);

  // A block of several pieces is kept, cut and put together again like any other.
  ASSERT_TRUE(mappings_.Free(block, true));
  ASSERT_TRUE(mappings_.Free(rest, true));
  char* all = static_cast<char*>(mappings_.Reuse(8 * kMiB));
  ASSERT_NE(all, nullptr);
  EXPECT_EQ(all[5 * kMiB], 3);
  EXPECT_EQ(all[7 * kMiB], 4);
  std::memset(all, 5, 8 * kMiB);
  EXPECT_EQ(meter_.kept_bytes(), 0u);
  ASSERT_TRUE(mappings_.Free(all, false));
  EXPECT_EQ(meter_.total_bytes(), 0u);
}

TEST_F(BlockMappingsTest, ReclaimingTakesWhatIsAskedForAndNotTheWholeBlock) {
  ASSERT_TRUE(mappings_.Free(Make(8 * kMiB), true));
  mappings_.Reclaim(3 * kMiB);
  EXPECT_EQ(meter_.kept_bytes(), 4 * kMiB);
  EXPECT_EQ(meter_.total_bytes(), 4 * kMiB);
  mappings_.Reclaim(100 * kMiB);
  EXPECT_EQ(meter_.total_bytes(), 0u);
}

TEST_F(BlockMappingsTest, NoMoreIsKeptThanAllowed) {
  char* large = Make(65 * kMiB);
  ASSERT_TRUE(mappings_.Free(large, true));
  EXPECT_EQ(meter_.total_bytes(), 0u);
}

TEST_F(BlockMappingsTest, ABlockOfManyPiecesIsNotKept) {
  std::vector<char*> blocks;
  for (int i = 0; i < 20; ++i) blocks.push_back(Make(2 * kMiB));
  for (char* block : blocks) ASSERT_TRUE(mappings_.Free(block, true));
  void* all = mappings_.Reuse(40 * kMiB);
  ASSERT_NE(all, nullptr);
  EXPECT_EQ(meter_.other_bytes(), 40 * kMiB);
  ASSERT_TRUE(mappings_.Free(all, true));
  EXPECT_EQ(meter_.total_bytes(), 0u);
}

TEST_F(BlockMappingsTest, WhatIsNoneOfItsBlocksIsLeftAlone) {
  int other = 0;
  EXPECT_FALSE(mappings_.Free(&other, true));
  EXPECT_FALSE(mappings_.Drop(&other));
  void* uncounted = mappings_.Make(4 * kMiB);
  EXPECT_TRUE(mappings_.Drop(uncounted));
  EXPECT_EQ(meter_.total_bytes(), 0u);
}

}  // namespace
}  // namespace misa
