// What a killed daemon leaves behind, and what the next one makes of it.
#include <gmock/gmock.h>
#include <signal.h>

#include <fstream>

#include "tests/integration/misad_process.h"
#include "tests/integration/trainer.h"

namespace misa::test {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMiB = 1 << 20;

TEST(Restart, CountsWhatLivingTrainersStillHold) {
  TemporaryFolder folder;
  MisadProcess misad(folder);
  ASSERT_TRUE(misad.Start()) << misad.err();
  TrainerProcess survivor(misad.runtime_dir(), 48 * kMiB);
  ASSERT_TRUE(survivor.attached());
  TrainerProcess victim(misad.runtime_dir(), 8 * kMiB);
  ASSERT_TRUE(victim.attached());
  misad.Signal(SIGKILL);
  EXPECT_EQ(misad.Wait().signal, SIGKILL);
  victim.Kill();

  ASSERT_TRUE(misad.Start()) << misad.err();
  v1::GetNodeResponse node = Node(misad.runtime_dir());
  EXPECT_EQ(node.orphaned_bytes(), 48 * kMiB);
  EXPECT_EQ(node.free_bytes(), 16 * kMiB);
  ASSERT_EQ(node.orphans_size(), 1);
  EXPECT_EQ(node.orphans(0).pid(), survivor.pid());
  Trainer next(misad.runtime_dir());
  const grpc::Status status = next.Attach(32 * kMiB);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("held by trainers of an earlier misad"));

  survivor.Kill();
  ASSERT_TRUE(WaitFor([&] { return Node(misad.runtime_dir()).free_bytes() == 64 * kMiB; }));
  EXPECT_TRUE(next.Attach(64 * kMiB).ok());
  ASSERT_TRUE(WaitFor([&] { return misad.Events().find("orphan_ended") != std::string::npos; }));
  EXPECT_THAT(misad.Events(), HasSubstr("orphan_found"));
}

TEST(Restart, StartsWithADamagedJournal) {
  TemporaryFolder folder;
  MisadProcess misad(folder);
  ASSERT_TRUE(misad.Start()) << misad.err();
  misad.Signal(SIGKILL);
  misad.Wait();
  std::ofstream(misad.runtime_dir() + "/journal.json") << "{\"sessions\": [";
  ASSERT_TRUE(misad.Start()) << misad.err();
  EXPECT_THAT(misad.err(), HasSubstr("is damaged and is ignored"));
  EXPECT_EQ(Node(misad.runtime_dir()).free_bytes(), 64 * kMiB);
}

}  // namespace
}  // namespace misa::test
