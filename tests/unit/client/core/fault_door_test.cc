// Raw pointers into facets: whatever moves meanwhile, they show the content, and what they write stays.
#include "client/core/fault_door.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "tests/unit/client/core/executor_rig.h"

namespace misa::testing {
namespace {

constexpr uint64_t kChunk = 4096;

class Server final : public FaultServer {
 public:
  explicit Server(Rig* rig) : rig_(rig) { SetFaultServer(this); }
  ~Server() override { SetFaultServer(nullptr); }
  std::string Serve(Facet& facet) override {
    ++served;
    if (before) before(facet);
    return rig_->executor->Reach(&facet);
  }

  std::atomic<int> served{0};
  std::function<void(Facet&)> before;

 private:
  Rig* const rig_;
};

volatile uint64_t* Words(Rig& rig, uint32_t id) { return reinterpret_cast<volatile uint64_t*>(rig.facet(id).address); }

TEST(FaultDoor, AReadOfWhatIsAwayWaitsUntilItIsThere) {
  Rig rig;
  Server server(&rig);
  const uint32_t id = rig.Add(3);
  ASSERT_EQ(rig.Create(id, 7), "");
  rig.SendAway();
  ASSERT_EQ(rig.state(id), FacetState::kAway);
  ASSERT_FALSE(rig.Readable(id));
  EXPECT_TRUE(rig.Holds(id, 7));
  EXPECT_EQ(server.served.load(), 1);
  EXPECT_EQ(rig.executor->totals().loads_demand, 1u);
  rig.SendAway();
  EXPECT_EQ(rig.executor->totals().unloads, 1u);  // nothing was written, so nothing is copied a second time
}

TEST(FaultDoor, AWriteToWhatIsCleanIsNotLost) {
  Rig rig;
  Server server(&rig);
  const uint32_t id = rig.Add(2);
  ASSERT_EQ(rig.Create(id, 7), "");
  rig.SendAway();
  ASSERT_EQ(rig.Check(id, 7), "");
  ASSERT_FALSE(rig.facet(id).dirty.load());
  Words(rig, id)[600] = 42;
  EXPECT_TRUE(rig.facet(id).dirty.load());
  rig.SendAway();
  EXPECT_EQ(Words(rig, id)[600], 42u);
  // Straight to what is away, too.
  rig.SendAway();
  Words(rig, id)[5] = 43;
  rig.SendAway();
  EXPECT_EQ(Words(rig, id)[5], 43u);
  EXPECT_EQ(Words(rig, id)[600], 42u);
}

TEST(FaultDoor, AWriteWhileTheCopyIsUnderWayIsNotLost) {
  for (bool known : {false, true}) {
    Rig rig;
    Server server(&rig);
    const uint32_t id = rig.Add(2);
    ASSERT_EQ(rig.Create(id, 7), "");
    if (known) rig.executor->MarkRaw(&rig.facet(id));
    rig.link->Hold(kUnload);
    rig.executor->UnloadAll();
    ASSERT_TRUE(rig.link->WaitHeld(kUnload, 1));
    Words(rig, id)[3] = 42;
    rig.link->Release(kUnload);
    ASSERT_TRUE(rig.executor->Drain());
    rig.SendAway();
    ASSERT_EQ(rig.state(id), FacetState::kAway);
    EXPECT_EQ(Words(rig, id)[3], 42u);
    EXPECT_EQ(rig.executor->totals().unloads, 2u);
  }
}

TEST(FaultDoor, ALoadShowsNothingBeforeItIsComplete) {
  Rig rig;
  Server server(&rig);
  const uint32_t id = rig.Add(4);
  ASSERT_EQ(rig.Create(id, 7), "");
  rig.SendAway();
  rig.link->Hold(kLoad);
  std::thread reader([&] { EXPECT_TRUE(rig.Holds(id, 7)); });
  ASSERT_TRUE(rig.link->WaitHeld(kLoad, 1));
  EXPECT_FALSE(rig.Readable(id));
  rig.link->Release(kLoad);
  reader.join();
}

TEST(FaultDoor, WhatIsVeiledIsNotSeenBeforeTheServerWasAsked) {
  for (bool away : {false, true}) {
    Rig rig;
    Server server(&rig);
    const uint32_t id = rig.Add(2);
    ASSERT_EQ(rig.Create(id, 7), "");
    rig.executor->Veil(&rig.facet(id), true);
    if (away) rig.SendAway();  // the copy goes on behind the veil
    EXPECT_FALSE(rig.Readable(id));
    server.before = [&](Facet& facet) {
      if (!facet.veiled.load()) return;
      // As a step that is due would do it.
      rig.executor->Veil(&facet, false);
      ASSERT_EQ(rig.Write(id, 8), "");
    };
    EXPECT_TRUE(rig.Holds(id, 8));
    EXPECT_GE(server.served.load(), 1);
    rig.SendAway();
    EXPECT_EQ(rig.Check(id, 8), "");
  }
}

TEST(FaultDoor, APrefetchUnderAVeilIsNotSeen) {
  Rig rig;
  Server server(&rig);
  const uint32_t id = rig.Add(2);
  ASSERT_EQ(rig.Create(id, 7), "");
  rig.SendAway();
  rig.executor->Veil(&rig.facet(id), true);
  ASSERT_EQ(rig.executor->Reach(&rig.facet(id)), "");  // allowed to who asks…
  rig.SendAway();
  rig.executor->Veil(&rig.facet(id), true);
  rig.link->Hold(kLoad);
  std::thread user([&] { EXPECT_EQ(rig.Check(id, 7), ""); });
  ASSERT_TRUE(rig.link->WaitHeld(kLoad, 1));
  rig.link->Release(kLoad);
  user.join();
  rig.executor->Veil(&rig.facet(id), true);
  EXPECT_FALSE(rig.Readable(id));  // …and hidden again where the next step is due
}

TEST(FaultDoor, TwoFacetsInTurnWithRoomForOne) {
  Rig rig({.budget_bytes = 3 * kChunk});
  Server server(&rig);
  const uint32_t a = rig.Add(2), b = rig.Add(2);
  ASSERT_EQ(rig.Create(a, 1), "");
  ASSERT_EQ(rig.Create(b, 2), "");
  uint64_t sum = 0;
  for (int i = 0; i < 20; ++i) sum += Words(rig, a)[i] + Words(rig, b)[i];
  EXPECT_GT(sum, 0u);
  EXPECT_TRUE(rig.Holds(a, 1));
  EXPECT_TRUE(rig.Holds(b, 2));
  EXPECT_LE(rig.meter.peak_bytes(), 3 * kChunk);
}

TEST(FaultDoor, OnASmallAlternateStackWithAFaultWithinAFault) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer follows no thread from one stack to another";
#endif
  std::thread([] {
    std::vector<char> memory(16 << 10);
    stack_t stack{};
    stack.ss_sp = memory.data();
    stack.ss_size = memory.size();
    ASSERT_EQ(sigaltstack(&stack, nullptr), 0);
    Rig rig;
    Server server(&rig);
    const uint32_t a = rig.Add(2), b = rig.Add(2);
    ASSERT_EQ(rig.Create(a, 1), "");
    ASSERT_EQ(rig.Create(b, 2), "");
    server.before = [&](Facet& facet) {
      char deep[64 << 10];  // more than the alternate stack has
      std::memset(deep, 1, sizeof(deep));
      EXPECT_EQ(std::memchr(deep, 0, sizeof(deep)), nullptr);
      if (facet.id == a) {
        EXPECT_TRUE(rig.Holds(b, 2));
      }
    };
    for (int i = 0; i < 3; ++i) {
      rig.SendAway();
      EXPECT_TRUE(rig.Holds(a, 1));
    }
    EXPECT_EQ(server.served.load(), 6);
    stack_t after{};
    ASSERT_EQ(sigaltstack(nullptr, &after), 0);
    EXPECT_EQ(after.ss_sp, stack.ss_sp);
    EXPECT_EQ(after.ss_flags, 0);
    stack.ss_flags = SS_DISABLE;
    sigaltstack(&stack, nullptr);
  }).join();
}

// Each thread counts in a facet of its own by pointer, while uses, unloads and a small budget push everything about.
TEST(FaultDoor, ThreadsCountByPointerWhileEverythingMoves) {
  constexpr uint32_t kThreads = 3;
  Rig rig({.budget_bytes = 9 * kChunk, .seed = 5});
  Server server(&rig);
  rig.link->Delay(2);
  for (uint32_t i = 0; i < kThreads + 3; ++i) ASSERT_EQ(rig.Create(rig.Add(2), i), "");
  for (uint32_t i = 0; i < kThreads; ++i) {
    for (uint64_t w = 0; w < 1024; ++w) Words(rig, i)[w] = 0;
  }
  std::vector<std::thread> threads;
  std::atomic<bool> stop{false};
  std::vector<uint64_t> counted(kThreads, 0);
  for (uint32_t i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937_64 random(i);
      for (; !stop.load(); ++counted[i]) {
        volatile uint64_t& word = Words(rig, i)[random() % 1024];
        word = word + 1;
      }
    });
  }
  for (int turn = 0; turn < 300; ++turn) {
    EXPECT_EQ(rig.Check(kThreads + static_cast<uint32_t>(turn) % 3, kThreads + static_cast<uint32_t>(turn) % 3), "");
    if (turn % 3 == 0) rig.executor->UnloadAll();
    std::this_thread::sleep_for(std::chrono::microseconds(300));
  }
  stop.store(true);
  for (auto& thread : threads) thread.join();
  for (uint32_t i = 0; i < kThreads; ++i) {
    rig.SendAway();
    uint64_t sum = 0;
    for (uint64_t w = 0; w < 1024; ++w) sum += Words(rig, i)[w];
    EXPECT_EQ(sum, counted[i]) << i;
  }
  EXPECT_GT(server.served.load(), 20);
  EXPECT_LE(rig.meter.peak_bytes(), 9 * kChunk);
}

