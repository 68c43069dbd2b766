// A session's next step, predicted by a real daemon: its metric, and a plug-in that is there or is not.
#include <gmock/gmock.h>

#include "tests/integration/misad_process.h"
#include "tests/integration/trainer.h"

namespace misa::test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class PredictionTest : public ::testing::Test {
 protected:
  void Begin(const std::string& plugin) {
    misad_.extra = "prediction: {plugin: " + plugin + ", window: 16}\n";
    ASSERT_TRUE(misad_.Start()) << misad_.err();
    trainer_ = std::make_unique<Trainer>(misad_.runtime_dir());
    ASSERT_TRUE(trainer_->Attach(1 << 20).ok());
    trainer_->Prepare(&context_, 60);
    stream_ = trainer_->control->Train(&context_);
  }
  void Step(uint64_t digest) {
    v1::TrainRequest request;
    request.mutable_report()->set_step(++step_);
    request.mutable_report()->set_trace_digest(digest);
    ASSERT_TRUE(stream_->Write(request));
  }
  bool Metric(const std::string& text) {
    return WaitFor([&] { return misad_.Scrape().find(text) != std::string::npos; });
  }

  TemporaryFolder folder_;
  MisadProcess misad_{folder_};
  std::unique_ptr<Trainer> trainer_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::TrainRequest, v1::TrainResponse>> stream_;
  uint64_t step_ = 0;
};

TEST_F(PredictionTest, AStepThatIsNamedBeforeItComesCounts) {
  Begin("off");
  for (int i = 0; i < 40; ++i) Step(7);
  EXPECT_TRUE(Metric("misa_steps_total 40"));
  EXPECT_THAT(misad_.Scrape(), HasSubstr("misa_predictor_accuracy{session=\"0\",predictor=\"last\"} 0.9"));
  EXPECT_THAT(misad_.Scrape(), Not(HasSubstr("predictor=\"lstm\"")));
}

TEST_F(PredictionTest, ThePluginBidsWhereTheOthersFallShort) {
  Begin(FAKE_PLUGIN);  // it says the number after the last one
  for (uint64_t i = 0; i < 200; ++i) Step(1000 + i);
  EXPECT_TRUE(Metric("misa_steps_total 200"));
  EXPECT_THAT(misad_.Scrape(), HasSubstr("misa_predictor_accuracy{session=\"0\",predictor=\"ppm\"} 0\n"));
  // Its answer to the last step comes in its own time; from then on each one is in time that the test waits for.
  const auto right = [&] {
    Step(1000 + step_);
    return misad_.Scrape().find("predictor=\"lstm\"} 0.") != std::string::npos &&
           misad_.Scrape().find("predictor=\"bidder\"} 0.") != std::string::npos;
  };
  EXPECT_TRUE(WaitFor(right));
}

TEST_F(PredictionTest, AMissingPluginIsAnEventAndNothingElse) {
  Begin("/nonexistent/libmisa.so");
  for (uint64_t i = 0; i < 200; ++i) Step(i * i);
  ASSERT_TRUE(WaitFor([&] { return misad_.Events().find("predictor_unavailable") != std::string::npos; }));
  EXPECT_THAT(misad_.Events(), HasSubstr("/nonexistent/libmisa.so could not be loaded"));
  EXPECT_THAT(misad_.err(), HasSubstr("set prediction.plugin to off"));
  Step(1);
  EXPECT_TRUE(Metric("misa_steps_total 201"));
  EXPECT_TRUE(misad_.running());
}

}  // namespace
}  // namespace misa::test
