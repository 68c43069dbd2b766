#include "runtime/policy/tasks.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>

namespace misa::policy {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(CheckTask, SaysWhatIsWrong) {
  EXPECT_EQ(CheckTask("translate", 0.001), "");
  EXPECT_EQ(CheckTask(std::string(kMostTaskNameBytes, 'x'), kMostTaskWeight), "");
  EXPECT_THAT(CheckTask("", 1), HasSubstr("needs a name"));
  EXPECT_THAT(CheckTask(std::string(kMostTaskNameBytes + 1, 'x'), 1), HasSubstr("at most 64 bytes"));
  EXPECT_THAT(CheckTask("two\nlines", 1), HasSubstr("control characters"));
  for (const double weight : {0.0, -1.0, 1000.5, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THAT(CheckTask("a", weight), HasSubstr("The weight of task \"a\" must be a number above 0"));
  }
}

TEST(TaskTable, NumbersTasksInTheOrderInWhichTheyCome) {
  TaskTable table;
  uint32_t task = 9;
  EXPECT_EQ(table.Enter("", 7, &task), "");
  EXPECT_EQ(task, 0u);
  EXPECT_EQ(table.tasks()[0].weight, 1);
  EXPECT_EQ(table.Enter("a", 3, &task), "");
  EXPECT_EQ(task, 1u);
  EXPECT_EQ(table.Enter("b", 1, &task), "");
  EXPECT_EQ(task, 2u);
  EXPECT_EQ(table.Enter("a", 2, &task), "") << "known: another weight from now on";
  EXPECT_EQ(task, 1u);
  EXPECT_EQ(table.tasks()[1], (Task{"a", 2, 0}));
  EXPECT_EQ(table.size(), 3u);
}

TEST(TaskTable, RefusesOneTooManyAndWhatItDoesNotKnow) {
  TaskTable table;
  uint32_t task = 0;
  for (size_t i = 0; i < kMostTasks; ++i) ASSERT_EQ(table.Enter("t" + std::to_string(i), 1, &task), "");
  task = 7;
  EXPECT_THAT(table.Enter("late", 1, &task), HasSubstr("at most 16 tasks, and \"late\" is one too many"));
  EXPECT_THAT(table.Enter("t3", std::nan(""), &task), HasSubstr("weight"));
  EXPECT_EQ(task, 7u) << "nothing changed";
  EXPECT_EQ(table.tasks()[4].weight, 1);

  TaskTable closed;
  ASSERT_EQ(closed.Enter("translate", 1, &task), "");
  closed.Close();
  EXPECT_THAT(closed.Enter("tranlsate", 1, &task), HasSubstr("no task \"tranlsate\"; this training has \"translate\""));
  EXPECT_EQ(closed.Enter("translate", 2, &task), "");
  EXPECT_EQ(closed.Enter("", 1, &task), "") << "steps of no task there always are";
}

TEST(TaskTable, SharesAreOfTheTasksThatHaveMadeAStep) {
  TaskTable table;
  uint32_t a = 0, b = 0, idle = 0;
  table.Enter("a", 3, &a);
  table.Enter("b", 1, &b);
  table.Enter("idle", 100, &idle);
  EXPECT_THAT(table.Shares(), ElementsAre(0, 0, 0, 0));
  table.CountStep(a);
  EXPECT_THAT(table.Shares(), ElementsAre(0, 1, 0, 0));
  table.CountStep(b);
  table.CountStep(b);
  EXPECT_THAT(table.Shares(), ElementsAre(0, 0.75, 0.25, 0)) << "by weight, not by steps";
  table.CountStep(0);
  EXPECT_THAT(table.Shares(), ElementsAre(0.2, 0.6, 0.2, 0));
}

TEST(WeightedMean, IsExactForOneAndFiniteForAll) {
  for (const double value : {0.1, 1.0 / 3, 1e308, 5e-324}) EXPECT_EQ(WeightedMean({1}, {value}), value);
  EXPECT_DOUBLE_EQ(WeightedMean({0.75, 0.25}, {4, 8}), 5);
  const double most = std::numeric_limits<double>::max();
  EXPECT_LE(WeightedMean({0.1, 0.2, 0.7}, {most, most, most}), most);
  EXPECT_EQ(WeightedMean({0, 0}, {5, 6}), 0);
}

}  // namespace
}  // namespace misa::policy
