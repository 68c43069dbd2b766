#include "client/cli/commands.h"

#include "client/cli/trace_commands.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>
#include <sstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "runtime/memory/lease_protocol.h"

namespace misa::cli {
namespace {

using testing::HasSubstr;
using testing::Not;

// A short-lived folder with a short path: a Unix socket's path has to stay under 108 characters.
class Folder {
 public:
  Folder() {
    char path[] = "/tmp/misactl-XXXXXX";
    path_ = mkdtemp(path);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

class FakeAdmin final : public v1::AdminService::Service {
 public:
  grpc::Status GetNode(grpc::ServerContext*, const v1::GetNodeRequest*, v1::GetNodeResponse* response) override {
    response->set_version("0.1.0");
    response->set_device_kind("cpu");
    response->set_capacity_bytes(uint64_t{1} << 30);
    return grpc::Status::OK;
  }

  grpc::Status ListModules(grpc::ServerContext*, const v1::ListModulesRequest* request,
                           v1::ListModulesResponse* response) override {
    if (request->session() == "unknown") {
      return grpc::Status(grpc::StatusCode::NOT_FOUND, "there is no session \"unknown\"");
    }
    response->add_modules()->set_session(request->session());
    return grpc::Status::OK;
  }

  // As the daemon does it: what happened, then silence until the caller cancels.
  grpc::Status WatchEvents(grpc::ServerContext* context, const v1::WatchEventsRequest* request,
                           grpc::ServerWriter<v1::Event>* writer) override {
    for (uint32_t i = 0; i < std::min(request->backlog(), 3u); ++i) {
      v1::Event event;
      event.set_kind("load");
      event.set_bytes(i + 1);
      writer->Write(event);
    }
    while (!context->IsCancelled()) usleep(1000);
    return grpc::Status::OK;
  }

  grpc::Status SetBudget(grpc::ServerContext*, const v1::SetBudgetRequest* request, v1::SetBudgetResponse*) override {
    std::lock_guard lock(mutex_);
    budgets_[request->session()] = request->automatic() ? kAutomatic : request->budget_bytes();
    return grpc::Status::OK;
  }

  grpc::Status GetTrace(grpc::ServerContext*, const v1::GetTraceRequest* request,
                        v1::GetTraceResponse* response) override {
    if (request->session() != "s1") return grpc::Status(grpc::StatusCode::NOT_FOUND, "there is no such session");
    trace::TraceFile file;
    file.facets = {{"m", trace::FacetKind::kWeights, 64}};
    file.sections = {{trace::TraceMode::kTrain, {{{{{0, policy::kRead}}, 0.5, 0}}}}};
    response->set_file(trace::Encode(file).value);
    return grpc::Status::OK;
  }

  grpc::Status ListSessions(grpc::ServerContext*, const v1::ListSessionsRequest*, v1::ListSessionsResponse*) override {
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "misad is stopping");
  }

  static constexpr uint64_t kAutomatic = ~uint64_t{0};
  uint64_t budget(const std::string& session) {
    std::lock_guard lock(mutex_);
    return budgets_[session];
  }

 private:
  std::mutex mutex_;
  std::map<std::string, uint64_t> budgets_;
};

class CommandsTest : public testing::Test {
 protected:
  void SetUp() override {
    grpc::EnableDefaultHealthCheckService(true);
    grpc::ServerBuilder builder;
    builder.AddListeningPort("unix://" + folder_.path() + "/" + kControlSocketName, grpc::InsecureServerCredentials());
    builder.RegisterService(&admin_);
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
  }
  void TearDown() override { server_->Shutdown(); }

