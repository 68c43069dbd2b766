// The link's time on a clock of our own: no thread, no wait.
#include "runtime/device/link_model.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <random>

namespace misa {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr auto kLoad = Transfer::Direction::kLoad;
constexpr auto kUnload = Transfer::Direction::kUnload;
constexpr double kNever = std::numeric_limits<double>::infinity();

LinkModel Make(double load, double unload, double factor, double latency = 0) {
  return LinkModel({{load, unload, factor * load, factor * unload}, latency});
}

double EndOf(const std::vector<LinkModel::Ended>& ended, uint64_t tag) {
  for (const LinkModel::Ended& e : ended) {
    if (e.tag == tag) return e.seconds;
  }
  return kNever;
}

TEST(LinkModel, ADirectionAloneHasItsRate) {
  LinkModel link = Make(100, 50, 0.5);
  link.Submit(kLoad, 1000, 1, 2.0);
  EXPECT_DOUBLE_EQ(link.NextEnd(), 12.0);
  EXPECT_THAT(link.TakeEnded(11.999), IsEmpty());
  EXPECT_FALSE(link.idle());
  const auto ended = link.TakeEnded(20);
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].tag, 1u);
  EXPECT_DOUBLE_EQ(ended[0].seconds, 12.0);
  EXPECT_TRUE(link.idle());
  EXPECT_EQ(link.NextEnd(), kNever);
  link.Submit(kUnload, 1000, 2, 30);
  EXPECT_DOUBLE_EQ(EndOf(link.TakeEnded(100), 2), 50.0);
}

TEST(LinkModel, BothAtOnceShareByTheFactorAndTheLongerOneIsFastAgain) {
  LinkModel link = Make(100, 100, 0.75);
  link.Submit(kLoad, 750, 1, 0);
  link.Submit(kUnload, 1500, 2, 0);
  const auto ended = link.TakeEnded(100);
  EXPECT_DOUBLE_EQ(EndOf(ended, 1), 10.0);           // at 75
  EXPECT_DOUBLE_EQ(EndOf(ended, 2), 10.0 + 7.5);     // 750 of it at 75, the rest at 100
}

TEST(LinkModel, AnUnloadThatBeginsInTheMiddleSlowsTheLoadFromThenOn) {
  LinkModel link = Make(100, 100, 0.5);
  link.Submit(kLoad, 1000, 1, 0);
  link.Submit(kUnload, 100, 2, 4);  // 600 of the load left; both at 50 for 2 s; 500 at 100
  EXPECT_DOUBLE_EQ(link.NextEnd(), 6.0);
  const auto ended = link.TakeEnded(100);
  EXPECT_DOUBLE_EQ(EndOf(ended, 2), 6.0);
  EXPECT_DOUBLE_EQ(EndOf(ended, 1), 11.0);
}

TEST(LinkModel, CopiesOfOneDirectionRunOneAfterTheOther) {
  LinkModel link = Make(100, 100, 1);
  for (uint64_t tag = 0; tag < 5; ++tag) link.Submit(kLoad, 100, tag, 0);
  const auto ended = link.TakeEnded(3.5);
  ASSERT_EQ(ended.size(), 3u);
  for (uint64_t tag = 0; tag < 3; ++tag) {
    EXPECT_EQ(ended[tag].tag, tag);
    EXPECT_DOUBLE_EQ(ended[tag].seconds, 1.0 + static_cast<double>(tag));
  }
}

TEST(LinkModel, ACopyWaitsItsLatencyAndTheOtherDirectionIsAloneMeanwhile) {
  LinkModel link = Make(100, 100, 0.5, 2.0);
  link.Submit(kLoad, 200, 1, 0);
  EXPECT_DOUBLE_EQ(link.NextEnd(), 4.0);
  link.Submit(kUnload, 200, 2, 3);  // idle until 5, when the load is over
  EXPECT_DOUBLE_EQ(EndOf(link.TakeEnded(4), 1), 4.0);
  EXPECT_DOUBLE_EQ(EndOf(link.TakeEnded(50), 2), 7.0);
}

// However late somebody looks, what was queued in time ends on time: a second of copies takes a second.
TEST(LinkModel, LatenessDoesNotAddUp) {
  std::mt19937_64 random(3);
  std::uniform_real_distribution<double> late(0, 0.4);
  LinkModel link = Make(1e6, 1e6, 1, 1e-3);
  double now = 0;
  uint64_t submitted = 0, ended = 0;
  double last = 0;
  constexpr uint64_t kCopies = 1000;
  while (ended < kCopies) {
    while (submitted < kCopies && submitted < ended + 2) link.Submit(kLoad, 500'000, submitted++, now);
    now = link.NextEnd() + late(random);
    for (const LinkModel::Ended& e : link.TakeEnded(now)) {
      EXPECT_EQ(e.tag, ended++);
      last = e.seconds;
    }
  }
  EXPECT_NEAR(last, kCopies * 0.501, 1e-6);
}

// Whatever is submitted when: bytes and times add up to the rates, in every interval.
TEST(LinkModel, RatesHoldUnderRandomWork) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    std::mt19937_64 random(seed);
    const double factor = 0.3 + 0.7 * static_cast<double>(random() % 1000) / 1000;
    LinkModel link = Make(1000, 700, factor, seed % 2 == 0 ? 0 : 0.01);
    double now = 0;
    double bytes[2] = {0, 0};
    std::vector<LinkModel::Ended> all;
    for (uint64_t i = 0; i < 200; ++i) {
      const size_t direction = random() % 2;
      const uint64_t size = 1 + random() % 5000;
      link.Submit(direction == 0 ? kLoad : kUnload, size, i, now);
      bytes[direction] += static_cast<double>(size);
      now += static_cast<double>(random() % 400) / 100;
      for (const auto& e : link.TakeEnded(now)) all.push_back(e);
    }
    for (const auto& e : link.TakeEnded(1e9)) all.push_back(e);
    ASSERT_EQ(all.size(), 200u);
    double before = 0;
    for (const auto& e : all) {
      EXPECT_GE(e.seconds, before);
      before = e.seconds;
    }
    // Never faster than each direction alone, never slower than all the time beside the other one.
    EXPECT_GE(before, std::max(bytes[0] / 1000, bytes[1] / 700) - 1e-6);
    EXPECT_LE(before, now + (bytes[0] / 1000 + bytes[1] / 700) / factor + 200 * 0.01 + 1e-6);
  }
}

TEST(LinkModel, RefusesWhatIsNoLink) {
  EXPECT_EQ((LinkModelOptions{{1, 1, 1, 1}, 0}.Check()), "");
  EXPECT_THAT((LinkModelOptions{{0, 1, 1, 1}, 0}.Check()), HasSubstr("above 0"));
  EXPECT_THAT((LinkModelOptions{{1, std::nan(""), 1, 1}, 0}.Check()), HasSubstr("above 0"));
  EXPECT_THAT((LinkModelOptions{{1, 1, 2, 1}, 0}.Check()), HasSubstr("faster"));
  EXPECT_THAT((LinkModelOptions{{1, 1, 1, 1}, -1}.Check()), HasSubstr("latency"));
}

}  // namespace
}  // namespace misa
