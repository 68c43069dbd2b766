// The lease plane: `lease.sock`. Peer credentials are read here, tokens issued, descriptors handed out; a socket's end
// of file, or the end of its peer's process, ends the lease.
#pragma once

#include <absl/base/thread_annotations.h>
#include <absl/synchronization/mutex.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <thread>

#include "runtime/device/cpu/unique_fd.h"
#include "server/core/event.h"
#include "server/lease/token.h"
#include "server/scheduler/clock.h"

namespace misa::server {

class LeasePlane {
 public:
  struct Options {
    std::string socket_path;
    std::string version;
    double hello_seconds = 5;  // a peer that connects and says nothing
    size_t max_connections = 256;
  };

  // `opened` may refuse (false: the queue is full); `closed` and `orphan_ended` are always heard.
  struct Callbacks {
    std::function<bool(LeaseOpened)> opened;
    std::function<void(LeaseClosed)> closed;
    std::function<void(OrphanEnded)> orphan_ended;
  };

  LeasePlane(Options options, const Clock* clock, RandomSource* random, Callbacks callbacks);
  ~LeasePlane();

  // Binds and listens. "" or a sentence.
  std::string Start();
  // Closes every connection without ending a session, and removes the socket.
  void Stop() ABSL_LOCKS_EXCLUDED(mutex_);

  // Watches a trainer of an earlier daemon until it ends.
  void WatchOrphan(const std::string& session, UniqueFd pidfd) ABSL_LOCKS_EXCLUDED(mutex_);

  void Welcome(LeaseId lease, const std::string& token) ABSL_LOCKS_EXCLUDED(mutex_);
  void Refuse(LeaseId lease, const std::string& sentence) ABSL_LOCKS_EXCLUDED(mutex_);
  void Close(LeaseId lease) ABSL_LOCKS_EXCLUDED(mutex_);
  // One packet, with a descriptor beside it where fd >= 0. Never waits: the peer has room for these few packets, or is
  // not reading at all. "" or a sentence.
  std::string Send(LeaseId lease, const std::string& json, int fd) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Connection {
    UniqueFd socket;
    UniqueFd pidfd;
    int32_t pid = 0;
    uint32_t uid = 0;
    bool hello_done = false;
    double deadline = 0;
  };

  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  void Accept() ABSL_LOCKS_EXCLUDED(mutex_);
  void Read(LeaseId lease) ABSL_LOCKS_EXCLUDED(mutex_);
  // "" or the sentence to refuse the hello with; `event` is filled in.
  std::string CheckHello(const std::string& packet, const Connection& connection, LeaseOpened* event);
  void End(LeaseId lease, const std::string& cause) ABSL_LOCKS_EXCLUDED(mutex_);
  void EndSilent(double now) ABSL_LOCKS_EXCLUDED(mutex_);
  std::string SendLocked(const Connection& connection, const std::string& json, int fd) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RefuseLocked(LeaseId lease, const std::string& sentence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  const Clock* const clock_;
  RandomSource* const random_;
  const Callbacks callbacks_;
  UniqueFd listener_;
  UniqueFd epoll_;
  UniqueFd wake_;
  std::thread thread_;
  absl::Mutex mutex_;
  LeaseId next_lease_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<LeaseId, Connection> connections_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_orphan_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<uint64_t, std::pair<std::string, UniqueFd>> orphans_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace misa::server
