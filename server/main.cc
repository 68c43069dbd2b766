// misad: the daemon that owns the memory used for training state.
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>

#include "runtime/device/cpu/unique_fd.h"
#include "server/config.h"
#include "server/daemon.h"
#include "server/lease/process.h"
#include "server/log.h"
#include "server/notify.h"

namespace {

using misa::server::Level;
using misa::server::Log;

constexpr char kDefaultConfig[] = "/etc/misa/misad.yaml";
constexpr int kLoopMs = 200;

double Monotonic() { return misa::server::SystemClock().now().monotonic_seconds; }

// A stop that hangs must not keep a node from being restarted.
void ExitHardAfter(double seconds) {
  std::thread([seconds] {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
    Log(Level::kError, "stopping took too long; exiting hard. Trainers keep what they hold");
    _exit(1);
  }).detach();
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{
      "misad owns the memory that training state lives in, and plans what moves when.\n\n"
      "Examples:\n"
      "  misad                                    with /etc/misa/misad.yaml, or defaults\n"
      "  misad --config misad.yaml --check-config say what is wrong with a configuration\n"
      "  misad --private --parent-pid 4711        for one trainer; ends with it"};
  std::string config_path;
  bool check = false;
  bool version = false;
  bool private_daemon = false;
  bool remove_runtime_dir = false;
  int parent_pid = 0;
  double drain_seconds = 5;
  app.add_option("--config", config_path, "Configuration file (default: " + std::string(kDefaultConfig) + " where it exists)");
  app.add_flag("--check-config", check, "Check the configuration, say what is wrong with it, and exit");
  app.add_flag("--version", version, "Print the version and exit");
  app.add_flag("--private", private_daemon, "Serve one trainer, and exit with its last session");
  app.add_flag("--remove-runtime-dir", remove_runtime_dir, "With --private: remove the runtime directory at the end");
  app.add_option("--parent-pid", parent_pid, "With --private: exit when this process ends")->check(CLI::PositiveNumber);
  app.add_option("--drain-seconds", drain_seconds, "Wait this long for sessions to end when told to stop")
      ->check(CLI::Range(0.0, 3600.0));
  CLI11_PARSE(app, argc, argv);
  if (version) {
    std::printf("misad %s\n", MISA_VERSION);
    return 0;
  }
  if (config_path.empty() && std::filesystem::exists(kDefaultConfig) && !private_daemon) config_path = kDefaultConfig;

  misa::server::Daemon::Options options;
  const std::vector<std::string> errors = misa::server::LoadConfig(config_path, &options.config);
  for (const std::string& error : errors) std::fprintf(stderr, "%s\n", error.c_str());
  if (!errors.empty()) return 1;
  if (check) {
    std::printf("OK\n");
    return 0;
  }

  // Before any thread starts, so that every thread has them blocked and only the loop below sees them.
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP}) sigaddset(&signals, signal);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  misa::UniqueFd signal_fd(signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK));
  misa::UniqueFd quit_fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  misa::UniqueFd parent;
  if (parent_pid != 0) {
    parent = misa::server::OpenPidfd(parent_pid);
    if (!parent.valid()) {
      Log(Level::kError, "there is no process " + std::to_string(parent_pid) + " to serve; exiting");
      return 1;
    }
  }

  options.config_path = config_path;
  options.private_daemon = private_daemon;
  options.quit = [fd = quit_fd.get()](const std::string& cause) {
    Log(Level::kInfo, cause);
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(fd, &one, sizeof one);
  };
  const std::string runtime_dir = options.config.runtime_dir;
  misa::server::Daemon daemon(std::move(options));
  const std::string problem = daemon.Start();
  if (!problem.empty()) {
    Log(Level::kError, problem);
    return 1;
  }
  std::printf("misad ready: runtime_dir=%s metrics=%s\n", runtime_dir.c_str(), daemon.metrics_url().c_str());
  std::fflush(stdout);
  misa::server::Notify("READY=1");

  const double watchdog_seconds = misa::server::WatchdogSeconds();
  double next_watchdog = 0;
  double next_tick = 0;
  bool draining = false;
  double drain_until = 0;
  std::string reason;
  while (true) {
    pollfd fds[3] = {{signal_fd.get(), POLLIN, 0}, {quit_fd.get(), POLLIN, 0}, {parent.get(), POLLIN, 0}};
    // An invalid descriptor (no parent given) is skipped by poll.
    if (poll(fds, 3, kLoopMs) < 0 && errno != EINTR) {
      Log(Level::kError, std::string("the main loop failed (") + strerror(errno) + "); stopping");
      break;
    }
    bool stop = false;
    signalfd_siginfo info;
    while (read(signal_fd.get(), &info, sizeof info) == sizeof info) {
      if (info.ssi_signo == SIGHUP) {
        misa::server::Notify("RELOADING=1");
        daemon.Reload();
        misa::server::Notify("READY=1");
      } else if (draining) {
        stop = true;  // asked twice: at once
      } else {
        reason = info.ssi_signo == SIGTERM ? "misad was told to stop (SIGTERM)" : "misad was interrupted (SIGINT)";
        draining = true;
        drain_until = Monotonic() + drain_seconds;
        Log(Level::kInfo, reason + "; waiting up to " + std::to_string(static_cast<int>(drain_seconds)) +
                              " s for sessions to end");
        misa::server::Notify("STOPPING=1");
        ExitHardAfter(drain_seconds + 10);
        daemon.Drain(reason);
      }
    }
    if ((fds[1].revents & POLLIN) != 0) break;
    if (parent.valid() && fds[2].revents != 0) {
      Log(Level::kInfo, "the process that this private daemon served has ended");
      break;
    }
    const double now = Monotonic();
    if (draining && (stop || now >= drain_until || daemon.Sessions() == 0)) break;
    if (now >= next_tick) {
      daemon.Tick();
      next_tick = now + 1;
    }
    // Only while the scheduler works: a watchdog that is fed by a thread that does nothing is none.
    if (watchdog_seconds > 0 && now >= next_watchdog && daemon.Alive()) {
      misa::server::Notify("WATCHDOG=1");
      next_watchdog = now + watchdog_seconds;
    }
  }
  if (!draining) {
    misa::server::Notify("STOPPING=1");
    ExitHardAfter(10);
  }
  daemon.Stop();
  if (private_daemon && remove_runtime_dir) {
    // The trainer that made the directory may have died without a chance to remove it.
    std::error_code ignored;
    std::filesystem::remove_all(runtime_dir, ignored);
  }
  return 0;
}
