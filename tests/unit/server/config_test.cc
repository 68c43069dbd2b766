#include "server/config.h"

#include <gmock/gmock.h>

namespace misa::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

std::vector<std::string> Errors(const std::string& text) {
  Config config;
  return ParseConfig(text, "misad.yaml", &config);
}

TEST(Config, HasDefaults) {
  Config config;
  ASSERT_THAT(ParseConfig("", "misad.yaml", &config), IsEmpty());
  EXPECT_EQ(config.device.chunk_bytes, 64u << 10);
  EXPECT_EQ(config.device.capacity.Of(1000), 500u);
  EXPECT_EQ(config.disk.directory, "/var/lib/misa");
  EXPECT_EQ(config.disk.capacity.Of(1000), 800u);
  EXPECT_EQ(config.metrics.listen, "127.0.0.1:9465");
  EXPECT_EQ(config.policy.reserve_bytes, 16u << 20);
  EXPECT_FALSE(config.HasLink());
}

TEST(Config, ReadsEveryKey) {
  Config config;
  ASSERT_THAT(ParseConfig(R"(
runtime_dir: /tmp/r
device: {kind: cpu, capacity: 8GiB, chunk: 128KiB}
disk: {directory: /tmp/d, capacity: 40%, calibrate: false}
link: {load_bytes_per_second: 2GB, unload_bytes_per_second: 1.5e9, duplex_load_bytes_per_second: 1000000, duplex_unload_bytes_per_second: 1GB}
metrics: {listen: "0.0.0.0:0", allow_remote: true, module_series_limit: 10}
events: {file: /tmp/e, memory: 5}
policy: {alpha: 0.5, hot: 0.8, cold: 0.2, reserve: 1MiB, window: 20, signal: squared_norm, residency: importance}
guards: {wait_for_stable_loss: false, stable_window: 40, stable_tolerance: 0.1, stable_hold: 5, watch_swings: false,
         swing_window: 60, swing_correlation: 0.6, swing_amplitude: 0.02, swing_alpha_factor: 2, swing_hot_step: 0.1,
         swing_levels: 2, swing_calm_steps: 50, pins: [head], sparse_attention: []}
limits: {sessions: 3, queue: 99}
)",
                          "misad.yaml", &config),
              IsEmpty());
  EXPECT_EQ(config.runtime_dir, "/tmp/r");
  EXPECT_EQ(config.device.capacity.Of(1), 8ull << 30);
  EXPECT_EQ(config.device.chunk_bytes, 128u << 10);
  EXPECT_EQ(config.disk.capacity.Of(1000), 400u);
  EXPECT_FALSE(config.disk.calibrate);
  EXPECT_EQ(config.link.load_bytes_per_second, 2e9);
  EXPECT_EQ(config.link.unload_bytes_per_second, 1.5e9);
  EXPECT_TRUE(config.HasLink());
  EXPECT_EQ(config.metrics.module_series_limit, 10u);
  EXPECT_EQ(config.events.memory, 5u);
  EXPECT_EQ(config.policy.alpha, 0.5);
  EXPECT_EQ(config.policy.window, 20u);
  EXPECT_EQ(config.policy.signal, policy::Signal::kSquaredNorm);
  EXPECT_TRUE(config.policy.keep_hot);
  const GuardOptions& guards = config.policy.guards;
  EXPECT_FALSE(guards.wait_for_stable_loss);
  EXPECT_EQ(guards.stability, (guard::StabilityOptions{40, 0.1, 5}));
  EXPECT_FALSE(guards.watch_swings);
  EXPECT_EQ(guards.swings, (guard::SwingOptions{60, 0.6, 0.02}));
  EXPECT_EQ(guards.response.alpha_factor, 2);
  EXPECT_EQ(guards.response.hot_step, 0.1);
  EXPECT_EQ(guards.response.most_levels, 2u);
  EXPECT_EQ(guards.response.calm_steps, 50u);
  EXPECT_THAT(guards.pins, ElementsAre("head"));
  EXPECT_THAT(guards.sparse_attention, IsEmpty());
  EXPECT_EQ(config.limits.queue, 99u);
}

