#include "server/lease/lease_plane.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "runtime/memory/lease_protocol.h"
#include "server/lease/process.h"
#include "server/log.h"

namespace misa::server {
namespace {

// What an epoll event is about: a kind in the upper byte, a number below.
enum Source : uint64_t { kListener, kWake, kSocket, kProcess, kOrphan };
constexpr uint64_t Tag(Source source, uint64_t number) { return (static_cast<uint64_t>(source) << 56) | number; }

bool Add(int epoll, int fd, uint32_t events, uint64_t tag) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = tag;
  return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

}  // namespace

LeasePlane::LeasePlane(Options options, const Clock* clock, RandomSource* random, Callbacks callbacks)
    : options_(std::move(options)), clock_(clock), random_(random), callbacks_(std::move(callbacks)) {}

LeasePlane::~LeasePlane() { Stop(); }

std::string LeasePlane::Start() {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string& path = options_.socket_path;
  if (path.size() >= sizeof address.sun_path) return "the path " + path + " is too long for a socket";
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  listener_.reset(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  // A socket that an earlier daemon left: the lock on the folder says that none listens on it.
  unlink(path.c_str());
  // Under a narrower mode from the start, not after a moment in which everyone may connect.
  const mode_t before = umask(0117);
  const bool bound = listener_.valid() && bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  umask(before);
  if (!bound || listen(listener_.get(), 64) != 0) {
    return "the lease socket " + path + " could not be opened (" + strerror(errno) + ")";
  }
  epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
  wake_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_.valid() || !wake_.valid() || !Add(epoll_.get(), listener_.get(), EPOLLIN, Tag(kListener, 0)) ||
      !Add(epoll_.get(), wake_.get(), EPOLLIN, Tag(kWake, 0))) {
    return std::string("the lease socket could not be watched (") + strerror(errno) + ")";
  }
  thread_ = std::thread([this] { Run(); });
  return "";
}

void LeasePlane::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    if (stopping_) return;
    stopping_ = true;
  }
  if (thread_.joinable()) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof one);
    thread_.join();
    unlink(options_.socket_path.c_str());
  }
  absl::MutexLock lock(&mutex_);
  connections_.clear();
  orphans_.clear();
  listener_.reset();
}

void LeasePlane::WatchOrphan(const std::string& session, UniqueFd pidfd) {
  absl::MutexLock lock(&mutex_);
  const uint64_t number = next_orphan_++;
  Add(epoll_.get(), pidfd.get(), EPOLLIN, Tag(kOrphan, number));
  orphans_.emplace(number, std::make_pair(session, std::move(pidfd)));
}

void LeasePlane::Run() {
  std::array<epoll_event, 64> events;
  while (true) {
    // Woken twice a second at the latest, to drop peers that connected and never spoke.
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 500);
    if (count < 0 && errno != EINTR) {
      Log(Level::kError, std::string("the lease plane stopped (epoll_wait: ") + strerror(errno) +
                             "); no new session can attach until misad is restarted");
      return;
    }
    {
      absl::MutexLock lock(&mutex_);
      if (stopping_) return;
    }
    for (int i = 0; i < count; ++i) {
      const uint64_t tag = events[static_cast<size_t>(i)].data.u64;
      const uint64_t number = tag & ((1ull << 56) - 1);
      switch (static_cast<Source>(tag >> 56)) {
        case kListener: Accept(); break;
        case kWake: break;
        case kSocket: Read(number); break;
        case kProcess: End(number, "process ended"); break;
        case kOrphan: {
          std::string session;
          {
            absl::MutexLock lock(&mutex_);
            const auto found = orphans_.find(number);
            if (found == orphans_.end()) break;
            session = found->second.first;
            orphans_.erase(found);
          }
          callbacks_.orphan_ended({session});
          break;
        }
      }
    }
    EndSilent(clock_->now().monotonic_seconds);
  }
}

void LeasePlane::Accept() {
  UniqueFd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.valid()) {
    if (errno == EMFILE || errno == ENFILE) {
      Log(Level::kWarning, "no descriptors are left, so a trainer could not connect; raise LimitNOFILE");
      // The connection stays pending and would wake the loop at once, again and again.
      poll(nullptr, 0, 20);
    }
    return;
  }
  absl::MutexLock lock(&mutex_);
  ucred credentials{};
  socklen_t size = sizeof credentials;
  Connection connection;
  connection.socket = std::move(socket);
  if (getsockopt(connection.socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) return;
  connection.pid = credentials.pid;
  connection.uid = credentials.uid;
  connection.pidfd = OpenPeerPidfd(connection.socket.get(), credentials.pid);
  connection.deadline = clock_->now().monotonic_seconds + options_.hello_seconds;
  const LeaseId lease = next_lease_++;
  std::string refusal;
  if (connections_.size() >= options_.max_connections) {
    refusal = "misad has too many connections; end some trainers and try again";
  } else if (!connection.pidfd.valid()) {
    refusal =
        "misad cannot see the trainer's process (pid " + std::to_string(credentials.pid) +
        "), so it could not tell when it ends; run both in one pid namespace (hostPID in Kubernetes)";
  }
  // In the order socket, process: a trainer's last words are read before its end is noticed.
  if (refusal.empty() && (!Add(epoll_.get(), connection.socket.get(), EPOLLIN | EPOLLRDHUP, Tag(kSocket, lease)) ||
                          !Add(epoll_.get(), connection.pidfd.get(), EPOLLIN, Tag(kProcess, lease)))) {
    refusal = std::string("misad could not watch the connection (") + strerror(errno) + "); try again";
  }
  connections_.emplace(lease, std::move(connection));
  if (!refusal.empty()) RefuseLocked(lease, refusal);
}

