#include "server/scheduler/scheduler.h"

#include <absl/synchronization/notification.h>
#include <gmock/gmock.h>

#include "server/grpc/call_table.h"
#include "server/scheduler/worker.h"
#include "tests/unit/server/core_harness.h"

namespace misa::server {
namespace {

class FakeClock : public Clock {
 public:
  Now now() const override { return {5, 7}; }
};

TEST(Scheduler, AFullQueueRefusesCallsAndStillTakesEnds) {
  FakeClock clock;
  absl::Notification entered, leave;
  int answered = 0;
  CallTable* table = nullptr;
  Scheduler scheduler(2, &clock, [&](Effect&& effect) {
    if (std::get_if<EmitEvent>(&effect) != nullptr && !entered.HasBeenNotified()) {
      entered.Notify();
      leave.WaitForNotificationWithTimeout(absl::Seconds(20));
    }
    if (auto* reply = std::get_if<Reply>(&effect)) table->Complete(std::move(*reply));
  });
  CallTable calls(&scheduler);
  table = &calls;
  Effects first;
  Core core(CoreHarness::Defaults(), {}, clock.now(), &first);
  scheduler.Start(std::move(core), std::move(first));
  ASSERT_TRUE(entered.WaitForNotificationWithTimeout(absl::Seconds(20)));
  Error last;
  const auto ask = [&] {
    calls.Start(
        [&](const Error& error, Response&&) {
          ++answered;
          last = error;
        },
        [](CallId call) { return Event(AdminCall{call, v1::GetNodeRequest()}); });
  };
  ask();
  ask();
  EXPECT_EQ(scheduler.queued(), 2u);
  EXPECT_EQ(answered, 0);
  ask();
  EXPECT_EQ(answered, 1);
  EXPECT_EQ(last.code, Code::kExhausted);
  scheduler.Deliver(LeaseClosed{1, "socket closed"});
  EXPECT_EQ(scheduler.queued(), 3u);
  leave.Notify();
  scheduler.Stop();
  EXPECT_EQ(answered, 3);
  calls.Close();
  ask();
  EXPECT_EQ(last.code, Code::kUnavailable);
}

TEST(Worker, RunsJobsInOrderAndHasALimit) {
  absl::Notification entered, leave;
  std::vector<int> order;
  Worker worker(2);
  ASSERT_TRUE(worker.Post([&] {
    entered.Notify();
    leave.WaitForNotificationWithTimeout(absl::Seconds(20));
  }));
  ASSERT_TRUE(entered.WaitForNotificationWithTimeout(absl::Seconds(20)));
  EXPECT_TRUE(worker.Post([&] { order.push_back(1); }));
  EXPECT_TRUE(worker.Post([&] { order.push_back(2); }));
  EXPECT_FALSE(worker.Post([&] { order.push_back(3); }));
  leave.Notify();
  worker.Stop();
  EXPECT_THAT(order, ::testing::ElementsAre(1, 2));
  EXPECT_FALSE(worker.Post([] {}));
}

}  // namespace
}  // namespace misa::server
