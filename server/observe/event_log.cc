#include "server/observe/event_log.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "server/log.h"

namespace misa::server {
namespace {

constexpr size_t kWaitingLines = 4096;

}  // namespace

std::string FormatEvent(const v1::Event& event) {
  const nlohmann::ordered_json json = {{"time", event.time()},     {"kind", event.kind()},   {"session", event.session()},
                                       {"module", event.module()}, {"bytes", event.bytes()}, {"cause", event.cause()}};
  return json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

EventLog::EventLog(size_t memory_events) : memory_events_(memory_events), writer_(kWaitingLines) {}

std::string EventLog::Open(const std::string& path) {
  UniqueFd file;
  if (!path.empty()) {
    file.reset(open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0640));
    if (!file.valid()) {
      return "the event file " + path + " could not be opened (" + strerror(errno) +
             "); events go on as before. Set events.file to a file that misad may write";
    }
  }
  {
    absl::MutexLock lock(&file_mutex_);
    file_ = std::move(file);
    file_failed_ = false;
  }
  absl::MutexLock lock(&mutex_);
  to_file_ = !path.empty();
  return "";
}

void EventLog::Append(const v1::Event& event) {
  absl::MutexLock lock(&mutex_);
  events_.push_back(event);
  if (events_.size() > memory_events_) events_.pop_front();
  for (const auto& [id, watcher] : watchers_) {
    if (!watcher(event)) ++dropped_;
  }
  if (to_file_ && !writer_.Post([this, line = FormatEvent(event) + "\n"] { WriteLine(line); })) ++dropped_;
}

uint64_t EventLog::Watch(size_t backlog, Watcher watcher) {
  absl::MutexLock lock(&mutex_);
  const size_t first = events_.size() > backlog ? events_.size() - backlog : 0;
  for (size_t i = first; i < events_.size(); ++i) {
    if (!watcher(events_[i])) ++dropped_;
  }
  const uint64_t id = next_watcher_++;
  watchers_.emplace(id, std::move(watcher));
  return id;
}

void EventLog::Unwatch(uint64_t id) {
  absl::MutexLock lock(&mutex_);
  watchers_.erase(id);
}

uint64_t EventLog::dropped() const {
  absl::MutexLock lock(&mutex_);
  return dropped_;
}

std::vector<v1::Event> EventLog::Newest(size_t count) const {
  absl::MutexLock lock(&mutex_);
  const size_t first = events_.size() > count ? events_.size() - count : 0;
  return {events_.begin() + static_cast<ptrdiff_t>(first), events_.end()};
}

void EventLog::Stop() { writer_.Stop(); }

void EventLog::WriteLine(const std::string& line) {
  bool failed = false;
  {
    absl::MutexLock lock(&file_mutex_);
    if (!file_.valid()) return;
    // One write for a line: O_APPEND keeps lines whole beside other writers.
    ssize_t written;
    do {
      written = write(file_.get(), line.data(), line.size());
    } while (written < 0 && errno == EINTR);
    failed = written != static_cast<ssize_t>(line.size());
    if (failed && !file_failed_) {
      Log(Level::kWarning, std::string("the event file could not be written (") + strerror(errno) +
                               "); events are counted as dropped until it can");
    }
    file_failed_ = failed;
  }
  if (!failed) return;
  absl::MutexLock lock(&mutex_);
  ++dropped_;
}

}  // namespace misa::server
