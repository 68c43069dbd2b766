// Who holds memory, on disk: what a daemon that was killed leaves behind for the next one.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace misa::server {

struct JournalEntry {
  std::string session;
  std::string job;
  int32_t pid = 0;
  uint64_t start_time = 0;  // field 22 of /proc/PID/stat: tells a recycled pid from the trainer
  uint64_t bytes = 0;
  uint64_t disk_bytes = 0;

  bool operator==(const JournalEntry&) const = default;
};

// Replaces the file in one step (temporary file, fsync, rename): a reader sees the old entries or the new ones. `boot`
// tells process ids of an earlier boot apart. Returns "" or a sentence.
std::string WriteJournalFile(const std::string& path, const std::string& boot, const std::vector<JournalEntry>& entries);

// The entries of this boot; none where the file is missing. A sentence, and no entries, where it cannot be read as a
// journal.
std::string ReadJournalFile(const std::string& path, const std::string& boot, std::vector<JournalEntry>* entries);

}  // namespace misa::server
