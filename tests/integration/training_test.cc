// A session that registers modules, reports steps and gets plans.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <cmath>
#include <limits>

#include "runtime/policy/planner.h"
#include "tests/integration/misad_process.h"
#include "tests/integration/trainer.h"

namespace misa::test {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMiB = 1 << 20;
constexpr int kModules = 8;

v1::RegisterModulesRequest Modules(uint64_t disk_bytes) {
  v1::RegisterModulesRequest request;
  request.set_disk_bytes(disk_bytes);
  for (int i = 0; i < kModules; ++i) {
    v1::Module* module = request.add_modules();
    module->set_name("blocks." + std::to_string(i));
    module->set_kind("ffn.up");
    module->set_parameter_count(262144);
    module->set_samplable(true);
    v1::Facet* facet = module->add_facets();
    facet->set_id(static_cast<uint32_t>(10 * i + 3));
    facet->set_kind(v1::FACET_KIND_WEIGHTS);
    facet->set_device_bytes(kMiB);
  }
  return request;
}

// Forward and backward over the modules' weights.
v1::Trace Steps() {
  v1::Trace trace;
  for (int i = 0; i < 2 * kModules; ++i) {
    const int module = i < kModules ? i : 2 * kModules - 1 - i;
    v1::TraceEntry* entry = trace.add_entries();
    entry->add_facets(static_cast<uint32_t>(10 * module + 3));
    entry->add_access(i < kModules ? v1::ACCESS_READ : v1::ACCESS_READ | v1::ACCESS_WRITE);
    entry->set_compute_seconds(0.01);
    entry->set_other_bytes(kMiB / 4);
  }
  return trace;
}

class TrainingTest : public ::testing::Test {
 protected:
  void Begin(const char* extra = "policy: {reserve: 0}\n") {
    misad_.extra = extra;
    ASSERT_TRUE(misad_.Start()) << misad_.err();
    trainer_ = std::make_unique<Trainer>(misad_.runtime_dir());
    ASSERT_TRUE(trainer_->Attach(5 * kMiB).ok());
    trainer_->Prepare(&context_, 60);
  }

  TemporaryFolder folder_;
  MisadProcess misad_{folder_};
  std::unique_ptr<Trainer> trainer_;
  grpc::ClientContext context_;
};

TEST_F(TrainingTest, ATraceGivesAPlanAndABudgetAnother) {
  Begin();
  grpc::Status status = trainer_->Register(Modules(32 * kMiB));
  ASSERT_TRUE(status.ok()) << status.error_message();
  struct stat file;
  ASSERT_EQ(fstat(trainer_->disk_fd, &file), 0);
  EXPECT_GE(static_cast<uint64_t>(file.st_blocks) * 512, 32 * kMiB);
  EXPECT_NE(fcntl(trainer_->disk_fd, F_GETFL) & O_DIRECT, 0);

  auto stream = trainer_->control->Train(&context_);
  v1::TrainRequest request;
  v1::StepReport* report = request.mutable_report();
  report->set_step(1);
  report->set_step_seconds(0.2);
  *report->mutable_trace() = Steps();
  ASSERT_TRUE(stream->Write(request));
  v1::TrainResponse response;
  ASSERT_TRUE(stream->Read(&response));
  ASSERT_TRUE(response.has_plan()) << response.DebugString() << misad_.Events();
  EXPECT_EQ(response.plan().version(), 1u);
  EXPECT_GT(response.plan().actions_size(), 0);
  EXPECT_GT(response.plan().bound_step_seconds(), 0.0);
  EXPECT_GE(response.plan().predicted_step_seconds(), response.plan().bound_step_seconds());
  for (const v1::PlanAction& action : response.plan().actions()) EXPECT_EQ(action.facet() % 10, 3u);
  v1::TrainRequest accepted;
  accepted.mutable_acknowledgement()->set_version(1);
  accepted.mutable_acknowledgement()->set_accepted(true);
  ASSERT_TRUE(stream->Write(accepted));

  // A lower budget: a notice, then a plan within it; the pool gets the rest once the trainer lives within it.
  v1::SetBudgetRequest budget;
  budget.set_session(trainer_->attached.session());
  budget.set_budget_bytes(4 * kMiB);
  v1::SetBudgetResponse done;
  {
    grpc::ClientContext context;
    trainer_->Prepare(&context);
    status = trainer_->admin->SetBudget(&context, budget, &done);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  ASSERT_TRUE(stream->Read(&response));
  ASSERT_TRUE(response.has_budget());
  EXPECT_EQ(response.budget().budget_bytes(), 4 * kMiB);
  const uint64_t budget_serial = response.budget().serial();
  ASSERT_TRUE(stream->Read(&response));
  ASSERT_TRUE(response.has_plan());
  EXPECT_EQ(response.plan().version(), 2u);
  EXPECT_EQ(Node(misad_.runtime_dir()).leased_bytes(), 5 * kMiB);
  accepted.mutable_acknowledgement()->set_version(2);
  ASSERT_TRUE(stream->Write(accepted));
  report->clear_trace();
  report->set_budget_serial(budget_serial);
  report->set_device_peak_bytes(4 * kMiB);
  report->set_device_bytes(3 * kMiB);
  ASSERT_TRUE(stream->Write(request));
  ASSERT_TRUE(WaitFor([&] { return Node(misad_.runtime_dir()).leased_bytes() == 4 * kMiB; }));

  // Smaller than one position needs.
  budget.set_budget_bytes(kMiB);
  {
    grpc::ClientContext context;
    trainer_->Prepare(&context);
    status = trainer_->admin->SetBudget(&context, budget, &done);
  }
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("at once"));
  budget.set_budget_bytes(6 * kMiB);
  {
    grpc::ClientContext context;
    trainer_->Prepare(&context);
    status = trainer_->admin->SetBudget(&context, budget, &done);
  }
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("sealed"));
  EXPECT_TRUE(stream->WritesDone());
  EXPECT_TRUE(stream->Finish().ok());
  // The session outlives its stream.
  EXPECT_EQ(Node(misad_.runtime_dir()).sessions(), 1u);
}

