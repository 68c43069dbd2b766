// The event log: the newest events in memory, JSON lines in a file, and live watchers. Bounded everywhere; what does not
// fit is dropped and counted.
#pragma once

#include <absl/base/thread_annotations.h>
#include <absl/synchronization/mutex.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "misa/v1/admin.pb.h"
#include "runtime/device/cpu/unique_fd.h"
#include "server/scheduler/worker.h"

namespace misa::server {

// One line of JSON with time, kind, session, module, bytes and cause; no line feed in it.
std::string FormatEvent(const v1::Event& event);

class EventLog {
 public:
  // Takes one event; false where the watcher has no room. Called under the log's lock: it must not call back.
  using Watcher = std::function<bool(const v1::Event&)>;

  explicit EventLog(size_t memory_events);

  // Opens (or opens again, after a rotation) the file; "" closes it. "" or a sentence; the old file stays then.
  std::string Open(const std::string& path) ABSL_LOCKS_EXCLUDED(mutex_);

  // Never waits: the file is written by a thread of its own.
  void Append(const v1::Event& event) ABSL_LOCKS_EXCLUDED(mutex_);

  // Replays up to `backlog` of the newest events, then follows.
  uint64_t Watch(size_t backlog, Watcher watcher) ABSL_LOCKS_EXCLUDED(mutex_);
  void Unwatch(uint64_t id) ABSL_LOCKS_EXCLUDED(mutex_);

  uint64_t dropped() const ABSL_LOCKS_EXCLUDED(mutex_);
  std::vector<v1::Event> Newest(size_t count) const ABSL_LOCKS_EXCLUDED(mutex_);

  // Writes what is queued. Idempotent.
  void Stop();

 private:
  void WriteLine(const std::string& line) ABSL_LOCKS_EXCLUDED(file_mutex_, mutex_);

  const size_t memory_events_;
  mutable absl::Mutex mutex_;
  std::deque<v1::Event> events_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, Watcher> watchers_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_watcher_ ABSL_GUARDED_BY(mutex_) = 1;
  uint64_t dropped_ ABSL_GUARDED_BY(mutex_) = 0;
  bool to_file_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Mutex file_mutex_;
  UniqueFd file_ ABSL_GUARDED_BY(file_mutex_);
  bool file_failed_ ABSL_GUARDED_BY(file_mutex_) = false;
  Worker writer_;
};

}  // namespace misa::server
