#include "server/journal.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "runtime/device/cpu/unique_fd.h"

namespace misa::server {
namespace {

constexpr int kVersion = 1;

std::string Failure(const std::string& path, const char* what) {
  return "the journal " + path + " could not be " + what + " (" + strerror(errno) +
         "); sessions go on, but a restart would not know what they hold";
}

}  // namespace

std::string WriteJournalFile(const std::string& path, const std::string& boot, const std::vector<JournalEntry>& entries) {
  nlohmann::json json = {{"version", kVersion}, {"boot", boot}, {"sessions", nlohmann::json::array()}};
  for (const JournalEntry& entry : entries) {
    json["sessions"].push_back({{"session", entry.session},
                                {"job", entry.job},
                                {"pid", entry.pid},
                                {"start_time", entry.start_time},
                                {"bytes", entry.bytes},
                                {"disk_bytes", entry.disk_bytes}});
  }
  const std::string text = json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  const std::string temporary = path + ".new";
  {
    UniqueFd file(open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    if (!file.valid()) return Failure(temporary, "created");
    for (size_t at = 0; at < text.size();) {
      const ssize_t written = write(file.get(), text.data() + at, text.size() - at);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) return Failure(temporary, "written");
      at += static_cast<size_t>(written);
    }
    if (fsync(file.get()) != 0) return Failure(temporary, "written to disk");
  }
  if (rename(temporary.c_str(), path.c_str()) != 0) return Failure(path, "replaced");
  return "";
}

std::string ReadJournalFile(const std::string& path, const std::string& boot, std::vector<JournalEntry>* entries) {
  entries->clear();
  std::ifstream in(path);
  if (!in) return "";
  std::stringstream text;
  text << in.rdbuf();
  const nlohmann::json json = nlohmann::json::parse(text.str(), nullptr, false);
  const std::string damaged = "the journal " + path +
                              " is damaged and is ignored: memory that trainers of the earlier daemon still hold is not "
                              "counted until they end";
  if (!json.is_object()) return damaged;
  try {
    if (json.at("version").get<int>() != kVersion) return damaged;
    if (json.at("boot").get<std::string>() != boot) return "";
    for (const nlohmann::json& item : json.at("sessions")) {
      JournalEntry entry;
      entry.session = item.at("session").get<std::string>();
      entry.job = item.at("job").get<std::string>();
      entry.pid = item.at("pid").get<int32_t>();
      entry.start_time = item.at("start_time").get<uint64_t>();
      entry.bytes = item.at("bytes").get<uint64_t>();
      entry.disk_bytes = item.at("disk_bytes").get<uint64_t>();
      entries->push_back(std::move(entry));
    }
  } catch (const nlohmann::json::exception&) {
    entries->clear();
    return damaged;
  }
  return "";
}

}  // namespace misa::server
