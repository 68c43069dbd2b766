// One daemon and its trainers: who gets in, what they get, and what becomes of it when they end.
#include <gmock/gmock.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "tests/integration/misad_process.h"
#include "tests/integration/trainer.h"

namespace misa::test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;

constexpr uint64_t kMiB = 1 << 20;

class MisadTest : public ::testing::Test {
 protected:
  TemporaryFolder folder_;
  MisadProcess misad_{folder_};
};

TEST_F(MisadTest, SaysThatItIsReadyAndEndsCleanly) {
  ASSERT_TRUE(misad_.Start()) << misad_.err();
  EXPECT_THAT(misad_.out(), ContainsRegex("misad ready: runtime_dir=.* metrics=http://127.0.0.1:[0-9]+/metrics\n"));
  for (const char* name : {"/misad.sock", "/lease.sock"}) {
    struct stat status;
    ASSERT_EQ(stat((misad_.runtime_dir() + name).c_str(), &status), 0);
    EXPECT_EQ(status.st_mode & 0777, 0660u) << name;
  }
  struct stat status;
  ASSERT_EQ(stat(misad_.runtime_dir().c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0755u);
  misad_.Signal(SIGTERM);
  const Exit exit = misad_.Wait();
  EXPECT_EQ(exit.code, 0) << exit.err;
  EXPECT_FALSE(std::filesystem::exists(misad_.runtime_dir() + "/misad.sock"));
  EXPECT_FALSE(std::filesystem::exists(misad_.runtime_dir() + "/lease.sock"));
  EXPECT_THAT(misad_.Events(), HasSubstr("\"kind\":\"daemon_started\""));
}

TEST_F(MisadTest, RefusesToRunBesideAnother) {
  ASSERT_TRUE(misad_.Start()) << misad_.err();
  TemporaryFolder other;
  MisadProcess second(other);
  second.config = misad_.config_path();
  ASSERT_FALSE(second.Start());
  const Exit exit = second.Wait();
  EXPECT_EQ(exit.code, 1);
  EXPECT_THAT(exit.err, HasSubstr("another misad (pid " + std::to_string(misad_.pid()) + ")"));
  // The first one's sockets still work.
  EXPECT_EQ(Node(misad_.runtime_dir()).capacity_bytes(), 64 * kMiB);
}

TEST_F(MisadTest, ChecksItsConfiguration) {
  misad_.extra = "limts: {sessions: 3}\n";
  EXPECT_FALSE(misad_.Start({"--check-config"}));
  Exit exit = misad_.Wait();
  EXPECT_EQ(exit.code, 1);
  EXPECT_THAT(exit.err, HasSubstr("misad.yaml:7:1: the key limts is unknown (did you mean limits?)"));
  misad_.extra = "";
  EXPECT_FALSE(misad_.Start({"--check-config"}));
  exit = misad_.Wait();
  EXPECT_EQ(exit.code, 0);
  EXPECT_EQ(exit.out, "OK\n");
}

TEST_F(MisadTest, RefusesARuntimeFolderWhosePathIsTooLong) {
  misad_.config = folder_.path() + "/long.yaml";
  std::ofstream(misad_.config)
      << "runtime_dir: " << folder_.path() << "/" << std::string(100, 'x') << "\ndisk: {directory: " << folder_.path() << "/d}\n";
  EXPECT_FALSE(misad_.Start());
  const Exit exit = misad_.Wait();
  EXPECT_EQ(exit.code, 1);
  EXPECT_THAT(exit.err, HasSubstr("a socket's path must have under 108"));
}

TEST_F(MisadTest, LeasesSealedZeroedMemory) {
  ASSERT_TRUE(misad_.Start()) << misad_.err();
  Trainer trainer(misad_.runtime_dir());
  const grpc::Status status = trainer.Attach(10 * kMiB + 5000);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(trainer.attached.budget_bytes(), 10 * kMiB + 5000);
  EXPECT_EQ(trainer.attached.chunk_bytes(), 64u << 10);
  EXPECT_EQ(trainer.attached.device_kind(), "cpu");
  EXPECT_EQ(trainer.attached.link().load_bytes_per_second(), 1e9);
  ASSERT_GE(trainer.chunks_fd, 0);
  EXPECT_THAT(trainer.chunks.text, HasSubstr("\"bytes\":10485760"));
  struct stat file;
  ASSERT_EQ(fstat(trainer.chunks_fd, &file), 0);
  EXPECT_EQ(static_cast<uint64_t>(file.st_size), 10 * kMiB);
  EXPECT_NE(ftruncate(trainer.chunks_fd, 0), 0);
  const v1::GetNodeResponse node = Node(misad_.runtime_dir());
  EXPECT_EQ(node.leased_bytes(), 10 * kMiB + 5000);
  EXPECT_EQ(node.sessions(), 1u);
  EXPECT_TRUE(trainer.Detach().ok());
  EXPECT_EQ(Node(misad_.runtime_dir()).free_bytes(), 64 * kMiB);
}

TEST_F(MisadTest, RefusesOtherProtocolsAndStrangers) {
  ASSERT_TRUE(misad_.Start()) << misad_.err();
  Trainer old(misad_.runtime_dir());
  EXPECT_FALSE(old.Hello(99));
  EXPECT_THAT(old.refusal, HasSubstr("the trainer speaks protocol 99"));
  Trainer forked(misad_.runtime_dir());
  EXPECT_FALSE(forked.Hello(1, 12345));
  EXPECT_THAT(forked.refusal, HasSubstr("after any fork"));
  Trainer stranger(misad_.runtime_dir());
  stranger.token = "guess";
  const grpc::Status status = stranger.Attach(kMiB);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_THAT(status.error_message(), HasSubstr("lease.sock"));
}

TEST_F(MisadTest, RefusesWhatThePoolCannotHold) {
  ASSERT_TRUE(misad_.Start()) << misad_.err();
  Trainer first(misad_.runtime_dir());
  ASSERT_TRUE(first.Attach(48 * kMiB).ok());
  Trainer second(misad_.runtime_dir());
  grpc::Status status = second.Attach(32 * kMiB);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("32MiB (33554432 bytes) was asked for, and 16MiB (16777216 bytes) of the "
                                                "device pool's 64MiB (67108864 bytes) are free"));
  // The refused lease is still good for a smaller budget.
  status = second.Attach(16 * kMiB);
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST_F(MisadTest, AKilledTrainersMemoryIsFreeWithinASecondAndScrubbed) {
  ASSERT_TRUE(misad_.Start()) << misad_.err();
  TrainerProcess child(misad_.runtime_dir(), 64 * kMiB);
  ASSERT_TRUE(child.attached());
  EXPECT_EQ(Node(misad_.runtime_dir()).free_bytes(), 0u);
  child.Kill();
  const auto killed = std::chrono::steady_clock::now();
  ASSERT_TRUE(WaitFor([&] { return Node(misad_.runtime_dir()).free_bytes() == 64 * kMiB; }, 5));
  EXPECT_LT(std::chrono::steady_clock::now() - killed, std::chrono::seconds(1));

  Trainer next(misad_.runtime_dir());
  ASSERT_TRUE(next.Attach(64 * kMiB).ok());
  const auto* memory =
      static_cast<const uint8_t*>(mmap(nullptr, 64 * kMiB, PROT_READ, MAP_SHARED, next.chunks_fd, 0));
  ASSERT_NE(memory, MAP_FAILED);
  EXPECT_TRUE(std::all_of(memory, memory + 64 * kMiB, [](uint8_t byte) { return byte == 0; }));
  munmap(const_cast<uint8_t*>(memory), 64 * kMiB);
  EXPECT_THAT(misad_.Events(), HasSubstr("\"kind\":\"memory_reclaimed\""));
}

TEST_F(MisadTest, AForkedChildThatKeepsTheSocketDoesNotKeepTheLease) {
  ASSERT_TRUE(misad_.Start()) << misad_.err();
  TrainerProcess child(misad_.runtime_dir(), 32 * kMiB, /*with_grandchild=*/true);
  ASSERT_TRUE(child.attached());
  child.Kill();
  ASSERT_TRUE(WaitFor([&] { return Node(misad_.runtime_dir()).free_bytes() == 64 * kMiB; }, 5));
  ASSERT_TRUE(WaitFor([&] { return misad_.Events().find("\"cause\":\"process ended\"") != std::string::npos; }));
}

TEST_F(MisadTest, ASocketsEndOfFileEndsTheSession) {
  ASSERT_TRUE(misad_.Start()) << misad_.err();
  Trainer trainer(misad_.runtime_dir());
  ASSERT_TRUE(trainer.Attach(8 * kMiB).ok());
  close(trainer.socket_fd);
  trainer.socket_fd = -1;
  ASSERT_TRUE(WaitFor([&] { return Node(misad_.runtime_dir()).free_bytes() == 64 * kMiB; }));
  ASSERT_TRUE(WaitFor([&] { return misad_.Events().find("\"cause\":\"socket closed\"") != std::string::npos; }));
}

TEST_F(MisadTest, LeaksNoDescriptorsAndNoFiles) {
  ASSERT_TRUE(misad_.Start()) << misad_.err();
  const auto session = [&] {
    Trainer trainer(misad_.runtime_dir());
    ASSERT_TRUE(trainer.Attach(4 * kMiB).ok());
    v1::RegisterModulesRequest request;
    request.set_disk_bytes(kMiB);
    ASSERT_TRUE(trainer.Register(request).ok());
    ASSERT_GE(trainer.disk_fd, 0);
  };
  session();
  ASSERT_TRUE(WaitFor([&] { return Node(misad_.runtime_dir()).sessions() == 0; }));
  // gRPC's own descriptors settle after the first connections have gone.
  size_t before = 0;
  ASSERT_TRUE(WaitFor([&] {
    const size_t now = misad_.OpenFds();
    const bool settled = now == before;
    before = now;
    return settled;
  }));
  for (int i = 0; i < 10; ++i) session();
  EXPECT_TRUE(WaitFor([&] { return misad_.OpenFds() <= before; })) << misad_.OpenFds() << " against " << before;
  EXPECT_TRUE(std::filesystem::is_empty(folder_.path() + "/d"));
  EXPECT_TRUE(WaitFor([&] { return Node(misad_.runtime_dir()).disk_reserved_bytes() == 0; }));
}

TEST_F(MisadTest, DrainsWhenToldToStop) {
  ASSERT_TRUE(misad_.Start({"--drain-seconds", "20"})) << misad_.err();
  Trainer trainer(misad_.runtime_dir());
  ASSERT_TRUE(trainer.Attach(8 * kMiB).ok());
  grpc::ClientContext context;
  trainer.Prepare(&context, 20);
  auto stream = trainer.control->Train(&context);
  v1::TrainRequest report;
  report.mutable_report()->set_step(1);
  ASSERT_TRUE(stream->Write(report));
  misad_.Signal(SIGTERM);
  v1::TrainResponse response;
  ASSERT_TRUE(stream->Read(&response));
  EXPECT_TRUE(response.has_drain());
  Trainer late(misad_.runtime_dir());
  const grpc::Status status = late.Attach(kMiB);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("draining"));
  EXPECT_TRUE(misad_.running());
  ASSERT_TRUE(trainer.Detach().ok());
  const Exit exit = misad_.Wait();
  EXPECT_EQ(exit.code, 0) << exit.err;
}

