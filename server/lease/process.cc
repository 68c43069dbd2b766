#include "server/lease/process.h"

#include <dirent.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <iterator>
#include <sstream>

namespace misa::server {

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

UniqueFd OpenPidfd(pid_t pid) { return UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0))); }

UniqueFd OpenPeerPidfd(int socket, pid_t pid) {
  int fd = -1;
  socklen_t size = sizeof fd;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &fd, &size) == 0 && fd >= 0) return UniqueFd(fd);
  return OpenPidfd(pid);
}

uint64_t ProcessStartTime(pid_t pid) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/stat");
  const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  // The second field is the command in parentheses and may itself hold spaces and parentheses.
  const size_t close = text.rfind(')');
  if (close == std::string::npos) return 0;
  std::istringstream fields(text.substr(close + 1));
  std::string field;
  for (int number = 3; number < 22; ++number) fields >> field;
  uint64_t start_time = 0;
  return fields >> start_time ? start_time : 0;
}

bool HasEnded(int pidfd) {
  pollfd poll_fd{pidfd, POLLIN, 0};
  int ready;
  do {
    ready = poll(&poll_fd, 1, 0);
  } while (ready < 0 && errno == EINTR);
  return ready > 0 && (poll_fd.revents & (POLLIN | POLLHUP)) != 0;
}

std::string BootId() {
  std::ifstream in("/proc/sys/kernel/random/boot_id");
  std::string id;
  in >> id;
  return id;
}

uint64_t CountOpenFds() {
  DIR* dir = opendir("/proc/self/fd");
  if (dir == nullptr) return 0;
  uint64_t count = 0;
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  // ".", "..", and the descriptor that reads the folder.
  return count >= 3 ? count - 3 : 0;
}

}  // namespace misa::server