TEST(Config, NamesThePlaceAndWhatIsAllowed) {
  EXPECT_THAT(Errors("device:\n  capcity: 8GiB\n"),
              ElementsAre(StartsWith("misad.yaml:2:3: the key device.capcity is unknown (did you mean capacity?); known here are "
                                     "kind, twin, ")));
  EXPECT_THAT(Errors("zzzzzzzz: 1\n"), ElementsAre(StartsWith("misad.yaml:1:1: the key zzzzzzzz is unknown; known here are")));
  EXPECT_THAT(Errors("limits: {sessions: many}"), ElementsAre(HasSubstr("limits.sessions must be a whole number from 1 to 4096, "
                                                                        "and is \"many\"")));
  EXPECT_THAT(Errors("limits: 5"), ElementsAre(HasSubstr("limits must be a mapping with the keys sessions, queue")));
  EXPECT_THAT(Errors("device: {chunk: 100KiB}"), ElementsAre(HasSubstr("must be a power of two")));
  EXPECT_THAT(Errors("device: {capacity: 120%}"), ElementsAre(HasSubstr("a share from 1% to 100%")));
  EXPECT_THAT(Errors("device: {capacity: 8 GiBs}"), ElementsAre(HasSubstr("the unit \"GiBs\" is unknown")));
  EXPECT_THAT(Errors("device: {kind: cuda}"), ElementsAre(HasSubstr("must be cpu or emulated")));
  EXPECT_THAT(Errors("runtime_dir: relative"), ElementsAre(HasSubstr("must be an absolute path")));
  EXPECT_THAT(Errors("disk: {calibrate: perhaps}"), ElementsAre(HasSubstr("must be true or false")));
  EXPECT_THAT(Errors("policy: {alpha: .nan}"), ElementsAre(HasSubstr("policy.alpha must be a number above 0")));
  EXPECT_THAT(Errors("policy: {hot: 0.2, cold: 0.4}"), ElementsAre(HasSubstr("policy.cold must be below policy.hot")));
  EXPECT_THAT(Errors("metrics: {listen: \"0.0.0.0:9465\"}"),
              ElementsAre(HasSubstr("misad.yaml:1:19: metrics.listen is 0.0.0.0:9465, which other machines can reach")));
  EXPECT_THAT(Errors("policy: {signal: norm}"), ElementsAre(HasSubstr("policy.signal must be variance or squared_norm")));
  EXPECT_THAT(Errors("policy: {window: 0}"), ElementsAre(HasSubstr("policy.window must be a whole number from 1 to 10000")));
  EXPECT_THAT(Errors("policy: {residency: lru}"), ElementsAre(HasSubstr("must be plan or importance")));
  EXPECT_THAT(Errors("guards: {pins: embedding}"), ElementsAre(HasSubstr("guards.pins must be a list")));
  EXPECT_THAT(Errors("guards: {stable_tolerance: 0}"), ElementsAre(HasSubstr("above 0")));
  EXPECT_THAT(Errors("guards: {swing_correlation: 1}"), ElementsAre(HasSubstr("below 1")));
  EXPECT_THAT(Errors("guards: {swings: 1}"), ElementsAre(HasSubstr("the key guards.swings is unknown")));
  EXPECT_THAT(Errors("metrics: {listen: nowhere}"), ElementsAre(HasSubstr("must be HOST:PORT")));
  EXPECT_THAT(Errors("link: {load_bytes_per_second: 0}"), ElementsAre(HasSubstr("above 0")));
  EXPECT_THAT(Errors("events: {memory: 1, memory: 2}"), ElementsAre(HasSubstr("is given twice")));
  EXPECT_THAT(Errors("a: [1"), ElementsAre(HasSubstr("this is not YAML")));
  EXPECT_THAT(Errors("- list"), ElementsAre(HasSubstr("the file must be a mapping")));
}

