#include "runtime/capacity/device.h"

#include <gmock/gmock.h>

#include <limits>
#include <nlohmann/json.hpp>

namespace misa::capacity {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

const char kDevice[] = R"({"name": "twin", "capacity_bytes": 1.6e9, "flops_per_second": 9e10,
  "h2d_bytes_per_second": 3e8, "d2h_bytes_per_second": 2e8, "total_bytes_per_second": 4e8, "host_bytes": 8000000000})";

TEST(DeviceTest, KnownDevicesAreSound) {
  for (const DeviceProfile& device : KnownDevices()) EXPECT_EQ(CheckDevice(device), "") << device.name;
  EXPECT_EQ(FindDevice("rtx-3090")->capacity_bytes, uint64_t{24} << 30);
  EXPECT_EQ(FindDevice("abacus"), nullptr);
  EXPECT_THAT(KnownDeviceNames(), HasSubstr("a100-80g"));
}

TEST(DeviceTest, TokensWhoseForwardHidesALayersLoad) {
  // Two bytes up and two operations a token for each parameter: achieved rate over link rate.
  const auto tokens = [](const char* name) {
    const DeviceProfile& device = *FindDevice(name);
    return device.flops_per_second * device.utilization / device.h2d_bytes_per_second;
  };
  EXPECT_NEAR(tokens("a100-80g"), 5800, 100);
  EXPECT_NEAR(tokens("h200"), 8200, 100);
  EXPECT_NEAR(tokens("rtx-3090"), 2000, 100);
}

TEST(DeviceTest, ReadsADescription) {
  const policy::Result<DeviceProfile> device = ParseDevice(kDevice);
  ASSERT_EQ(device.error, "");
  EXPECT_EQ(device.value.capacity_bytes, 1600000000u);
  EXPECT_EQ(device.value.utilization, 1);
  const policy::LinkRates link = LinkOf(device.value);
  EXPECT_DOUBLE_EQ(link.load, 3e8);
  EXPECT_DOUBLE_EQ(link.duplex_load, 2.4e8);
  EXPECT_DOUBLE_EQ(link.duplex_unload, 1.6e8);
}

TEST(DeviceTest, ALinkThatIsFullyDuplexIsNoFasterThanEachWay) {
  DeviceProfile device = ParseDevice(kDevice).value;
  device.total_bytes_per_second = 9e8;
  EXPECT_DOUBLE_EQ(LinkOf(device).duplex_load, 3e8);
}

TEST(DeviceTest, SaysWhatIsWrong) {
  const auto error = [](auto change) {
    json device = json::parse(kDevice);
    change(device);
    return ParseDevice(device.dump()).error;
  };
  EXPECT_THAT(ParseDevice("7").error, HasSubstr("not a JSON object"));
  for (const char* key : {"name", "capacity_bytes", "flops_per_second", "h2d_bytes_per_second", "d2h_bytes_per_second",
                          "total_bytes_per_second", "host_bytes"}) {
    EXPECT_THAT(error([&](json& d) { d.erase(key); }), HasSubstr(key));
  }
  EXPECT_THAT(error([](json& d) { d["flops_per_second"] = 0; }), HasSubstr("must be a finite number above 0"));
  EXPECT_THAT(error([](json& d) { d["flops_per_second"] = std::numeric_limits<double>::quiet_NaN(); }),
              HasSubstr("is null, and must be a number"));
  EXPECT_THAT(error([](json& d) { d["latency_seconds"] = -1; }), HasSubstr("must be a finite number of at least 0"));
  EXPECT_EQ(error([](json& d) { d["latency_seconds"] = 20e-6; }), "");
  EXPECT_THAT(error([](json& d) { d["capacity_bytes"] = -5; }), HasSubstr("between 0 and 2^58"));
  EXPECT_THAT(error([](json& d) { d["capacity_bytes"] = 0; }), HasSubstr("must be above 0"));
  EXPECT_THAT(error([](json& d) { d["flops_per_secnd"] = 1; }), HasSubstr("unknown key \"flops_per_secnd\""));
  EXPECT_THAT(error([](json& d) { d["total_bytes_per_second"] = 1e8; }), HasSubstr("both directions together"));
  EXPECT_THAT(error([](json& d) { d["base_line_bytes"] = 1600000000; }), HasSubstr("leave nothing"));
  EXPECT_THAT(error([](json& d) { d["utilization"] = 1.5; }), HasSubstr("shares of at most 1"));
}

}  // namespace
}  // namespace misa::capacity