TEST(FaultDoor, PointersOutliveTheManagement) {
  char* address = nullptr;
  uint64_t bytes = 0;
  {
    Rig rig;
    Server server(&rig);
    const uint32_t id = rig.Add(3);
    ASSERT_EQ(rig.Create(id, 7), "");
    rig.SendAway();
    const policy::Use use{id, policy::kRead};
    ASSERT_EQ(rig.executor->Use(&use, 1, false), "");
    address = rig.facet(id).address;
    bytes = rig.facet(id).bytes;
    // The middle is nobody's.
    ASSERT_EQ(rig.executor->Surrender(&rig.facet(id), {{0, 4096}, {8192, 4096}}), "");
    rig.executor->EndUse(&use, 1);
    rig.owner.Forget(id);
    EXPECT_EQ(rig.state(id), FacetState::kEmpty);
  }
  auto* words = reinterpret_cast<volatile uint64_t*>(address);
  EXPECT_EQ(words[3], 7 * 0x9e3779b97f4a7c15ull + 3);
  EXPECT_EQ(words[513], 0u);
  EXPECT_EQ(words[1030], 7 * 0x9e3779b97f4a7c15ull + 1030);
  words[3] = 1;
  EXPECT_EQ(words[3], 1u);
  munmap(address, bytes);
}

