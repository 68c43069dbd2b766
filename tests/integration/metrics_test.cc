// /metrics of a real daemon.
#include <gmock/gmock.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include "tests/integration/misad_process.h"
#include "tests/integration/trainer.h"

namespace misa::test {
namespace {

using ::testing::HasSubstr;

TEST(Metrics, AreCompleteAndBounded) {
  TemporaryFolder folder;
  MisadProcess misad(folder);
  ASSERT_TRUE(misad.Start()) << misad.err();
  Trainer trainer(misad.runtime_dir());
  ASSERT_TRUE(trainer.Attach(1 << 20).ok());
  v1::RegisterModulesRequest modules;
  for (int i = 0; i < 300; ++i) modules.add_modules()->set_name("m" + std::to_string(i));
  ASSERT_TRUE(trainer.Register(modules).ok());
  const std::string text = misad.Scrape();
  for (const char* line :
       {"misa_build_info{version=", "misa_pool_bytes{tier=\"device\",state=\"leased\"} 1048576", "misa_sessions 1",
        "misa_facets{facet=\"weights\",residency=\"device\"} 0", "misa_loads_total{cause=\"demand\"} 0",
        "misa_step_seconds_bucket{le=\"1e-05\"} 0", "misa_events_total{kind=\"session_attached\"} 1", "misa_queue_events ",
        "misa_open_fds ", "misa_module_importance{session=\"0\",module=\""}) {
    EXPECT_THAT(text, HasSubstr(line));
  }
  EXPECT_EQ(text.find("pid="), std::string::npos);
  std::map<std::string, int> series;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    if (line.empty() || line[0] == '#') continue;
    ++series[line.substr(0, line.find_first_of("{ "))];
  }
  for (const auto& [name, count] : series) EXPECT_LT(count, 100) << name;

  if (std::system("command -v promtool >/dev/null 2>&1") != 0) GTEST_SKIP() << "promtool is not installed";
  std::ofstream(folder.path() + "/metrics") << text;
  EXPECT_EQ(std::system(("promtool check metrics < " + folder.path() + "/metrics").c_str()), 0);
}

}  // namespace
}  // namespace misa::test
