// The smallest trainer there is: a lease socket and a control channel.
#pragma once

#include <grpcpp/grpcpp.h>
#include <sys/types.h>

#include <memory>
#include <string>

#include "misa/v1/admin.grpc.pb.h"
#include "misa/v1/control.grpc.pb.h"

namespace misa::test {

// One packet of the lease socket.
struct Packet {
  bool ok = false;
  std::string text;
  int fd = -1;
};

class Trainer {
 public:
  explicit Trainer(std::string runtime_dir);
  ~Trainer();

  // Connects the lease socket and says hello; true on a welcome, else `refusal` holds the sentence.
  bool Hello(uint32_t protocol = 1, uint64_t start_time = 0);
  // Hello, Attach, and the chunks packet.
  grpc::Status Attach(uint64_t budget_bytes, v1::Mode mode = v1::MODE_EXACT);
  // RegisterModules and, the first time, the disk packet.
  grpc::Status Register(const v1::RegisterModulesRequest& request);
  grpc::Status Detach();

  Packet Receive(double seconds = 5);
  void Prepare(grpc::ClientContext* context, double seconds = 5) const;
  // End of the lease, and of the fds.
  void Close();

  std::unique_ptr<v1::ControlService::Stub> control;
  std::unique_ptr<v1::AdminService::Stub> admin;
  v1::AttachRequest request;  // changed before Attach where a test wants other values
  v1::AttachResponse attached;
  v1::RegisterModulesResponse registered;
  std::string token;
  std::string refusal;
  int socket_fd = -1;
  int chunks_fd = -1;
  int disk_fd = -1;
  Packet chunks;
  Packet disk;

 private:
  const std::string runtime_dir_;
};

v1::GetNodeResponse Node(const std::string& runtime_dir);

// Runs in a child: attaches, dirties every byte of its memory, says so over a pipe and waits to be killed. With `fork`,
// a grandchild inherits the sockets and outlives it.
class TrainerProcess {
 public:
  TrainerProcess(const std::string& self_argument_runtime_dir, uint64_t budget_bytes, bool with_grandchild = false);
  ~TrainerProcess();
  bool attached() const { return attached_; }
  pid_t pid() const { return pid_; }
  void Kill();

 private:
  pid_t pid_ = -1;
  int keep_ = -1;  // write end that the grandchild watches: its end of file lets it exit
  bool attached_ = false;
};

}  // namespace misa::test