void LeasePlane::Read(LeaseId lease) {
  std::string packet(kMaxLeasePacketBytes, '\0');
  std::string refusal;
  LeaseOpened event;
  event.lease = lease;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = connections_.find(lease);
    if (found == connections_.end()) return;
    Connection& connection = found->second;
    const ssize_t got = recv(connection.socket.get(), packet.data(), packet.size(), MSG_DONTWAIT | MSG_TRUNC);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got > 0 && connection.hello_done) return;  // nothing more is to be said here; ignored
    if (got > 0) {
      if (static_cast<size_t>(got) > packet.size()) {
        refusal = "the hello is longer than " + std::to_string(packet.size()) + " bytes";
      } else {
        packet.resize(static_cast<size_t>(got));
        refusal = CheckHello(packet, connection, &event);
      }
      connection.hello_done = refusal.empty();
      if (!refusal.empty()) {
        Log(Level::kWarning, "process " + std::to_string(connection.pid) + " was refused: " + refusal);
        RefuseLocked(lease, refusal);
        return;
      }
    } else {
      packet.clear();
    }
  }
  if (packet.empty()) {
    End(lease, "socket closed");
    return;
  }
  if (!callbacks_.opened(std::move(event))) {
    Refuse(lease, "misad is too busy for another trainer right now (its queue is full); try again in a second");
  }
}

std::string LeasePlane::CheckHello(const std::string& packet, const Connection& connection, LeaseOpened* event) {
  const nlohmann::json hello = nlohmann::json::parse(packet, nullptr, false);
  if (!hello.is_object() || hello.value("type", nlohmann::json()) != "hello") {
    return "the first packet is not a hello; this socket is for misa's trainers";
  }
  const nlohmann::json protocol = hello.value("protocol", nlohmann::json());
  if (!protocol.is_number_integer() || protocol != kProtocolVersion) {
    return "the trainer speaks protocol " + protocol.dump() + " and this misad (version " + options_.version +
           ") speaks " + std::to_string(kProtocolVersion) + "; install the same version of both";
  }
  const nlohmann::json version = hello.value("client_version", nlohmann::json());
  if (version.is_string()) event->client_version = version.get<std::string>().substr(0, 64);
  const nlohmann::json start = hello.value("start_time", nlohmann::json());
  const uint64_t claimed = start.is_number_unsigned() ? start.get<uint64_t>() : 0;
  const uint64_t real = ProcessStartTime(connection.pid);
  if (claimed != 0 && real != 0 && claimed != real) {
    return "the trainer says that it started at " + std::to_string(claimed) + " and process " +
           std::to_string(connection.pid) + " started at " + std::to_string(real) +
           "; open the lease socket from the process that trains, after any fork";
  }
  event->pid = connection.pid;
  event->uid = connection.uid;
  event->start_time = real != 0 ? real : claimed;
  event->token = MakeToken(random_);
  if (event->token.empty()) return "misad has no randomness to make a token of";
  return "";
}

void LeasePlane::End(LeaseId lease, const std::string& cause) {
  bool known_to_core = false;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = connections_.find(lease);
    if (found == connections_.end()) return;
    known_to_core = found->second.hello_done;
    connections_.erase(found);
  }
  if (known_to_core) callbacks_.closed({lease, cause});
}

void LeasePlane::EndSilent(double now) {
  absl::MutexLock lock(&mutex_);
  std::vector<LeaseId> silent;
  for (const auto& [lease, connection] : connections_) {
    if (!connection.hello_done && now > connection.deadline) silent.push_back(lease);
  }
  for (const LeaseId lease : silent) RefuseLocked(lease, "no hello came in time");
}

void LeasePlane::Welcome(LeaseId lease, const std::string& token) {
  const std::string problem = Send(lease,
                                   nlohmann::json{{"type", "welcome"},
                                                  {"protocol", kProtocolVersion},
                                                  {"token", token},
                                                  {"version", options_.version}}
                                       .dump(),
                                   -1);
  if (!problem.empty()) Log(Level::kWarning, problem);
}

void LeasePlane::Refuse(LeaseId lease, const std::string& sentence) {
  absl::MutexLock lock(&mutex_);
  RefuseLocked(lease, sentence);
}

void LeasePlane::RefuseLocked(LeaseId lease, const std::string& sentence) {
  const auto found = connections_.find(lease);
  if (found == connections_.end()) return;
  SendLocked(found->second,
             nlohmann::json{{"type", "refused"}, {"protocol", kProtocolVersion}, {"error", sentence}}.dump(
                 -1, ' ', false, nlohmann::json::error_handler_t::replace),
             -1);
  connections_.erase(found);
}

void LeasePlane::Close(LeaseId lease) {
  absl::MutexLock lock(&mutex_);
  connections_.erase(lease);
}

std::string LeasePlane::Send(LeaseId lease, const std::string& json, int fd) {
  absl::MutexLock lock(&mutex_);
  const auto found = connections_.find(lease);
  if (found == connections_.end()) return "the trainer's lease socket is closed";
  return SendLocked(found->second, json, fd);
}

std::string LeasePlane::SendLocked(const Connection& connection, const std::string& json, int fd) {
  iovec data{const_cast<char*>(json.data()), json.size()};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
  ssize_t sent;
  do {
    sent = sendmsg(connection.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  if (sent == static_cast<ssize_t>(json.size())) return "";
  return "process " + std::to_string(connection.pid) + " could not be told over its lease socket (" + strerror(errno) + ")";
}

}  // namespace misa::server
