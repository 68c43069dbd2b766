#include "server/log.h"

#include <unistd.h>

#include <algorithm>
#include <string>

namespace misa::server {

void Log(Level level, std::string_view sentence) {
  std::string line = level == Level::kInfo ? "INFO " : level == Level::kWarning ? "WARNING " : "ERROR ";
  line += sentence;
  std::replace(line.begin(), line.end(), '\n', ' ');
  line += '\n';
  // A full or closed stderr loses the line; nothing of the daemon's work depends on it.
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace misa::server