TEST_F(TrainingTest, GoesOnWithStatisticsThatAreNotFinite) {
  Begin();
  ASSERT_TRUE(trainer_->Register(Modules(0)).ok());
  auto stream = trainer_->control->Train(&context_);
  v1::TrainRequest request;
  v1::StepReport* report = request.mutable_report();
  for (uint32_t i = 0; i < kModules; ++i) {
    v1::ModuleStatistics* statistics = report->add_statistics();
    statistics->set_module(i);
    statistics->set_count(4);
    statistics->set_sum(0);
    statistics->set_sum_squares(i == 2 ? std::numeric_limits<double>::quiet_NaN() : 4.0 * i);
  }
  v1::FacetResidency* residency = report->add_residency();
  residency->set_facet(13);
  residency->set_residency(v1::RESIDENCY_DEVICE);
  report->set_demand_loads(3);
  ASSERT_TRUE(stream->Write(request));
  ASSERT_TRUE(WaitFor([&] { return misad_.Events().find("statistics_refused") != std::string::npos; }));
  grpc::ClientContext context;
  trainer_->Prepare(&context);
  v1::ListModulesResponse modules;
  ASSERT_TRUE(trainer_->admin->ListModules(&context, v1::ListModulesRequest(), &modules).ok());
  ASSERT_EQ(modules.modules_size(), kModules);
  EXPECT_EQ(modules.modules(2).importance(), 0.0);
  EXPECT_EQ(modules.modules(7).importance(), 7.0);
  EXPECT_EQ(modules.modules(1).weights(), v1::RESIDENCY_DEVICE);
  EXPECT_EQ(modules.modules(1).device_bytes(), kMiB);
}

TEST_F(TrainingTest, AFullDiskChangesNothing) {
  misad_.disk_capacity = "16MiB";
  Begin();
  ASSERT_TRUE(trainer_->Register(Modules(8 * kMiB)).ok());
  const grpc::Status status = trainer_->Register(Modules(32 * kMiB));
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("32MiB (33554432 bytes) of disk were asked for"));
  EXPECT_EQ(Node(misad_.runtime_dir()).disk_reserved_bytes(), 8 * kMiB);
  ASSERT_TRUE(trainer_->Register(Modules(16 * kMiB)).ok());
  EXPECT_EQ(trainer_->registered.disk_bytes(), 16 * kMiB);
}

TEST_F(TrainingTest, RefusesImpossibleModules) {
  Begin();
  v1::RegisterModulesRequest request = Modules(0);
  request.mutable_modules(1)->mutable_facets(0)->set_device_bytes(1000);
  grpc::Status status = trainer_->Register(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("multiple of the lease's chunk"));
  request = Modules(0);
  request.mutable_modules(1)->mutable_facets(0)->set_id(3);
  status = trainer_->Register(request);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("facet id 3 is used by the modules blocks.0 and blocks.1"));
}

TEST_F(TrainingTest, WatchersSeeEvents) {
  Begin();
  grpc::ClientContext context;
  trainer_->Prepare(&context, 20);
  v1::WatchEventsRequest request;
  request.set_backlog(10);
  auto watch = trainer_->admin->WatchEvents(&context, request);
  v1::Event event;
  ASSERT_TRUE(watch->Read(&event));
  EXPECT_EQ(event.kind(), "daemon_started");
  ASSERT_TRUE(watch->Read(&event));
  EXPECT_EQ(event.kind(), "session_attached");
  ASSERT_TRUE(trainer_->Register(Modules(0)).ok());
  ASSERT_TRUE(watch->Read(&event));
  EXPECT_EQ(event.kind(), "modules_registered");
  EXPECT_THAT(event.time(), ::testing::MatchesRegex("....-..-..T..:..:..[.]......Z"));
  context.TryCancel();
}

}  // namespace
}  // namespace misa::test