TEST(Config, ReadsAnEmulatedDevice) {
  Config config;
  ASSERT_THAT(ParseConfig("device: {kind: emulated, twin: rtx-3090}", "misad.yaml", &config), IsEmpty());
  EXPECT_TRUE(config.emulated());
  EXPECT_EQ(config.device.twin, "rtx-3090");
  EXPECT_EQ(config.host.capacity.Of(1000), 500u);
  ASSERT_THAT(ParseConfig("device: {kind: emulated, twin: h200, compute_flops: 7.5e10, duplex_factor: 0.8, latency_seconds: 1e-5}\n"
                          "host: {capacity: 2GiB}\n",
                          "misad.yaml", &config),
              IsEmpty());
  EXPECT_EQ(config.device.compute_flops, 7.5e10);
  EXPECT_EQ(config.device.duplex_factor, 0.8);
  EXPECT_EQ(config.device.latency_seconds, 1e-5);
  EXPECT_EQ(config.host.capacity.Of(1), 2ull << 30);
  ASSERT_THAT(ParseConfig("device: {kind: emulated}\nlink: {load_bytes_per_second: 1GB, unload_bytes_per_second: 1GB}", "f", &config),
              IsEmpty());
  EXPECT_FALSE(config.HasLink());
}

TEST(Config, RefusesADeviceThatIsNone) {
  EXPECT_THAT(Errors("device: {kind: emulated}"), ElementsAre(HasSubstr("misad.yaml:1:9: an emulated device needs a link")));
  EXPECT_THAT(Errors("device: {kind: emulated, twin: rtx-9999}"),
              ElementsAre(HasSubstr("device.twin must be one of rtx-3090, a100-80g, h200, and is \"rtx-9999\"")));
  EXPECT_THAT(Errors("device: {twin: h200}"), ElementsAre(HasSubstr("set device.kind: emulated")));
  EXPECT_THAT(Errors("device: {kind: emulated, twin: h200, compute_flops: 0}"), ElementsAre(HasSubstr("above 0")));
  EXPECT_THAT(Errors("device: {kind: emulated, twin: h200, duplex_factor: 1.5}"), ElementsAre(HasSubstr("above 0 and up to 1")));
  EXPECT_THAT(Errors("device: {kind: emulated, compute_flops: 1e9}\nlink: {load_bytes_per_second: 1, unload_bytes_per_second: 1}"),
              ElementsAre(HasSubstr("no device.twin is given")));
  EXPECT_THAT(Errors("device: {kind: emulated}\nlink: {load_bytes_per_second: 1GB, unload_bytes_per_second: 1GB, "
                     "duplex_load_bytes_per_second: 2GB}"),
              ElementsAre(HasSubstr("faster in a direction")));
}

TEST(Config, ReportsEveryMistakeAndChangesNothing) {
  Config config;
  config.runtime_dir = "before";
  const auto errors = ParseConfig("limts: 1\npolicy: {alpha: 7, hto: 1}\ndisk: {capacity: 0}\n", "f", &config);
  EXPECT_THAT(errors, ElementsAre(StartsWith("f:1:1:"), StartsWith("f:2:17:"), StartsWith("f:2:20:"), StartsWith("f:3:18:")));
  EXPECT_EQ(config.runtime_dir, "before");
}

TEST(Config, ReadsNoFileThatIsNotThere) {
  Config config;
  EXPECT_THAT(LoadConfig("/nonexistent/misad.yaml", &config), ElementsAre(HasSubstr("cannot be read")));
}

TEST(Config, KnowsWhatNeedsARestart) {
  Config before, after;
  ASSERT_THAT(ParseConfig("", "f", &before), IsEmpty());
  ASSERT_THAT(ParseConfig("limits: {queue: 99}\npolicy: {alpha: 0.9}\nevents: {file: /tmp/x}", "f", &after), IsEmpty());
  EXPECT_THAT(RestartKeys(before, after), ElementsAre("limits"));
}

}  // namespace
}  // namespace misa::server
