#include "server/observe/event_log.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "server/core/time_text.h"

namespace misa::server {
namespace {

v1::Event MakeEvent(const std::string& kind, uint64_t bytes = 0) {
  v1::Event event;
  event.set_time("2024-01-01T00:00:00.000000Z");
  event.set_kind(kind);
  event.set_bytes(bytes);
  event.set_cause("a \"cause\"\nwith a line feed");
  return event;
}

TEST(EventLog, KeepsTheNewest) {
  EventLog log(3);
  for (uint64_t i = 0; i < 10; ++i) log.Append(MakeEvent("k", i));
  const auto newest = log.Newest(100);
  ASSERT_EQ(newest.size(), 3u);
  EXPECT_EQ(newest[0].bytes(), 7u);
}

TEST(EventLog, WritesOneLineOfJsonEach) {
  char name[] = "/tmp/misa-events-XXXXXX";
  const std::string folder = mkdtemp(name);
  EventLog log(10);
  ASSERT_EQ(log.Open(folder + "/a"), "");
  log.Append(MakeEvent("first", 5));
  log.Append(MakeEvent("second"));
  EXPECT_NE(log.Open(folder + "/none/a"), "");  // the old file stays
  log.Stop();
  std::ifstream in(folder + "/a");
  std::string line;
  ASSERT_TRUE(std::getline(in, line));
  const auto json = nlohmann::json::parse(line);
  EXPECT_EQ(json.at("kind"), "first");
  EXPECT_EQ(json.at("bytes"), 5);
  for (const char* key : {"time", "session", "module", "cause"}) EXPECT_TRUE(json.contains(key));
  ASSERT_TRUE(std::getline(in, line));
  EXPECT_FALSE(std::getline(in, line));
  std::filesystem::remove_all(folder);
}

TEST(EventLog, CountsWhatAWatcherHasNoRoomFor) {
  EventLog log(10);
  log.Append(MakeEvent("old"));
  std::vector<std::string> seen;
  const uint64_t id = log.Watch(5, [&](const v1::Event& event) {
    if (seen.size() == 2) return false;
    seen.push_back(event.kind());
    return true;
  });
  log.Append(MakeEvent("new"));
  log.Append(MakeEvent("lost"));
  EXPECT_THAT(seen, ::testing::ElementsAre("old", "new"));
  EXPECT_EQ(log.dropped(), 1u);
  log.Unwatch(id);
  log.Append(MakeEvent("unseen"));
  EXPECT_EQ(log.dropped(), 1u);
}

TEST(TimeText, IsRfc3339) {
  EXPECT_EQ(FormatTime(0), "1970-01-01T00:00:00.000000Z");
  EXPECT_EQ(FormatTime(1'709'251'199'123'456), "2024-02-29T23:59:59.123456Z");
}

}  // namespace
}  // namespace misa::server
