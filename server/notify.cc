#include "server/notify.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "runtime/device/cpu/unique_fd.h"

namespace misa::server {

bool Notify(const std::string& state) {
  const char* path = std::getenv("NOTIFY_SOCKET");
  if (path == nullptr || (path[0] != '/' && path[0] != '@')) return false;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const size_t length = std::strlen(path);
  if (length >= sizeof address.sun_path) return false;
  std::memcpy(address.sun_path, path, length);
  // An abstract socket: its name starts with a zero byte.
  if (address.sun_path[0] == '@') address.sun_path[0] = '\0';
  UniqueFd socket(::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return false;
  return sendto(socket.get(), state.data(), state.size(), MSG_NOSIGNAL, reinterpret_cast<sockaddr*>(&address),
                static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length)) == static_cast<ssize_t>(state.size());
}

double WatchdogSeconds() {
  const char* us = std::getenv("WATCHDOG_USEC");
  const char* pid = std::getenv("WATCHDOG_PID");
  if (us == nullptr || (pid != nullptr && std::strtol(pid, nullptr, 10) != getpid())) return 0;
  return static_cast<double>(std::strtoull(us, nullptr, 10)) / 1e6 / 2;
}

}  // namespace misa::server
