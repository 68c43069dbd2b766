#include "server/notify.h"

#include <gmock/gmock.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>

namespace misa::server {
namespace {

TEST(Notify, SendsOneDatagramToTheServiceManager) {
  char name[] = "/tmp/misa-notify-XXXXXX";
  const std::string folder = mkdtemp(name);
  const std::string path = folder + "/s";
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const timeval timeout{5, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
  ASSERT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  setenv("NOTIFY_SOCKET", path.c_str(), 1);
  EXPECT_TRUE(Notify("READY=1"));
  char text[64] = {};
  EXPECT_EQ(recv(fd, text, sizeof text, 0), 7);
  EXPECT_STREQ(text, "READY=1");
  close(fd);
  EXPECT_FALSE(Notify("READY=1"));  // nobody listens
  unsetenv("NOTIFY_SOCKET");
  EXPECT_FALSE(Notify("READY=1"));
  std::filesystem::remove_all(folder);
}

TEST(Notify, FeedsTheWatchdogTwiceAPeriodAndOnlyOurs) {
  EXPECT_EQ(WatchdogSeconds(), 0);
  setenv("WATCHDOG_USEC", "4000000", 1);
  EXPECT_EQ(WatchdogSeconds(), 2);
  setenv("WATCHDOG_PID", "1", 1);
  EXPECT_EQ(WatchdogSeconds(), 0);
  unsetenv("WATCHDOG_PID");
  unsetenv("WATCHDOG_USEC");
}

}  // namespace
}  // namespace misa::server
