#include "client/cli/simulate.h"

#include <cmath>
#include <cstdio>
#include <limits>
#include <sstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "runtime/trace/trace_file.h"

namespace misa::cli {
namespace {

using testing::HasSubstr;

struct Ran {
  ExitCode code;
  std::string out;
  std::string error;
};

Ran Call(const SimulateOptions& options, bool json) {
  std::ostringstream out, error;
  const ExitCode code = Simulate(options, Output{out, error, json, false});
  return {code, out.str(), error.str()};
}

nlohmann::json Json(const std::string& trace, const std::string& policy) {
  SimulateOptions options;
  options.trace = trace;
  options.policy = policy;
  const Ran ran = Call(options, true);
  EXPECT_EQ(ran.code, kExitDone) << ran.error;
  return nlohmann::json::parse(ran.out);
}

TEST(Simulate, KnownValuesAsJson) {
  EXPECT_EQ(Json("three-pass", "lru")["misses_per_period"], 44);
  EXPECT_EQ(Json("three-pass", "belady")["misses_per_period"], 6);
  EXPECT_EQ(Json("zigzag", "lru")["loaded_bytes_per_period"], 4'000'000);
  EXPECT_EQ(Json("forward-only", "lru")["misses_per_period"], 40);
  const nlohmann::json planned = Json("three-pass", "planner");
  EXPECT_EQ(planned["misses_per_period"], 6);
  EXPECT_EQ(planned["bound_bytes_per_period"], 6'000'000);
  EXPECT_GT(planned["plan_seconds"], 0);
  EXPECT_EQ(planned["policy"], "planner");
}

TEST(Simulate, AllPoliciesInOneTable) {
  SimulateOptions options;
  options.units = 8;
  options.capacity = 6;
  const Ran ran = Call(options, false);
  EXPECT_EQ(ran.code, kExitDone);
  for (const char* policy : {"lru", "lru-threshold", "belady", "planner", "optimum"}) {
    EXPECT_THAT(ran.out, HasSubstr(policy));
  }
  const nlohmann::json json = nlohmann::json::parse(Call(options, true).out);
  EXPECT_EQ(json["rows"].size(), 5u);
  // One of them does not do so many units: the others' figures stay, and its sentence.
  options.units = 40;
  EXPECT_THAT(Call(options, false).out, HasSubstr("optimum: The exact optimum"));
}

TEST(Simulate, ARecordedTraceInItsSessionsRoom) {
  trace::TraceFile file;
  file.budget_bytes = 400;
  file.reserve_bytes = 20;
  file.link = {1, 1, 1, 1};
  for (uint32_t i = 0; i < 40; ++i)
    file.facets.push_back({"layer" + std::to_string(i), trace::FacetKind::kWeights, 10});
  trace::Section section{trace::TraceMode::kTrain, {}};
  for (uint32_t i = 0; i < 120; ++i) {
    const uint32_t layer = i < 40 || i >= 80 ? i % 40 : 79 - i;
    section.trace.entries.push_back({{{layer, policy::kRead}}, 0.5, 0});
  }
  file.sections.push_back(section);
  const std::string path = testing::TempDir() + "/simulate_test.misatrace";
  const policy::Result<std::string> bytes = trace::Encode(file);
  ASSERT_EQ(bytes.error, "");
  ASSERT_EQ(trace::WriteBytes(path, bytes.value), "");
  SimulateOptions options;
  options.trace = path;
  options.policy = "belady";
  const Ran ran = Call(options, true);
  EXPECT_EQ(ran.code, kExitDone) << ran.error;
  EXPECT_EQ(nlohmann::json::parse(ran.out)["misses_per_period"], 6);
  options.budget = "400";
  EXPECT_EQ(nlohmann::json::parse(Call(options, true).out)["misses_per_period"], 0);
  options.mode = "eval";
  EXPECT_THAT(Call(options, true).error, HasSubstr("no period of mode eval"));
  options.mode = "test";
  EXPECT_THAT(Call(options, true).error, HasSubstr("there are train, eval and accumulate"));
  options.mode = "train";
  options.capacity = 38;
  EXPECT_THAT(Call(options, true).error, HasSubstr("--budget"));
  options.capacity.reset();
  options.budget = "much";
  EXPECT_EQ(Call(options, true).code, kExitRefused);
  // A damaged file is a sentence.
  std::string damaged = bytes.value;
  damaged[damaged.size() / 2] ^= 1;
  ASSERT_EQ(trace::WriteBytes(path, damaged), "");
  options.budget.clear();
  EXPECT_EQ(Call(options, true).code, kExitRefused);
  std::remove(path.c_str());
}

TEST(Simulate, RefusesInSentences) {
  const auto refusal = [](const SimulateOptions& options) {
    const Ran ran = Call(options, true);
    EXPECT_EQ(ran.code, kExitRefused);
    EXPECT_EQ(ran.out, "");
    return ran.error;
  };
  SimulateOptions options;
  options.trace = "spiral";
  EXPECT_THAT(refusal(options), HasSubstr("no kind of trace \"spiral\""));
  options = {};
  options.policy = "fifo";
  EXPECT_THAT(refusal(options), HasSubstr("no policy \"fifo\""));
  for (const double capacity : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    options = {};
    options.capacity = capacity;
    EXPECT_THAT(refusal(options), HasSubstr("capacity must be"));
  }
  options = {};
  options.capacity = 0.5;
  EXPECT_THAT(refusal(options), HasSubstr("smallest budget that works"));
  options = {};
  options.units = 0;
  EXPECT_THAT(refusal(options), HasSubstr("units"));
  options = {};
  options.unit_bytes = 0;
  EXPECT_THAT(refusal(options), HasSubstr("bytes"));
  options = {};
  options.periods = 0;
  options.policy = "lru";
  EXPECT_THAT(refusal(options), HasSubstr("at least 1 period"));
  options = {};
  options.policy = "optimum";
  EXPECT_THAT(refusal(options), HasSubstr("up to 32 facets"));
}

}  // namespace
}  // namespace misa::cli
