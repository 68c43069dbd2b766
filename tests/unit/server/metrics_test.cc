#include "server/observe/metrics.h"

#include <gmock/gmock.h>
#include <prometheus/text_serializer.h>

namespace misa::server {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Metrics, NameUnitsAndStates) {
  Figures figures;
  figures.device = {1, 2, 3, 4};
  figures.totals.step_seconds_counts[4] = 2;
  figures.totals.step_seconds_counts.back() = 1;
  figures.totals.events["drain"] = 5;
  for (uint32_t slot = 0; slot < 40; ++slot) figures.session_figures.push_back({slot, 0.5, slot, 1000 + slot, 2000, 1.5, 2});
  figures.modules.push_back({0, "a", 1.5});
  const std::string text = prometheus::TextSerializer().Serialize(MakeFamilies(figures, {"9.9", 7, 8, 9}));
  for (const char* line :
       {"misa_build_info{version=\"9.9\"} 1", "misa_pool_bytes{tier=\"device\",state=\"orphaned\"} 4",
        "misa_step_seconds_bucket{le=\"0.001\"} 2", "misa_step_seconds_bucket{le=\"+Inf\"} 3", "misa_step_seconds_count 3",
        "misa_events_total{kind=\"drain\"} 5", "misa_events_dropped_total 7", "misa_queue_events 8", "misa_open_fds 9",
        "misa_module_importance{session=\"0\",module=\"a\"} 1.5", "misa_plan_version{session=\"31\"} 31",
        "misa_session_budget_bytes{session=\"31\"} 1031", "misa_session_leased_bytes{session=\"0\"} 2000",
        "misa_session_weight{session=\"0\"} 1.5", "misa_session_tasks{session=\"31\"} 2"}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
  EXPECT_THAT(text, Not(HasSubstr("session=\"32\"")));
}

TEST(Metrics, AScrapeGetsTheLastFiguresWhenTheCoreIsBusy) {
  bool answers = true;
  MetricsCollector collector(
      [&](Figures* figures) {
        figures->sessions = 3;
        return answers;
      },
      [] { return ProcessFigures{}; });
  EXPECT_THAT(prometheus::TextSerializer().Serialize(collector.Collect()), HasSubstr("misa_sessions 3"));
  answers = false;
  EXPECT_THAT(prometheus::TextSerializer().Serialize(collector.Collect()), HasSubstr("misa_sessions 3"));
}

}  // namespace
}  // namespace misa::server
