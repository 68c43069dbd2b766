#include "client/core/meter.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "client/core/timeline.h"

namespace misa {
namespace {

TEST(DeviceMeter, CountsNothingPastTheBudget) {
  DeviceMeter meter;
  meter.SetBudget(100);
  EXPECT_TRUE(meter.TryAddPool(60));
  EXPECT_TRUE(meter.TryAddOther(40));
  EXPECT_FALSE(meter.TryAddOther(1));
  EXPECT_FALSE(meter.TryAddPool(1));
  EXPECT_EQ(meter.total_bytes(), 100u);
  EXPECT_EQ(meter.pool_bytes(), 60u);
  EXPECT_EQ(meter.other_bytes(), 40u);
  EXPECT_EQ(meter.peak_bytes(), 100u);
  meter.SubtractOther(40);
  meter.SubtractPool(10);
  EXPECT_EQ(meter.total_bytes(), 50u);
  EXPECT_EQ(meter.peak_bytes(), 100u);
  meter.ResetPeak();
  EXPECT_EQ(meter.peak_bytes(), 50u);
}

TEST(DeviceMeter, BytesThatExistAreCountedWhateverTheBudget) {
  DeviceMeter meter;
  meter.SetBudget(10);
  meter.AddOther(25);
  EXPECT_EQ(meter.total_bytes(), 25u);
  EXPECT_EQ(meter.peak_bytes(), 25u);
  EXPECT_FALSE(meter.TryAddOther(0));
}

TEST(DeviceMeter, TheWindowsPeakStartsAtWhatIsThere) {
  DeviceMeter meter;
  ASSERT_TRUE(meter.TryAddOther(30));
  meter.SubtractOther(20);
  EXPECT_EQ(meter.TakeOtherWindowPeak(), 30u);
  EXPECT_EQ(meter.TakeOtherWindowPeak(), 10u);
}

TEST(DeviceMeter, ThreadsNeverPassTheBudgetTogether) {
  DeviceMeter meter;
  meter.SetBudget(1000);
  const auto work = [&] {
    for (int i = 0; i < 20000; ++i) {
      if (meter.TryAddOther(400)) meter.SubtractOther(400);
      if (meter.TryAddPool(300)) meter.SubtractPool(300);
    }
  };
  std::thread a(work), b(work), c(work);
  a.join();
  b.join();
  c.join();
  EXPECT_EQ(meter.total_bytes(), 0u);
  EXPECT_EQ(meter.other_bytes(), 0u);
  EXPECT_EQ(meter.pool_bytes(), 0u);
  EXPECT_LE(meter.peak_bytes(), 1000u);
}

TEST(DeviceMeter, WhatMallocHoldsIsInNoSumAndInTheWayAllTheSame) {
  DeviceMeter meter;
  meter.SetBudget(1000);
  ASSERT_TRUE(meter.TryAddOther(600));
  meter.SetIdle(300);
  EXPECT_EQ(meter.total_bytes(), 600u);
  EXPECT_TRUE(meter.TryAddPool(100));
  EXPECT_FALSE(meter.TryAddOther(1));  // nobody can have it given back
  static DeviceMeter* reclaimed = &meter;
  static uint64_t asked = 0;
  meter.SetReclaimer([](uint64_t bytes) {
    asked = bytes;
    reclaimed->SetIdle(0);
  });
  EXPECT_TRUE(meter.TryAddOther(250));
  EXPECT_EQ(asked, 250u);
  EXPECT_EQ(meter.total_bytes(), 950u);
  EXPECT_EQ(meter.peak_bytes(), 950u);
  EXPECT_FALSE(meter.TryAddOther(51));
}

TEST(Timeline, SamplesWhatIsThereAndStopsAtOnce) {
  DeviceMeter meter;
  ASSERT_TRUE(meter.TryAddOther(500));
  Timeline timeline(&meter);
  timeline.Start(0.001);
  for (int i = 0; i < 5000 && timeline.samples().size() < 3; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  timeline.Stop();
  const auto samples = timeline.samples();
  ASSERT_GE(samples.size(), 3u);
  for (size_t i = 0; i < samples.size(); ++i) {
    EXPECT_EQ(samples[i].second, 500u);
    if (i > 0) {
      EXPECT_GT(samples[i].first, samples[i - 1].first);
    }
  }
  EXPECT_EQ(timeline.stddev_bytes(), 0);
  timeline.Start(1000);  // a long interval does not hold the stop up
  timeline.Stop();
}

}  // namespace
}  // namespace misa