// ------------------------------------------------------------------------------------------------ faults of others

void* volatile expected_address = nullptr;

void OthersHandler(int, siginfo_t* info, void*) { _exit(info->si_addr == expected_address ? 42 : 43); }
void PlainHandler(int) { _exit(44); }

class OthersFaults : public ::testing::Test {
 protected:
  OthersFaults() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }

  // Opens the door over a handler of before, and faults where nothing is managed.
  static void Fault(const struct sigaction* before, bool sent = false) {
    if (before != nullptr) sigaction(SIGSEGV, before, nullptr);
    Rig rig;
    Server server(&rig);
    const uint32_t id = rig.Add(1);
    rig.Create(id, 1);
    rig.SendAway();
    if (!rig.Holds(id, 1)) _exit(1);
    if (sent) {
      raise(SIGSEGV);
    } else {
      auto* nobody = static_cast<volatile char*>(mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
      expected_address = const_cast<char*>(nobody) + 17;
      nobody[17] = 1;
    }
    _exit(2);
  }
};

TEST_F(OthersFaults, GoToTheHandlerOfBefore) {
  struct sigaction before {};
  before.sa_sigaction = &OthersHandler;
  before.sa_flags = SA_SIGINFO;
  EXPECT_EXIT(Fault(&before), ::testing::ExitedWithCode(42), "");
  struct sigaction plain {};
  plain.sa_handler = &PlainHandler;
  EXPECT_EXIT(Fault(&plain), ::testing::ExitedWithCode(44), "");
}

TEST_F(OthersFaults, EndTheProcessWhereNobodyHandledThem) {
  struct sigaction standard {};
  standard.sa_handler = SIG_DFL;
  EXPECT_EXIT(Fault(&standard), ::testing::KilledBySignal(SIGSEGV), "");
  EXPECT_EXIT(Fault(&standard, /*sent=*/true), ::testing::KilledBySignal(SIGSEGV), "");
}

void Unservable() {
  Rig rig({.budget_bytes = 4 * kChunk});
  Server server(&rig);
  const uint32_t a = rig.Add(2), b = rig.Add(3);
  rig.Create(a, 1);
  rig.SendAway();
  rig.Create(b, 2);
  const policy::Use use{b, policy::kRead};
  if (!rig.executor->Use(&use, 1, true).empty()) _exit(1);
  rig.Holds(a, 1);
  _exit(2);
}

TEST_F(OthersFaults, WhatCannotBeHadEndsWithASentence) {
  EXPECT_EXIT(Unservable(), ::testing::KilledBySignal(SIGABRT), "raw pointer.*too small for facet0.*smallest budget");
}

TEST_F(OthersFaults, WithoutAServerTheyAreAsBefore) {
  EXPECT_EXIT(
      {
        signal(SIGSEGV, SIG_DFL);
        Rig rig;
        const uint32_t id = rig.Add(1);
        rig.Create(id, 1);
        { Server server(&rig); }
        rig.SendAway();
        rig.Holds(id, 1);
        _exit(2);
      },
      ::testing::KilledBySignal(SIGSEGV), "");
}

}  // namespace
}  // namespace misa::testing
