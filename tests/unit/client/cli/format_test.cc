#include "client/cli/format.h"

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "misa/v1/admin.pb.h"

namespace misa::cli {
namespace {

TEST(TableTest, PadsColumnsToTheWidestCellWithoutTabsOrTrailingBlanks) {
  Table table({{"NAME"}, {"SIZE", Alignment::kRight}, {"NOTE"}});
  table.AddRow({"a", "12MiB", ""});
  table.AddRow({"longer", "1B", "x"});
  EXPECT_EQ(table.Render(false),
            "NAME     SIZE  NOTE\n"
            "a       12MiB\n"
            "longer     1B  x\n");
}

TEST(TableTest, BoldTitlesOnlyWhenAsked) {
  Table table({{"NAME"}});
  table.AddRow({"a"});
  EXPECT_EQ(table.Render(true), "\033[1mNAME\033[0m\na\n");
  EXPECT_THAT(table.Render(false), testing::Not(testing::HasSubstr("\033")));
}

TEST(TableTest, CountsCharactersNotBytes) {
  EXPECT_EQ(DisplayWidth("850 µs"), 6u);
  Table table({{"T", Alignment::kRight}, {"N"}});
  table.AddRow({"850 µs", "a"});
  table.AddRow({"12.3 ms", "b"});
  EXPECT_EQ(table.Render(false), "      T  N\n 850 µs  a\n12.3 ms  b\n");
}

TEST(FormatSecondsTest, KeepsThreeDigitsAndNamesTheUnit) {
  EXPECT_EQ(FormatSeconds(0), "0 s");
  EXPECT_EQ(FormatSeconds(0.00085), "850 µs");
  EXPECT_EQ(FormatSeconds(0.0123), "12.3 ms");
  EXPECT_EQ(FormatSeconds(1.27), "1.27 s");
  EXPECT_EQ(FormatSeconds(0.99999), "1.00 s");
  EXPECT_EQ(FormatSeconds(119.9), "2 min 00 s");
  EXPECT_EQ(FormatSeconds(245), "4 min 05 s");
  EXPECT_EQ(FormatSeconds(3 * 3600 + 12 * 60), "3 h 12 min");
  EXPECT_EQ(FormatSeconds(2 * 86400 + 4 * 3600), "2 d 04 h");
  EXPECT_EQ(FormatSeconds(-1), "-");
  EXPECT_EQ(FormatSeconds(std::numeric_limits<double>::infinity()), "-");
}

TEST(FormatRateTest, SaysWhenNothingWasMeasured) {
  EXPECT_EQ(FormatRate(0), "-");
  EXPECT_EQ(FormatRate(1.1e9), "1.10 GB/s");
  EXPECT_EQ(FormatRate(800e6), "800 MB/s");
}

TEST(FormatCountTest, AbbreviatesLargeCounts) {
  EXPECT_EQ(FormatCount(512), "512");
  EXPECT_EQ(FormatCount(262144), "262 k");
  EXPECT_EQ(FormatCount(27400000), "27.4 M");
  EXPECT_EQ(FormatCount(999999999), "1.00 G");
}

TEST(FormatEnumTest, DropsThePrefix) {
  EXPECT_EQ(FormatResidency(v1::RESIDENCY_UNLOADING), "unloading");
  EXPECT_EQ(FormatResidency(v1::RESIDENCY_UNSPECIFIED), "-");
  EXPECT_EQ(FormatResidency(static_cast<v1::Residency>(99)), "-");
  EXPECT_EQ(FormatMode(v1::MODE_SAMPLED), "sampled");
}

TEST(PrintableTest, KeepsEscapeCodesFromTheTerminal) {
  EXPECT_EQ(Printable("a\033[31mb\tc"), "a?[31mb?c");
  EXPECT_EQ(Printable("größer"), "größer");
}

TEST(ToJsonTest, GivesSixtyFourBitNumbersAsNumbersAndEnumsAsWords) {
  v1::ListModulesResponse modules;
  v1::ModuleStatus* module = modules.add_modules();
  module->set_name("blocks.0.attention.query");
  module->set_parameter_count(uint64_t{1} << 40);
  module->set_weights(v1::RESIDENCY_DISK);
  module->set_importance(std::numeric_limits<double>::quiet_NaN());
  const nlohmann::json json = ToJson(modules);
  ASSERT_EQ(json["modules"].size(), 1u);
  const nlohmann::json& first = json["modules"][0];
  EXPECT_EQ(first["name"], "blocks.0.attention.query");
  EXPECT_EQ(first["parameter_count"].dump(), "1099511627776");
  EXPECT_EQ(first["weights"], "disk");
  EXPECT_EQ(first["gradients"], "unspecified");
  EXPECT_EQ(first["active"], false);
  EXPECT_TRUE(first["importance"].is_null());
}

TEST(ToJsonTest, IncludesNestedMessagesAndZeros) {
  v1::GetNodeResponse node;
  node.mutable_link()->set_load_bytes_per_second(1.5e9);
  v1::Orphan* orphan = node.add_orphans();
  orphan->set_pid(7);
  const nlohmann::json json = ToJson(node);
  EXPECT_EQ(json["link"]["load_bytes_per_second"], 1.5e9);
  EXPECT_EQ(json["free_bytes"], 0);
  EXPECT_EQ(json["orphans"][0]["pid"], 7);
}

}  // namespace
}  // namespace misa::cli
