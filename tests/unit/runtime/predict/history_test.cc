#include "runtime/predict/history.h"

#include <gmock/gmock.h>

namespace misa::predict {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(History, KeepsTheNewestInOrder) {
  History history(3);
  EXPECT_THAT(history.symbols(), IsEmpty());
  history.Add(1);
  EXPECT_THAT(history.symbols(), ElementsAre(1));
  for (Symbol symbol = 2; symbol <= 100; ++symbol) {
    history.Add(symbol);
    ASSERT_EQ(history.FromEnd(0), symbol);
    ASSERT_EQ(history.FromEnd(1), symbol - 1);
    ASSERT_EQ(history.size(), symbol < 3 ? symbol : 3);
  }
  EXPECT_THAT(history.symbols(), ElementsAre(98, 99, 100));
}

TEST(History, TakesNoMoreMemoryHoweverMuchIsAdded) {
  History history(5);
  const size_t before = history.memory_bytes();
  for (Symbol symbol = 0; symbol < 1000; ++symbol) history.Add(symbol);
  EXPECT_EQ(history.memory_bytes(), before);
}

}  // namespace
}  // namespace misa::predict
