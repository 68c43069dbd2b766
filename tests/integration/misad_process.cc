#include "tests/integration/misad_process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

namespace misa::test {
namespace {

std::string ReadText(const std::string& path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

}  // namespace

bool WaitFor(const std::function<bool()>& condition, double seconds) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

TemporaryFolder::TemporaryFolder() {
  char name[] = "/tmp/misad-XXXXXX";
  if (mkdtemp(name) == nullptr) std::abort();
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code error;
  std::filesystem::remove_all(path_, error);
}

MisadProcess::~MisadProcess() {
  if (!running()) return;
  kill(pid_, SIGKILL);
  Wait();
}

void MisadProcess::WriteConfig() const {
  if (!config.empty()) return;
  std::ofstream(config_path()) << "runtime_dir: " << runtime_dir() << "\n"
                               << "device: {capacity: " << device_capacity << "}\n"
                               << "disk: {directory: " << folder_ << "/d, capacity: " << disk_capacity
                               << ", calibrate: false}\n"
                               << "link: {load_bytes_per_second: 1.0e9, unload_bytes_per_second: 8.0e8, "
                                  "duplex_load_bytes_per_second: 6.0e8, duplex_unload_bytes_per_second: 5.0e8}\n"
                               << "metrics: {listen: \"127.0.0.1:0\"}\n"
                               << "events: {file: " << folder_ << "/events.jsonl}\n"
                               << extra;
}

bool MisadProcess::Start(const std::vector<std::string>& arguments) {
  WriteConfig();
  ++number_;
  exit_ = {};
  std::vector<std::string> words = {MISAD_PATH, "--config", config_path()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const std::string out_path = folder_ + "/out" + std::to_string(number_);
  const std::string err_path = folder_ + "/err" + std::to_string(number_);
  const int out = open(out_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  const int err = open(err_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ == 0) {
    // A test that dies takes its daemon along.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(127);
    dup2(out, 1);
    dup2(err, 2);
    execv(argv[0], argv.data());
    _exit(127);
  }
  close(out);
  close(err);
  WaitFor([&] { return this->out().find("misad ready:") != std::string::npos || !running(); }, 20);
  return running();
}

void MisadProcess::Signal(int signal) const {
  if (pid_ > 0) kill(pid_, signal);
}

bool MisadProcess::running() {
  if (pid_ <= 0 || exit_.ended) return false;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return true;
  exit_.ended = true;
  exit_.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  exit_.signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
  return false;
}

Exit MisadProcess::Wait(double seconds) {
  WaitFor([&] { return !running(); }, seconds);
  Exit result = exit_;
  result.out = out();
  result.err = err();
  return result;
}

std::string MisadProcess::out() const { return ReadText(folder_ + "/out" + std::to_string(number_)); }

std::string MisadProcess::err() const { return ReadText(folder_ + "/err" + std::to_string(number_)); }

std::string MisadProcess::Events() const { return ReadText(folder_ + "/events.jsonl"); }

std::string MisadProcess::Scrape() const {
  const std::string text = out();
  const std::string marker = "metrics=http://127.0.0.1:";
  const size_t at = text.find(marker);
  if (at == std::string::npos) return "";
  const int port = std::atoi(text.c_str() + at + marker.size());
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const timeval timeout{5, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof timeout);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string body;
  const std::string request = "GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n";
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 &&
      send(fd, request.data(), request.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(request.size())) {
    char block[4096];
    ssize_t got;
    while ((got = recv(fd, block, sizeof block, 0)) > 0) body.append(block, static_cast<size_t>(got));
  }
  close(fd);
  const size_t header = body.find("\r\n\r\n");
  return header == std::string::npos ? "" : body.substr(header + 4);
}

size_t MisadProcess::OpenFds() const {
  size_t count = 0;
  std::error_code error;
  for (auto it = std::filesystem::directory_iterator("/proc/" + std::to_string(pid_) + "/fd", error);
       !error && it != std::filesystem::directory_iterator(); it.increment(error)) {
    ++count;
  }
  return count;
}

}  // namespace misa::test