TEST_F(MisadTest, LeavesTrainersWhatTheyHoldWhenItStops) {
  ASSERT_TRUE(misad_.Start({"--drain-seconds", "0"})) << misad_.err();
  Trainer trainer(misad_.runtime_dir());
  ASSERT_TRUE(trainer.Attach(kMiB).ok());
  auto* memory = static_cast<uint8_t*>(mmap(nullptr, kMiB, PROT_READ | PROT_WRITE, MAP_SHARED, trainer.chunks_fd, 0));
  ASSERT_NE(memory, MAP_FAILED);
  std::memset(memory, 7, kMiB);
  misad_.Signal(SIGTERM);
  EXPECT_EQ(misad_.Wait().code, 0);
  EXPECT_TRUE(std::all_of(memory, memory + kMiB, [](uint8_t byte) { return byte == 7; }));
  munmap(memory, kMiB);
}

TEST_F(MisadTest, ReloadsThePolicyAndNamesWhatNeedsARestart) {
  ASSERT_TRUE(misad_.Start()) << misad_.err();
  misad_.extra = "policy: {alpha: 0.5}\n";
  misad_.device_capacity = "32MiB";
  misad_.WriteConfig();
  misad_.Signal(SIGHUP);
  ASSERT_TRUE(WaitFor([&] { return misad_.err().find("the configuration was reloaded") != std::string::npos; }));
  EXPECT_THAT(misad_.err(), HasSubstr("a change of device needs a restart"));
  EXPECT_EQ(Node(misad_.runtime_dir()).capacity_bytes(), 64 * kMiB);
  misad_.extra = "policy: {alpha: wrong}\n";
  misad_.WriteConfig();
  misad_.Signal(SIGHUP);
  ASSERT_TRUE(WaitFor([&] { return misad_.err().find("the configuration was not reloaded") != std::string::npos; }));
  Trainer trainer(misad_.runtime_dir());
  grpc::ClientContext context;
  trainer.Prepare(&context);
  v1::CaptureSnapshotResponse snapshot;
  ASSERT_TRUE(trainer.admin->CaptureSnapshot(&context, v1::CaptureSnapshotRequest(), &snapshot).ok());
  EXPECT_THAT(snapshot.json(), HasSubstr("\"alpha\":0.5"));
}

TEST_F(MisadTest, APrivateDaemonEndsWithItsLastSession) {
  ASSERT_TRUE(misad_.Start({"--private"})) << misad_.err();
  {
    Trainer trainer(misad_.runtime_dir());
    ASSERT_TRUE(trainer.Attach(kMiB).ok());
  }
  const Exit exit = misad_.Wait();
  EXPECT_TRUE(exit.ended);
  EXPECT_EQ(exit.code, 0) << exit.err;
}

TEST_F(MisadTest, APrivateDaemonEndsWithItsParent) {
  const pid_t parent = fork();
  if (parent == 0) {
    pause();
    _exit(0);
  }
  ASSERT_TRUE(misad_.Start({"--private", "--parent-pid", std::to_string(parent)})) << misad_.err();
  kill(parent, SIGKILL);
  const Exit exit = misad_.Wait();
  waitpid(parent, nullptr, 0);
  EXPECT_TRUE(exit.ended);
  EXPECT_EQ(exit.code, 0) << exit.err;
}

}  // namespace
}  // namespace misa::test