  Folder folder_;
  FakeAdmin admin_;
  std::unique_ptr<grpc::Server> server_;
  std::ostringstream out_;
  std::ostringstream error_;
  Output output_{out_, error_};
  Output json_{out_, error_, /*json=*/true};
  AdminClient client_{folder_.path(), absl::Seconds(20)};
};

TEST_F(CommandsTest, StatusIsATableForPeopleAndOneObjectForPrograms) {
  EXPECT_EQ(Status(client_, output_), kExitDone);
  EXPECT_THAT(out_.str(), HasSubstr("pool        1GiB: 0B leased"));
  EXPECT_THAT(out_.str(), Not(HasSubstr("\t")));
  out_.str("");
  EXPECT_EQ(Status(client_, json_), kExitDone);
  EXPECT_EQ(nlohmann::json::parse(out_.str())["capacity_bytes"], 1 << 30);
}

TEST_F(CommandsTest, ARefusalIsASentenceAndExitStatusOne) {
  EXPECT_EQ(Modules(client_, output_, "unknown"), kExitRefused);
  EXPECT_EQ(error_.str(), "misactl: there is no session \"unknown\"\n");
  EXPECT_EQ(out_.str(), "");
}

TEST_F(CommandsTest, ADaemonThatGoesAwaySaysSoItself) {
  EXPECT_EQ(Sessions(client_, output_), kExitNoDaemon);
  EXPECT_EQ(error_.str(), "misactl: misad is stopping\n");
}

TEST_F(CommandsTest, EventsEndWithTheBacklogUnlessFollowed) {
  EXPECT_EQ(Events(client_, json_, /*backlog=*/2, /*follow=*/false), kExitDone);
  std::istringstream lines(out_.str());
  std::string line;
  int count = 0;
  while (std::getline(lines, line)) EXPECT_EQ(nlohmann::json::parse(line)["bytes"], ++count);
  EXPECT_EQ(count, 2);
}

TEST_F(CommandsTest, EventsEndAfterASilenceWhenThereAreFewerThanAskedFor) {
  EXPECT_EQ(Events(client_, output_, /*backlog=*/100, /*follow=*/false), kExitDone);
  EXPECT_THAT(out_.str(), HasSubstr("3B"));
}

TEST_F(CommandsTest, FollowedEventsEndWithASentenceWhenTheDaemonEnds) {
  std::thread stop([this] {
    usleep(200000);
    server_->Shutdown(std::chrono::system_clock::now());
  });
  EXPECT_NE(Events(client_, output_, 1, /*follow=*/true), kExitDone);
  stop.join();
  EXPECT_THAT(error_.str(), HasSubstr("misactl: "));
}

TEST_F(CommandsTest, BudgetReadsHumanSizes) {
  EXPECT_EQ(Budget(client_, output_, "s1", "1.5GiB"), kExitDone);
  EXPECT_EQ(admin_.budget("s1"), uint64_t{3} << 29);
  EXPECT_EQ(Budget(client_, output_, "s2", "auto"), kExitDone);
  EXPECT_EQ(admin_.budget("s2"), decltype(admin_)::kAutomatic);
  EXPECT_EQ(Budget(client_, output_, "s1", "lots"), kExitNoDaemon);
  EXPECT_THAT(error_.str(), HasSubstr("\"lots\" is not a size in bytes"));
}

TEST_F(CommandsTest, RecordsATrace) {
  Folder folder;
  const std::string path = folder.path() + "/a.trace";
  EXPECT_EQ(TraceRecord(client_, output_, "s1", path), kExitDone);
  EXPECT_EQ(out_.str(), path + ": train 1 positions, " + std::to_string(std::filesystem::file_size(path)) + "B\n");
  EXPECT_EQ(ReadTrace(path).error, "");
  EXPECT_EQ(TraceRecord(client_, output_, "s2", path + "2"), kExitRefused);
  EXPECT_THAT(error_.str(), HasSubstr("no such session"));
  EXPECT_FALSE(std::filesystem::exists(path + "2"));
}

TEST_F(CommandsTest, HealthIsServing) {
  EXPECT_EQ(Health(client_, output_), kExitDone);
  EXPECT_EQ(out_.str(), "serving\n");
  server_->GetHealthCheckService()->SetServingStatus(false);
  EXPECT_EQ(Health(client_, output_), kExitRefused);
}

TEST_F(CommandsTest, ACommandTheDaemonDoesNotKnowIsSaid) {
  EXPECT_EQ(Drain(client_, output_, "test"), kExitRefused);
  EXPECT_THAT(error_.str(), HasSubstr("does not know this command"));
}

TEST(NoDaemonTest, NamesTheSocketAndWhatToDo) {
  Folder folder;
  std::ostringstream out, error;
  AdminClient client(folder.path(), absl::Seconds(20));
  EXPECT_EQ(Status(client, {out, error}), kExitNoDaemon);
  EXPECT_THAT(error.str(), HasSubstr(folder.path() + "/misad.sock does not exist"));
  EXPECT_THAT(error.str(), HasSubstr("--runtime-dir"));
  EXPECT_EQ(out.str(), "");
}

TEST(NoDaemonTest, HealthOfNoDaemonIsOneForContainers) {
  Folder folder;
  std::ostringstream out, error;
  AdminClient client(folder.path(), absl::Seconds(20));
  EXPECT_EQ(Health(client, {out, error}), kExitRefused);
}

TEST(NoDaemonTest, APathTooLongForASocketIsSaid) {
  std::ostringstream out, error;
  AdminClient client("/tmp/" + std::string(120, 'x'), absl::Seconds(20));
  EXPECT_EQ(Status(client, {out, error}), kExitNoDaemon);
  EXPECT_THAT(error.str(), HasSubstr("too long"));
}

TEST(RuntimeDirectoryTest, OptionThenVariableThenDefault) {
  setenv(kRuntimeDirectoryVariable, "/tmp/from-variable", 1);
  EXPECT_EQ(AdminClient::RuntimeDirectory("/tmp/from-option"), "/tmp/from-option");
  EXPECT_EQ(AdminClient::RuntimeDirectory(""), "/tmp/from-variable");
  EXPECT_EQ(AdminClient::RuntimeDirectory("relative"), (std::filesystem::current_path() / "relative").string());
  unsetenv(kRuntimeDirectoryVariable);
  EXPECT_EQ(AdminClient::RuntimeDirectory(""), "/run/misa");
}

TEST(TextTest, SessionsShowProblemsBelowTheTable) {
  v1::ListSessionsResponse sessions;
  EXPECT_EQ(SessionsText(sessions, false), "no sessions\n");
  v1::Session* session = sessions.add_sessions();
  session->set_session("s1");
  session->set_mode(v1::MODE_EXACT);
  session->set_budget_bytes(uint64_t{512} << 20);
  session->set_weight(2.5);
  session->set_elastic(true);
  session->set_last_problem("disk full\033[2J");
  for (const char* name : {"", "letters\n"}) {
    v1::Task* task = session->add_tasks();
    task->set_name(name);
    task->set_weight(1.5);
    task->set_share(0.5);
    task->set_steps(7);
  }
  const std::string text = SessionsText(sessions, false);
  EXPECT_THAT(text, HasSubstr("2.5  512MiB auto"));
  EXPECT_THAT(text, HasSubstr("session s1: tasks (none) 50 % (weight 1.5, 7 steps), letters? 50 % (weight 1.5, 7 steps)\n"));
  EXPECT_THAT(text, HasSubstr("session s1: disk full?[2J\n"));
}

TEST(TextTest, SessionsSayWhatTheirGuardsKnow) {
  v1::ListSessionsResponse sessions;
  v1::Session* session = sessions.add_sessions();
  session->set_session("s1");
  EXPECT_THAT(SessionsText(sessions, false), Not(HasSubstr("session s1:"))) << "nothing was told";
  v1::GuardStatus* guards = session->mutable_guards();
  guards->set_loss(2.5);
  guards->set_swing_level(1);
  guards->set_swing_period_steps(12);
  guards->set_alpha(0.375);
  guards->set_hot(0.8);
  guards->set_kept_modules(3);
  guards->set_kept_bytes(uint64_t{3} << 20);
  guards->set_rows(16);
  guards->set_most_share(2.5);
  guards->set_free_rows(20);
  guards->set_most_rows(40);
  const std::string text = SessionsText(sessions, false);
  EXPECT_THAT(text, HasSubstr("session s1: loss 2.5, not stable yet; it swings with a period of 12 steps: alpha is raised to "
                              "0.375, hot to 0.8\n"));
  EXPECT_THAT(text, HasSubstr("session s1: 3 modules of 3MiB keep their place on the device\n"));
  EXPECT_THAT(text, HasSubstr("session s1: a batch has 16 rows; 20 fit into the memory that is free, 40 at most\n"));
}

TEST(TextTest, NodeNamesOrphans) {
  v1::GetNodeResponse node;
  node.set_orphaned_bytes(4096);
  v1::Orphan* orphan = node.add_orphans();
  orphan->set_session("s9");
  orphan->set_pid(77);
  orphan->set_bytes(4096);
  const std::string text = NodeText(node, false);
  EXPECT_THAT(text, HasSubstr("4KiB are held by trainers of an earlier daemon"));
  EXPECT_THAT(text, HasSubstr("s9"));
}

}  // namespace
}  // namespace misa::cli
