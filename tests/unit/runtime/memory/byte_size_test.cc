#include "runtime/memory/byte_size.h"

#include <gmock/gmock.h>

#include <limits>

namespace misa {
namespace {

using ::testing::HasSubstr;

uint64_t Parse(const std::string& text) {
  uint64_t bytes = 12345;
  const std::string problem = ParseByteSize(text, &bytes);
  EXPECT_EQ(problem, "") << text;
  return bytes;
}

TEST(ByteSize, ReadsBinaryDecimalAndPlainSizes) {
  EXPECT_EQ(Parse("24GiB"), 24ull << 30);
  EXPECT_EQ(Parse("512MiB"), 512ull << 20);
  EXPECT_EQ(Parse("64KiB"), 64ull << 10);
  EXPECT_EQ(Parse("2TiB"), 2ull << 40);
  EXPECT_EQ(Parse("1000000"), 1000000u);
  EXPECT_EQ(Parse("7B"), 7u);
  EXPECT_EQ(Parse("3kB"), 3000u);
  EXPECT_EQ(Parse("3KB"), 3000u);
  EXPECT_EQ(Parse("5MB"), 5000000u);
  EXPECT_EQ(Parse("100GB"), 100000000000u);
  EXPECT_EQ(Parse("0.1GB"), 100000000u);
  EXPECT_EQ(Parse("1.5KiB"), 1536u);
  EXPECT_EQ(Parse(" 24 GiB "), 24ull << 30);
  EXPECT_EQ(Parse("18446744073709551615"), std::numeric_limits<uint64_t>::max());
}

TEST(ByteSize, RefusesTheRestWithASentence) {
  for (const char* text : {"", "GiB", "-1", "1.GiB", "24gib", "24 G", "1e9", "18446744073709551616", "16777216TiB", "nan",
                           "1.0000000001GiB"}) {
    uint64_t bytes = 77;
    const std::string problem = ParseByteSize(text, &bytes);
    EXPECT_THAT(problem, HasSubstr("is not a size in bytes")) << text;
    EXPECT_EQ(bytes, 77u) << text;
  }
}

TEST(ByteSize, WritesWhatItReads) {
  EXPECT_EQ(FormatByteSize(0), "0B");
  EXPECT_EQ(FormatByteSize(1023), "1023B");
  EXPECT_EQ(FormatByteSize(24ull << 30), "24GiB");
  EXPECT_EQ(FormatByteSize((1ull << 30) + (1ull << 29)), "1.50GiB");
  for (const uint64_t bytes : {0ull, 5ull, 64ull << 10, 3ull << 20, 7ull << 30, 2ull << 40}) {
    EXPECT_EQ(Parse(FormatByteSize(bytes)), bytes);
  }
}

}  // namespace
}  // namespace misa
