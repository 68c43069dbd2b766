#include "tests/integration/trainer.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

namespace misa::test {

Trainer::Trainer(std::string runtime_dir) : runtime_dir_(std::move(runtime_dir)) {
  grpc::ChannelArguments arguments;
  // Channels to one address share a connection otherwise, also over a restart of the daemon.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto channel =
      grpc::CreateCustomChannel("unix:" + runtime_dir_ + "/misad.sock", grpc::InsecureChannelCredentials(), arguments);
  control = v1::ControlService::NewStub(channel);
  admin = v1::AdminService::NewStub(channel);
  request.set_protocol_version(1);
  request.set_client_version("test");
  request.set_job("job");
}

Trainer::~Trainer() { Close(); }

void Trainer::Close() {
  for (int* fd : {&socket_fd, &chunks_fd, &disk_fd}) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
  }
}

void Trainer::Prepare(grpc::ClientContext* context, double seconds) const {
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(static_cast<int>(seconds * 1000)));
  context->AddMetadata("misa-session-token", token);
}

Packet Trainer::Receive(double seconds) {
  Packet packet;
  pollfd ready{socket_fd, POLLIN, 0};
  if (poll(&ready, 1, static_cast<int>(seconds * 1000)) <= 0) return packet;
  packet.text.resize(4096);
  iovec data{packet.text.data(), packet.text.size()};
  alignas(cmsghdr) char control_data[CMSG_SPACE(sizeof(int))];
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = control_data;
  message.msg_controllen = sizeof control_data;
  const ssize_t got = recvmsg(socket_fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  if (got <= 0) return packet;
  packet.ok = true;
  packet.text.resize(static_cast<size_t>(got));
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_type == SCM_RIGHTS) std::memcpy(&packet.fd, CMSG_DATA(header), sizeof packet.fd);
  }
  return packet;
}

bool Trainer::Hello(uint32_t protocol, uint64_t start_time) {
  socket_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, (runtime_dir_ + "/lease.sock").c_str(), sizeof address.sun_path - 1);
  if (connect(socket_fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    refusal = strerror(errno);
    return false;
  }
  const std::string hello =
      nlohmann::json{{"type", "hello"}, {"protocol", protocol}, {"client_version", "test"}, {"start_time", start_time}}.dump();
  if (send(socket_fd, hello.data(), hello.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(hello.size())) return false;
  const Packet answer = Receive();
  if (!answer.ok) return false;
  const nlohmann::json json = nlohmann::json::parse(answer.text);
  if (json.at("type") != "welcome") {
    refusal = json.at("error").get<std::string>();
    return false;
  }
  token = json.at("token").get<std::string>();
  return true;
}

grpc::Status Trainer::Attach(uint64_t budget_bytes, v1::Mode mode) {
  if (token.empty() && !Hello()) return grpc::Status(grpc::StatusCode::UNAVAILABLE, "no welcome: " + refusal);
  request.set_budget_bytes(budget_bytes);
  request.set_mode(mode);
  grpc::ClientContext context;
  Prepare(&context);
  grpc::Status status = control->Attach(&context, request, &attached);
  if (status.ok()) {
    chunks = Receive();
    chunks_fd = chunks.fd;
  }
  return status;
}

grpc::Status Trainer::Register(const v1::RegisterModulesRequest& modules) {
  grpc::ClientContext context;
  Prepare(&context);
  grpc::Status status = control->RegisterModules(&context, modules, &registered);
  if (status.ok() && disk_fd < 0) {
    disk = Receive();
    disk_fd = disk.fd;
  }
  return status;
}

grpc::Status Trainer::Detach() {
  grpc::ClientContext context;
  Prepare(&context);
  v1::DetachResponse response;
  return control->Detach(&context, v1::DetachRequest(), &response);
}

v1::GetNodeResponse Node(const std::string& runtime_dir) {
  Trainer asker(runtime_dir);
  grpc::ClientContext context;
  asker.Prepare(&context);
  v1::GetNodeResponse node;
  asker.admin->GetNode(&context, v1::GetNodeRequest(), &node);
  return node;
}

TrainerProcess::TrainerProcess(const std::string& runtime_dir, uint64_t budget_bytes, bool with_grandchild) {
  int said[2];
  int keep[2];
  if (pipe2(said, O_CLOEXEC) != 0 || pipe2(keep, O_CLOEXEC) != 0) std::abort();
  // A fresh program: gRPC cannot be used in a child of a process that used it.
  std::vector<std::string> words = {"/proc/self/exe", "--trainer", runtime_dir, std::to_string(budget_bytes),
                                    with_grandchild ? "1" : "0"};
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_ = fork();
  if (pid_ == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(said[1], 1);
    dup2(keep[0], 0);
    execv(argv[0], argv.data());
    _exit(127);
  }
  close(said[1]);
  close(keep[0]);
  keep_ = keep[1];
  pollfd ready{said[0], POLLIN, 0};
  char word = 0;
  attached_ = poll(&ready, 1, 20000) > 0 && read(said[0], &word, 1) == 1 && word == 'A';
  close(said[0]);
}

void TrainerProcess::Kill() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

TrainerProcess::~TrainerProcess() {
  Kill();
  close(keep_);
}

}  // namespace misa::test

namespace {

// The child's side: `PROGRAM --trainer RUNTIME_DIR BUDGET GRANDCHILD`.
int BeTrainer(char** argv) {
  misa::test::Trainer trainer(argv[2]);
  const uint64_t budget = std::strtoull(argv[3], nullptr, 10);
  const grpc::Status status = trainer.Attach(budget);
  bool ok = status.ok() && trainer.chunks_fd >= 0;
  if (ok) {
    const size_t bytes = budget / (64 << 10) * (64 << 10);
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, trainer.chunks_fd, 0);
    ok = memory != MAP_FAILED;
    if (ok) std::memset(memory, 0xAB, bytes);
  }
  if (ok && argv[4][0] == '1' && fork() == 0) {
    // A data-loader worker: holds the socket, the memfd and the mapping, until the test closes the pipe.
    close(1);
    char byte;
    while (read(0, &byte, 1) > 0) {
    }
    _exit(0);
  }
  const char word = ok ? 'A' : 'F';
  if (write(1, &word, 1) != 1) return 1;
  char byte;
  while (read(0, &byte, 1) > 0) {
  }
  _exit(0);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 5 && std::strcmp(argv[1], "--trainer") == 0) return BeTrainer(argv);
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
