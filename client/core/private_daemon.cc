#include "client/core/private_daemon.h"

#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iomanip>
#include <thread>
#include <vector>

extern char** environ;

namespace misa {
namespace {

using Clock = std::chrono::steady_clock;
constexpr double kStopSeconds = 3;

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::string LastLines(const std::string& path) {
  std::ifstream in(path);
  std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  while (!text.empty() && text.back() == '\n') text.pop_back();
  if (text.size() > 600) text = "…" + text.substr(text.size() - 600);
  return text;
}

// Not std::filesystem: libtorch exports an implementation of its own under the same names, which does not work here.
void RemoveDirectory(const std::string& path) {
  const auto remove_one = [](const char* name, const struct stat*, int, struct FTW*) { return std::remove(name); };
  nftw(path.c_str(), remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

// The rest of the section `device`, and what belongs to an emulated one besides.
void WriteEmulated(const EmulatedDevice& device, std::ostream& out) {
  out.precision(17);
  const auto key = [&out](const char* name, double value, bool given) {
    if (given) out << "  " << name << ": " << value << "\n";
  };
  if (!device.twin.empty()) out << "  twin: " << std::quoted(device.twin) << "\n";
  key("compute_flops", device.compute_flops, device.compute_flops != 0);
  key("duplex_factor", device.duplex_factor, device.duplex_factor != 0);
  key("latency_seconds", device.latency_seconds, device.latency_seconds >= 0);
  const policy::LinkRates& rates = device.rates;
  if (rates.load == 0 && rates.unload == 0 && rates.duplex_load == 0 && rates.duplex_unload == 0) return;
  out << "link:\n";
  key("load_bytes_per_second", rates.load, rates.load != 0);
  key("unload_bytes_per_second", rates.unload, rates.unload != 0);
  key("duplex_load_bytes_per_second", rates.duplex_load, rates.duplex_load != 0);
  key("duplex_unload_bytes_per_second", rates.duplex_unload, rates.duplex_unload != 0);
}

}  // namespace

std::unique_ptr<PrivateDaemon> PrivateDaemon::Start(const PrivateDaemonOptions& options, std::string* error) {
  std::string binary = options.binary;
  if (binary.empty()) binary = Variable("MISA_DAEMON");
  if (binary.empty()) binary = "misad";
  std::string disk = options.disk_directory;
  if (disk.empty()) disk = Variable("MISA_DISK_DIR");
  if (disk.empty()) disk = "/var/tmp";
  char directory[] = "/tmp/misa-XXXXXX";
  if (mkdtemp(directory) == nullptr) {
    *error = std::string("No directory for a private misad could be made under /tmp (") + std::strerror(errno) + ").";
    return nullptr;
  }
  std::unique_ptr<PrivateDaemon> daemon(new PrivateDaemon);
  daemon->directory_ = directory;
  daemon->owner_ = getpid();
  const std::string config = daemon->directory_ + "/misad.yaml";
  const std::string log = daemon->directory_ + "/misad.log";
  {
    std::ofstream out(config);
    out << "runtime_dir: " << directory << "\n"
        << "device:\n  kind: " << (options.emulated ? "emulated" : "cpu") << "\n";
    if (options.capacity_bytes > 0) out << "  capacity: " << options.capacity_bytes << "\n";
    if (options.chunk_bytes > 0) out << "  chunk: " << options.chunk_bytes << "\n";
    if (options.emulated) {
      WriteEmulated(*options.emulated, out);
    } else {
      out << "disk:\n  directory: " << disk << "\n";
    }
    out << "metrics:\n  listen: \"127.0.0.1:0\"\n";
  }
  int ready[2];
  if (pipe2(ready, O_CLOEXEC) != 0) {
    *error = std::string("No pipe to a private misad could be made (") + std::strerror(errno) + ").";
    return nullptr;
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ready[1], STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
  const std::string parent = std::to_string(getpid());
  std::vector<const char*> arguments = {binary.c_str(), "--private", "--parent-pid", parent.c_str(), "--config",
                                        config.c_str(), "--remove-runtime-dir", "--drain-seconds", "1", nullptr};
  pid_t pid = 0;
  const int result = posix_spawnp(&pid, binary.c_str(), &actions, nullptr, const_cast<char**>(arguments.data()), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ready[1]);
  if (result != 0) {
    close(ready[0]);
    *error = "No misad runs here and a private one could not be started from \"" + binary + "\" (" +
             std::strerror(result) + "): put misad on PATH or name it in MISA_DAEMON. Nothing was changed.";
    return nullptr;
  }
  daemon->pid_ = pid;
  const auto end = Clock::now() + std::chrono::milliseconds(static_cast<int64_t>(options.deadline_seconds * 1000));
  std::string line;
  bool is_ready = false;
  while (!is_ready) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
    pollfd waiter{ready[0], POLLIN, 0};
    if (left <= 0 || poll(&waiter, 1, static_cast<int>(left)) <= 0) break;
    char buffer[256];
    const ssize_t got = read(ready[0], buffer, sizeof(buffer));
    if (got <= 0) break;
    line.append(buffer, static_cast<size_t>(got));
    is_ready = line.find("misad ready") != std::string::npos;
  }
  close(ready[0]);
  if (!is_ready) {
    *error = "A private misad did not become ready within " + std::to_string(static_cast<int>(options.deadline_seconds)) +
             " s. It said: " + LastLines(log);
    return nullptr;
  }
  return daemon;
}

void PrivateDaemon::Stop() {
  if (pid_ == 0 || owner_ != getpid()) return;
  kill(pid_, SIGTERM);
  const auto end = Clock::now() + std::chrono::milliseconds(static_cast<int64_t>(kStopSeconds * 1000));
  int status = 0;
  while (waitpid(pid_, &status, WNOHANG) == 0) {
    if (Clock::now() > end) {
      kill(pid_, SIGKILL);
      waitpid(pid_, &status, 0);
      break;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  pid_ = 0;
  RemoveDirectory(directory_);
}

PrivateDaemon::~PrivateDaemon() {
  Stop();
  if (owner_ == getpid() && !directory_.empty()) {
    RemoveDirectory(directory_);
  }
}

}  // namespace misa
