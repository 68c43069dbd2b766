// Sessions and memory: attach, refuse, end, drain, orphans.
#include <gmock/gmock.h>

#include "tests/unit/server/core_harness.h"

namespace misa::server {
namespace {

using ::testing::HasSubstr;

TEST(Core, AttachesAndEnds) {
  CoreHarness h;
  const LeaseId lease = h.Attach(40 * kMiB + 1);
  ASSERT_TRUE(h.last_reply().error.ok()) << h.last_reply().error.sentence;
  EXPECT_EQ(h.last<v1::AttachResponse>().budget_bytes(), 40 * kMiB + 1);
  EXPECT_EQ(h.Node().free_bytes(), 60 * kMiB - 1);
  ASSERT_EQ(h.journal.size(), 1u);
  EXPECT_EQ(h.journal[0].pid, 101);
  EXPECT_EQ(h.journal[0].start_time, 7u);
  h.Handle(LeaseClosed{lease, "process ended"});
  EXPECT_EQ(h.Node().free_bytes(), 100 * kMiB);
  EXPECT_TRUE(h.journal.empty());
  EXPECT_TRUE(h.holding.empty());
  EXPECT_EQ(h.CountEvents("session_ended"), 1);
  EXPECT_EQ(h.CountEvents("memory_reclaimed"), 1);
  EXPECT_TRUE(h.errors.empty());
  // A second end of the same lease is no news.
  h.Handle(LeaseClosed{lease, "socket closed"});
  EXPECT_EQ(h.CountEvents("session_ended"), 1);
}

TEST(Core, AnEmulatedDeviceTellsItsLinkAndItsTier) {
  CoreOptions options = CoreHarness::Defaults();
  options.device_kind = "emulated";
  options.below = "host";
  options.disk_capacity_bytes = 10 * kMiB;
  options.link_modelled = true;
  options.link_latency_seconds = 1e-5;
  CoreHarness h(options);
  const LeaseId lease = h.Attach(kMiB);
  const auto attached = h.last<v1::AttachResponse>();
  EXPECT_EQ(attached.device_kind(), "emulated");
  EXPECT_EQ(attached.below(), "host");
  EXPECT_TRUE(attached.link_modelled());
  EXPECT_EQ(attached.link_latency_seconds(), 1e-5);
  EXPECT_EQ(h.Node().below(), "host");
  h.Register(lease, MakeModules(1, kMiB, 11 * kMiB));
  EXPECT_EQ(h.last_reply().error.code, Code::kExhausted);
  EXPECT_THAT(h.last_reply().error.sentence, HasSubstr("of the host tier's 10MiB"));
  EXPECT_THAT(h.last_reply().error.sentence, HasSubstr("raise host.capacity"));
}

TEST(Core, RefusesWithASentenceAndChangesNothing) {
  CoreHarness h;
  h.Attach(80 * kMiB);
  h.Attach(30 * kMiB);
  EXPECT_EQ(h.last_reply().error.code, Code::kExhausted);
  EXPECT_THAT(h.last_reply().error.sentence, HasSubstr("20MiB (20971520 bytes) of the device pool's 100MiB"));
  h.Attach(200 * kMiB);
  EXPECT_EQ(h.last_reply().error.code, Code::kExhausted);
  h.Attach(0);
  EXPECT_EQ(h.last_reply().error.code, Code::kInvalid);
  h.Attach(kMiB, v1::MODE_UNSPECIFIED);
  EXPECT_EQ(h.last_reply().error.code, Code::kInvalid);
  EXPECT_EQ(h.Node().free_bytes(), 20 * kMiB);

  AttachCall call{h.NewCall(), CoreHarness::Token(2), {}};
  call.request.set_protocol_version(9);
  h.Handle(call);
  EXPECT_EQ(h.last_reply().error.code, Code::kPrecondition);
  call.call = h.NewCall();
  call.token = "unknown";
  h.Handle(call);
  EXPECT_EQ(h.last_reply().error.code, Code::kUnauthenticated);
}

TEST(Core, LimitsSessions) {
  CoreHarness h;
  for (int i = 0; i < 4; ++i) h.Attach(kMiB);
  EXPECT_TRUE(h.last_reply().error.ok());
  h.Attach(kMiB);
  EXPECT_EQ(h.last_reply().error.code, Code::kExhausted);
  for (int i = 0; i < 40; ++i) h.Handle(LeaseOpened{1000u + static_cast<LeaseId>(i), "t" + std::to_string(i), 1, 0, 1, ""});
  EXPECT_FALSE(h.refused.empty());
}

TEST(Core, ALeaseThatEndsWhileItsMemoryIsMadeGivesItBack) {
  CoreHarness h;
  h.hold = true;
  const LeaseId lease = h.Attach(50 * kMiB);
  h.Handle(LeaseClosed{lease, "socket closed"});
  EXPECT_TRUE(h.replies.empty());
  h.hold = false;
  h.Answer();
  EXPECT_EQ(h.replies.at(0).error.code, Code::kUnavailable);
  EXPECT_EQ(h.Node().free_bytes(), 100 * kMiB);
  EXPECT_TRUE(h.holding.empty());
}

TEST(Core, MemoryThatCannotBeMadeIsNotLeased) {
  CoreHarness h;
  h.chunks_error = {Code::kInternal, "no memfd"};
  h.Attach(50 * kMiB);
  EXPECT_EQ(h.replies.at(0).error.sentence, "no memfd");
  EXPECT_EQ(h.Node().free_bytes(), 100 * kMiB);
  EXPECT_TRUE(h.journal.empty());
}

TEST(Core, AnAttachWaitsForMemoryThatIsBeingReclaimed) {
  CoreHarness h;
  const LeaseId first = h.Attach(80 * kMiB);
  h.hold = true;
  h.Handle(LeaseClosed{first, "process ended"});
  EXPECT_EQ(h.Node().reclaiming_bytes(), 80 * kMiB);
  const size_t replies = h.replies.size();
  h.Attach(60 * kMiB);
  EXPECT_EQ(h.replies.size(), replies);
  h.hold = false;
  h.Answer();  // scrubbed: the waiting attach starts
  ASSERT_EQ(h.replies.size(), replies + 1);
  EXPECT_TRUE(h.replies.back().error.ok());
  EXPECT_EQ(h.Node().leased_bytes(), 60 * kMiB);
}

TEST(Core, DetachIsAnsweredWhenTheMemoryIsFree) {
  CoreHarness h;
  const LeaseId lease = h.Attach(80 * kMiB);
  h.hold = true;
  h.Handle(DetachCall{h.NewCall(), CoreHarness::Token(lease)});
  EXPECT_EQ(h.replies.size(), 1u);
  h.hold = false;
  h.Answer();
  EXPECT_EQ(h.replies.size(), 2u);
  EXPECT_TRUE(h.last_reply().error.ok());
}

TEST(Core, DiskIsReservedBeforeItIsPromised) {
  CoreHarness h;
  const LeaseId lease = h.Attach(10 * kMiB);
  h.Register(lease, MakeModules(2, kMiB, 300 * kMiB));
  ASSERT_TRUE(h.last_reply().error.ok());
  h.disk_error = {Code::kExhausted, "the disk is full"};
  h.Register(lease, MakeModules(3, kMiB, 500 * kMiB));
  EXPECT_EQ(h.last_reply().error.sentence, "the disk is full");
  EXPECT_EQ(h.Node().disk_reserved_bytes(), 300 * kMiB);
  h.disk_error = {};
  h.Register(lease, MakeModules(3, kMiB, 2000 * kMiB));
  EXPECT_EQ(h.last_reply().error.code, Code::kExhausted);
  EXPECT_EQ(h.Node().disk_reserved_bytes(), 300 * kMiB);
  // The refused modules are not there.
  v1::ListModulesRequest list;
  h.Handle(AdminCall{h.NewCall(), list});
  EXPECT_EQ(h.last<v1::ListModulesResponse>().modules_size(), 2);
  h.Handle(LeaseClosed{lease, "process ended"});
  EXPECT_EQ(h.Node().disk_reserved_bytes(), 0u);
}

TEST(Core, TheFirstRegistrationBringsAFileEvenWithoutBytes) {
  CoreHarness h;
  const LeaseId lease = h.Attach(10 * kMiB);
  h.hold = true;
  h.Register(lease, MakeModules(2));
  EXPECT_EQ(h.held.size(), 1u);
  h.Answer();
  EXPECT_TRUE(h.last_reply().error.ok());
  h.Register(lease, MakeModules(3));
  EXPECT_TRUE(h.held.empty());
}

TEST(Core, DrainsOnce) {
  CoreHarness h;
  const LeaseId lease = h.Attach(10 * kMiB);
  h.Handle(TrainOpened{1, CoreHarness::Token(lease)});
  h.Handle(DrainRequested{"maintenance"});
  h.Handle(DrainRequested{"again"});
  ASSERT_FALSE(h.sent.empty());
  EXPECT_EQ(h.sent[0].response.drain().reason(), "maintenance");
  EXPECT_EQ(h.CountEvents("drain"), 1);
  h.Attach(kMiB);
  EXPECT_EQ(h.last_reply().error.code, Code::kPrecondition);
  EXPECT_EQ(h.Node().sessions(), 1u);
}

TEST(Core, CountsOrphansUntilTheyEnd) {
  CoreHarness h(CoreHarness::Defaults(), {{"s1", "job", 55, 9, 70 * kMiB, 10 * kMiB}, {"s2", "job", 56, 9, 70 * kMiB, 0}});
  v1::GetNodeResponse node = h.Node();
  EXPECT_EQ(node.orphaned_bytes(), 100 * kMiB);  // more than the capacity is not counted
  EXPECT_EQ(node.orphans_size(), 2);
  h.Handle(OrphanEnded{"s1"});
  h.Handle(OrphanEnded{"s1"});
  EXPECT_EQ(h.Node().free_bytes(), 70 * kMiB);
  h.Attach(70 * kMiB);
  // A new session never has an orphan's name.
  EXPECT_NE(h.last<v1::AttachResponse>().session(), "s2");
  EXPECT_EQ(h.journal.size(), 2u);
}

TEST(Core, APrivateDaemonQuitsWithItsLastSessionOrWithoutAFirst) {
  CoreOptions options = CoreHarness::Defaults();
  options.private_daemon = true;
  CoreHarness alone(options);
  alone.Handle(Tick{});
  EXPECT_TRUE(alone.quits.empty());
  alone.now.monotonic_seconds += 31;
  alone.Handle(Tick{});
  alone.Handle(Tick{});
  EXPECT_EQ(alone.quits.size(), 1u);
  CoreHarness used(options);
  const LeaseId a = used.Attach(kMiB);
  const LeaseId b = used.Attach(kMiB);
  used.now.monotonic_seconds += 31;
  used.Handle(Tick{});
  used.Handle(LeaseClosed{a, "socket closed"});
  EXPECT_TRUE(used.quits.empty());
  used.Handle(LeaseClosed{b, "socket closed"});
  EXPECT_EQ(used.quits.size(), 1u);
}

// Any order of arrivals, ends, failures and answers keeps every byte accounted for; the harness checks after each event.
TEST(Core, KeepsCountUnderRandomEvents) {
  for (uint64_t seed = 1; seed <= 30; ++seed) {
    std::mt19937_64 random(seed);
    CoreHarness h(CoreHarness::Defaults(), {{"s1", "job", 55, 9, 5 * kMiB, kMiB}});
    std::vector<LeaseId> leases;
    StreamId stream = 0;
    for (int step = 0; step < 400; ++step) {
      h.hold = random() % 3 != 0;
      const LeaseId lease = leases.empty() ? 0 : leases[random() % leases.size()];
      switch (random() % 10) {
        case 0:
        case 1:
        case 2: leases.push_back(h.Attach((random() % 60) * kMiB, random() % 2 ? v1::MODE_EXACT : v1::MODE_SAMPLED)); break;
        case 3: h.Handle(LeaseClosed{lease, "process ended"}); break;
        case 4: h.Handle(DetachCall{h.NewCall(), CoreHarness::Token(lease)}); break;
        case 5: h.Register(lease, MakeModules(4, kMiB, random() % (400 * kMiB))); break;
        case 6: {
          h.Handle(TrainOpened{++stream, CoreHarness::Token(lease)});
          TrainMessage message{stream, {}};
          *message.request.mutable_report()->mutable_trace() = MakeTrace(4);
          h.Handle(message);
          break;
        }
        case 7: {
          v1::SetBudgetRequest request;
          request.set_session("s" + std::to_string(1 + random() % 40));
          request.set_budget_bytes((random() % 60) * kMiB);
          h.Handle(AdminCall{h.NewCall(), request});
          break;
        }
        case 8: h.Answer(random() % 4 == 0 ? Error{Code::kInternal, "injected"} : Error{}); break;
        case 9: h.Handle(random() % 50 == 0 ? Event(OrphanEnded{"s1"}) : Event(TrainClosed{stream})); break;
      }
    }
    h.hold = false;
    for (int i = 0; i < 10; ++i) h.Answer();
    for (const LeaseId lease : leases) h.Handle(LeaseClosed{lease, "process ended"});
    h.Handle(OrphanEnded{"s1"});
    EXPECT_EQ(h.Node().free_bytes(), 100 * kMiB) << seed;
    EXPECT_EQ(h.Node().disk_reserved_bytes(), 0u) << seed;
    EXPECT_TRUE(h.journal.empty()) << seed;
    EXPECT_TRUE(h.errors.empty()) << seed << h.errors.front();
    EXPECT_EQ(h.replies.size(), h.next_call()) << "every call is answered exactly once; seed " << seed;
  }
}

}  // namespace
}  // namespace misa::server
