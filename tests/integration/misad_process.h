// A real misad in a folder of its own under /tmp.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

namespace misa::test {

// Asks until `condition` holds; false when it did not in time.
bool WaitFor(const std::function<bool()>& condition, double seconds = 10);

// A folder that goes with its owner; short, so that sockets fit in.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

struct Exit {
  bool ended = false;
  int code = -1;    // -1: killed by a signal
  int signal = 0;
  std::string out;
  std::string err;
};

class MisadProcess {
 public:
  // `folder` outlives the process. Extra lines are added to the configuration.
  explicit MisadProcess(const TemporaryFolder& folder) : folder_(folder.path()) {}
  ~MisadProcess();

  // Configuration keys that tests change.
  std::string device_capacity = "64MiB";
  std::string disk_capacity = "256MiB";
  std::string extra;  // more YAML

  // Another file than the one that WriteConfig writes.
  std::string config;

  std::string config_path() const { return config.empty() ? folder_ + "/misad.yaml" : config; }
  std::string runtime_dir() const { return folder_ + "/r"; }
  void WriteConfig() const;

  // Starts and waits until it is ready, or has ended. True when it is ready.
  bool Start(const std::vector<std::string>& arguments = {});
  void Signal(int signal) const;
  Exit Wait(double seconds = 10);
  bool running();
  pid_t pid() const { return pid_; }
  std::string out() const;
  std::string err() const;
  // The body of /metrics; "" where it did not answer.
  std::string Scrape() const;
  // Open descriptors, by the kernel's count.
  size_t OpenFds() const;
  std::string Events() const;

 private:
  const std::string folder_;
  pid_t pid_ = -1;
  Exit exit_;
  int number_ = 0;
};

}  // namespace misa::test
