#include "client/cli/trace_convert.h"

#include <filesystem>
#include <sstream>

#include "client/cli/trace_commands.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace misa::cli {
namespace {

using nlohmann::json;
using testing::HasSubstr;
using trace::TraceFile;

TraceFile Example() {
  TraceFile file;
  file.label = "session s1";
  file.budget_bytes = uint64_t{1} << 30;
  file.reserve_bytes = 4096;
  file.link = {1e9, 2e9, 5e8, 6e8};
  file.facets = {{"blocks.0.ffn.up", trace::FacetKind::kWeights, 1 << 20},
                 {"blocks.0.ffn.up", trace::FacetKind::kGradients, 1 << 20},
                 {"blocks.0.ffn.up", trace::FacetKind::kOptimizer, 2 << 20}};
  file.sections = {{trace::TraceMode::kTrain,
                    {{{{{0, policy::kRead | policy::kWrite}, {1, policy::kRead | policy::kDiscard}}, 0.25, 100},
                      {{{1, policy::kCreate | policy::kWrite}}, 0.5, 1 << 22},
                      {{}, 1e-9, 0}}}},
                   {trace::TraceMode::kEval, {{{{{0, policy::kRead}}, 0.125, 7}}}}};
  return file;
}

TEST(TraceConvertTest, JsonComesBackAsItWas) {
  const json out = TraceToJson(Example());
  EXPECT_EQ(out["schema"], "misa.trace/1");
  EXPECT_EQ(out["sections"][0]["smallest_budget_bytes"], (1 << 20) + (1 << 22));
  EXPECT_EQ(out["sections"][0]["entries"][0]["uses"], json::parse(R"([[0, "rw"], [1, "rd"]])"));
  const auto read = TraceFromJson(json::parse(out.dump()));
  ASSERT_EQ(read.error, "");
  EXPECT_EQ(trace::Encode(read.value).value, trace::Encode(Example()).value);
}

TEST(TraceConvertTest, JsonThatIsNoTraceGivesASentence) {
  const auto error = [](auto change) {
    json in = TraceToJson(Example());
    change(in);
    return TraceFromJson(in).error;
  };
  EXPECT_THAT(error([](json& in) { in["schema"] = "misa.trace/2"; }), HasSubstr("its schema is not"));
  EXPECT_THAT(error([](json& in) { in.erase("facets"); }), HasSubstr("key 'facets' not found"));
  EXPECT_THAT(error([](json& in) { in["facets"][0]["bytes"] = -4; }), HasSubstr("\"bytes\" is not a whole number"));
  EXPECT_THAT(error([](json& in) { in["facets"][0]["bytes"] = 0; }), HasSubstr("size of 0 bytes"));
  EXPECT_THAT(error([](json& in) { in["facets"][0]["kind"] = "shape"; }), HasSubstr("no kind \"shape\""));
  EXPECT_THAT(error([](json& in) { in["sections"][0]["mode"] = "test"; }), HasSubstr("no mode \"test\""));
  EXPECT_THAT(error([](json& in) { in["sections"][0]["entries"][0]["uses"][0] = {9, "r"}; }),
              HasSubstr("a use is of facet 9, and there are 3"));
  EXPECT_THAT(error([](json& in) { in["sections"][0]["entries"][0]["uses"][0] = {0, "x"}; }), HasSubstr("letters"));
  EXPECT_THAT(error([](json& in) { in["sections"][0]["entries"][0]["uses"][0] = 5; }), HasSubstr("cannot be read"));
  EXPECT_THAT(error([](json& in) { in["sections"][0]["entries"][0]["compute_seconds"] = nullptr; }),
              HasSubstr("must be number"));
  EXPECT_THAT(error([](json& in) { in["sections"] = json::array(); }), HasSubstr("no section"));
}

TEST(TraceConvertTest, PerfettoHasASliceForEachPosition) {
  const json out = TraceToPerfetto(Example());
  double train_end = 0;
  size_t slices = 0;
  for (const json& event : out["traceEvents"]) {
    if (event["ph"] != "X") continue;
    ++slices;
    if (event["pid"] == 1) {
      EXPECT_EQ(event["ts"], train_end);
      train_end = event["ts"].get<double>() + event["dur"].get<double>();
    }
  }
  EXPECT_EQ(slices, 4u);
  EXPECT_NEAR(train_end, 0.75e6, 1);
  EXPECT_EQ(out["traceEvents"][2]["args"]["uses"]["blocks.0.ffn.up weights"], "rw");
}

TEST(TraceConvertTest, NamesThatAreNotUtf8AreStillJson) {
  TraceFile file = Example();
  file.label = "\xff\x1b[2J";
  file.facets[0].name = "caf\xe9";
  EXPECT_NO_THROW(TraceToJson(file).dump());
  EXPECT_NO_THROW(TraceToPerfetto(file).dump());
  EXPECT_EQ(TraceText(file, false).find('\x1b'), std::string::npos);
}

class TraceCommandsTest : public testing::Test {
 protected:
  void SetUp() override {
    char pattern[] = "/tmp/misactl-XXXXXX";
    folder_ = mkdtemp(pattern);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::string Path(const std::string& name) const { return folder_ + "/" + name; }

  std::string folder_;
  std::ostringstream out_, error_;
  Output output_{out_, error_};
};

TEST_F(TraceCommandsTest, ConvertsThereAndBack) {
  const std::string bytes = trace::Encode(Example()).value;
  ASSERT_EQ(trace::WriteBytes(Path("a"), bytes), "");
  EXPECT_EQ(TraceConvert(output_, Path("a"), "json", Path("b")), kExitDone);
  EXPECT_EQ(TraceConvert(output_, Path("b"), "binary", Path("c")), kExitDone);
  EXPECT_EQ(trace::ReadBytes(Path("c")).value, bytes);
  EXPECT_EQ(TraceConvert(output_, Path("a"), "perfetto", ""), kExitDone);
  EXPECT_TRUE(json::parse(out_.str()).contains("traceEvents"));
  EXPECT_EQ(error_.str(), "");
}

TEST_F(TraceCommandsTest, ShowsFilesForPeople) {
  ASSERT_EQ(trace::WriteBytes(Path("a"), trace::Encode(Example()).value), "");
  EXPECT_EQ(TraceShow(output_, Path("a")), kExitDone);
  for (const char* text : {"session s1: 3 facets, budget 1GiB", "train", "eval", "750 ms", "blocks.0.ffn.up"}) {
    EXPECT_THAT(out_.str(), HasSubstr(text));
  }
}

TEST_F(TraceCommandsTest, ADamagedFileIsASentence) {
  std::string bytes = trace::Encode(Example()).value;
  bytes[30] ^= 4;
  ASSERT_EQ(trace::WriteBytes(Path("a"), bytes), "");
  EXPECT_EQ(TraceShow(output_, Path("a")), kExitRefused);
  EXPECT_THAT(error_.str(), HasSubstr("its checksum is not that of its content"));
  ASSERT_EQ(trace::WriteBytes(Path("text"), "no trace"), "");
  EXPECT_EQ(TraceShow(output_, Path("text")), kExitRefused);
  EXPECT_THAT(error_.str(), HasSubstr("neither a trace file nor a trace in JSON"));
  EXPECT_EQ(TraceShow(output_, Path("missing")), kExitRefused);
  EXPECT_EQ(TraceConvert(output_, Path("a"), "json", Path("b")), kExitRefused);
  EXPECT_FALSE(std::filesystem::exists(Path("b")));
  EXPECT_EQ(out_.str(), "");
}

}  // namespace
}  // namespace misa::cli
