#include "runtime/trace/trace_file.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <random>

namespace misa::trace {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

// Forward, backward and the deferred step over `modules` modules, and a forward for evaluation.
TraceFile Example(uint32_t modules = 12) {
  TraceFile file;
  file.label = "session s1, job demo";
  file.budget_bytes = 24ull << 30;
  file.reserve_bytes = 16 << 20;
  file.link = {1.1e9, 3.2e9, 0.8e9, 0.7e9};
  const FacetKind kinds[] = {FacetKind::kWeights, FacetKind::kGradients, FacetKind::kOptimizer};
  for (uint32_t m = 0; m < modules; ++m) {
    for (uint32_t k = 0; k < 3; ++k) {
      file.facets.push_back({"blocks." + std::to_string(m) + ".ffn.up", kinds[k], (k == 2 ? 2u : 1u) * 4096 * (m + 1)});
    }
  }
  Section train{TraceMode::kTrain, {}};
  Section eval{TraceMode::kEval, {}};
  for (uint32_t m = 0; m < modules; ++m) {
    train.trace.entries.push_back({{{3 * m, policy::kRead | policy::kWrite},
                                    {3 * m + 1, policy::kRead | policy::kDiscard},
                                    {3 * m + 2, policy::kRead | policy::kWrite}},
                                   1e-3 * (m + 1),
                                   1000ull * m});
    eval.trace.entries.push_back({{{3 * m, policy::kRead}}, 123456789e-9, 1ull << 40});
  }
  for (uint32_t m = modules; m-- > 0;) {
    train.trace.entries.push_back({{{3 * m, policy::kRead}}, 0.25, 1000ull * m});
    train.trace.entries.push_back({{{3 * m + 1, policy::kCreate | policy::kWrite}}, 0, 0});
    train.trace.entries.push_back({{}, 5e-9, std::numeric_limits<uint64_t>::max()});
  }
  file.sections = {train, eval};
  return file;
}

std::string Encoded(const TraceFile& file) {
  const policy::Result<std::string> encoded = Encode(file);
  EXPECT_EQ(encoded.error, "");
  return encoded.value;
}

// A file whose checksum is right, whatever its body says.
std::string WithBody(const std::string& body) {
  std::string bytes = Encoded(Example()).substr(0, 12);
  uint64_t sum = 0xcbf29ce484222325ull;
  for (const char c : bytes.substr(8, 4) + body) {
    sum = (sum ^ static_cast<uint8_t>(c)) * 0x100000001b3ull;
  }
  for (int i = 0; i < 8; ++i) {
    bytes.push_back(static_cast<char>(sum >> (8 * i)));
  }
  return bytes + body;
}

std::string Varint(uint64_t value) {
  std::string bytes;
  for (; value >= 0x80; value >>= 7) {
    bytes.push_back(static_cast<char>(value | 0x80));
  }
  bytes.push_back(static_cast<char>(value));
  return bytes;
}

// Label, budget, reserve and rates of an empty file.
std::string Head() { return std::string(7, '\0'); }

void ExpectSame(const TraceFile& a, const TraceFile& b) {
  EXPECT_EQ(a.label, b.label);
  EXPECT_EQ(a.budget_bytes, b.budget_bytes);
  EXPECT_EQ(a.reserve_bytes, b.reserve_bytes);
  EXPECT_EQ(a.link.duplex_unload, b.link.duplex_unload);
  EXPECT_EQ(a.facets, b.facets);
  ASSERT_EQ(a.sections.size(), b.sections.size());
  for (size_t s = 0; s < a.sections.size(); ++s) {
    EXPECT_EQ(a.sections[s].mode, b.sections[s].mode);
    const auto& left = a.sections[s].trace.entries;
    const auto& right = b.sections[s].trace.entries;
    ASSERT_EQ(left.size(), right.size());
    EXPECT_EQ(policy::Digest(a.sections[s].trace), policy::Digest(b.sections[s].trace));
    for (size_t i = 0; i < left.size(); ++i) {
      EXPECT_EQ(left[i].uses, right[i].uses);
      EXPECT_NEAR(left[i].compute_seconds, right[i].compute_seconds, 5e-10);
      EXPECT_EQ(left[i].other_bytes, right[i].other_bytes);
    }
  }
}

TEST(TraceFile, ComesBackAsItWas) {
  const std::string bytes = Encoded(Example());
  EXPECT_TRUE(LooksLikeTraceFile(bytes));
  const policy::Result<TraceFile> read = Decode(bytes);
  ASSERT_EQ(read.error, "");
  ExpectSame(read.value, Example());
  EXPECT_EQ(read.value.Find(TraceMode::kEval)->trace.entries.size(), 12u);
  EXPECT_EQ(read.value.Find(TraceMode::kAccumulate), nullptr);
  // What was rounded to nanoseconds once stays.
  EXPECT_EQ(Encoded(read.value), bytes);
}

TEST(TraceFile, IsSmall) {
  const TraceFile file = Example(1000);
  size_t uses = 0;
  for (const Section& section : file.sections) {
    for (const policy::TraceEntry& entry : section.trace.entries) uses += entry.uses.size();
  }
  // 7,000 uses in 5,000 entries, 3,000 named facets.
  EXPECT_LT(Encoded(file).size(), 14 * uses);
}

TEST(TraceFile, AnyOneChangedByteIsFound) {
  const std::string bytes = Encoded(Example(4));
  for (size_t at = 0; at < bytes.size(); ++at) {
    for (const int flip : {0x01, 0x80, 0xff}) {
      std::string damaged = bytes;
      damaged[at] = static_cast<char>(damaged[at] ^ flip);
      const policy::Result<TraceFile> read = Decode(damaged);
      ASSERT_THAT(read.error, StartsWith("The trace file cannot be read: ")) << "byte " << at;
      ASSERT_TRUE(read.value.facets.empty() && read.value.sections.empty());
    }
  }
}

TEST(TraceFile, AnyTruncationIsFound) {
  const std::string bytes = Encoded(Example(4));
  for (size_t length = 0; length < bytes.size(); ++length) {
    ASSERT_NE(Decode(std::string_view(bytes).substr(0, length)).error, "") << length;
  }
  EXPECT_NE(Decode(bytes + '\0').error, "");
}

// What a checksum does not keep out: bodies made of damage. Whatever is read must be whole, or a sentence.
TEST(TraceFile, DamagedBodiesGiveASentenceOrATrace) {
  const std::string body = Encoded(Example(6)).substr(20);
  std::mt19937_64 random(20240611);
  size_t refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string damaged = body;
    const uint64_t flips = 1 + random() % 8;
    for (uint64_t f = 0; f < flips; ++f) {
      switch (random() % 4) {
        case 0: damaged[random() % damaged.size()] ^= static_cast<char>(1 << random() % 8); break;
        case 1: damaged[random() % damaged.size()] = static_cast<char>(random()); break;
        case 2: damaged.insert(random() % damaged.size(), 1 + random() % 9, static_cast<char>(0xff)); break;
        default: damaged.erase(random() % damaged.size(), 1 + random() % 4); break;
      }
      if (damaged.empty()) damaged = "x";
    }
    const policy::Result<TraceFile> read = Decode(WithBody(damaged));
    if (!read.ok()) {
      ++refused;
      ASSERT_EQ(read.error.back(), '.');
      continue;
    }
    ASSERT_EQ(Check(read.value), "");
    ASSERT_EQ(Encode(read.value).error, "");
  }
  EXPECT_GT(refused, 10000u);
}

TEST(TraceFile, AbsurdCountsAreRefusedBeforeMemoryIsTaken) {
  const std::string many = Varint(uint64_t{1} << 62);
  EXPECT_THAT(Decode(WithBody(Head() + many)).error, HasSubstr("it claims 4611686018427387904 facets"));
  EXPECT_THAT(Decode(WithBody(Head() + Varint(500000))).error, HasSubstr("it claims 500000 facets"));
  EXPECT_THAT(Decode(WithBody(many)).error, HasSubstr("bytes of its label"));
  const std::string facet = Varint(0) + Varint(1) + "a" + Varint(1) + Varint(64);
  EXPECT_THAT(Decode(WithBody(Head() + Varint(1) + facet + Varint(1) + Varint(1) + many)).error,
              HasSubstr("it claims 4611686018427387904 entries"));
  EXPECT_THAT(Decode(WithBody(Head() + Varint(1) + facet + Varint(1) + Varint(1) + Varint(1) + many + "abc")).error,
              HasSubstr("it claims 4611686018427387904 uses"));
  EXPECT_THAT(Decode(WithBody(Head() + std::string(11, static_cast<char>(0xff)))).error,
              HasSubstr("more than 64 bits"));
  // Names that share everything with the one before cost five bytes each, and would come to 4 GiB.
  std::string body = Head() + Varint(1000000) + Varint(0) + Varint(kMostNameBytes) + std::string(kMostNameBytes, 'n') +
                     Varint(1) + Varint(64);
  for (int i = 1; i < 1000000; ++i) {
    body += Varint(kMostNameBytes) + Varint(0) + Varint(1) + Varint(64);
  }
  EXPECT_THAT(Decode(WithBody(body)).error, HasSubstr("names have more than"));
}

TEST(TraceFile, ANewerVersionIsNamed) {
  std::string bytes = Encoded(Example());
  bytes[8] = 9;
  EXPECT_THAT(Decode(bytes).error, HasSubstr("it is of version 9, and this misa reads up to 1"));
}

TEST(TraceFile, ContentThatMakesNoSenseIsNotWritten) {
  const auto error = [](auto change) {
    TraceFile file = Example();
    change(&file);
    const policy::Result<std::string> encoded = Encode(file);
    EXPECT_EQ(encoded.value, "");
    return encoded.error;
  };
  EXPECT_THAT(error([](TraceFile* f) { f->facets[3].bytes = 0; }), HasSubstr("facet 3 has a size of 0 bytes"));
  EXPECT_THAT(error([](TraceFile* f) { f->sections.clear(); }), HasSubstr("no section"));
  EXPECT_THAT(error([](TraceFile* f) { f->sections[1].mode = TraceMode::kTrain; }), HasSubstr("train is there twice"));
  EXPECT_THAT(error([](TraceFile* f) { f->sections[0].trace.entries.clear(); }), HasSubstr("has no entries"));
  EXPECT_THAT(error([](TraceFile* f) { f->sections[0].trace.entries[2].uses[0].facet = 36; }),
              HasSubstr("entry 2 uses facet 36, and there are 36"));
  EXPECT_THAT(error([](TraceFile* f) { f->sections[0].trace.entries[2].uses[0].access = 0; }),
              HasSubstr("unknown access 0"));
  for (const double time : {-1.0, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    EXPECT_THAT(error([&](TraceFile* f) { f->sections[0].trace.entries[1].compute_seconds = time; }),
                HasSubstr("entry 1 has a compute time of"));
    EXPECT_THAT(error([&](TraceFile* f) { f->link.load = time; }), HasSubstr("load rate"));
  }
}

class TraceFileOnDisk : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (std::filesystem::temp_directory_path() / "misa-trace-XXXXXX").string();
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  std::filesystem::path folder_;
};

TEST_F(TraceFileOnDisk, WritesAWholeFileOrNone) {
  const std::string path = folder_ / "a.trace";
  ASSERT_EQ(WriteBytes(path, Encoded(Example())), "");
  ASSERT_EQ(WriteBytes(path, Encoded(Example(3))), "");
  const policy::Result<std::string> bytes = ReadBytes(path);
  ASSERT_EQ(bytes.error, "");
  ExpectSame(Decode(bytes.value).value, Example(3));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);
  EXPECT_THAT(WriteBytes(folder_ / "missing" / "a", "x"), HasSubstr("cannot be written: No such file"));
  std::filesystem::create_directory(folder_ / "taken");
  EXPECT_THAT(WriteBytes(folder_ / "taken", "x"), HasSubstr("cannot be written"));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 2);
}

TEST_F(TraceFileOnDisk, SaysWhatCannotBeRead) {
  EXPECT_THAT(ReadBytes(folder_ / "none").error, HasSubstr("No such file"));
  EXPECT_THAT(ReadBytes(folder_).error, HasSubstr("not a regular file"));
  std::ofstream(folder_ / "large").close();
  std::filesystem::resize_file(folder_ / "large", kMostFileBytes + 1);
  EXPECT_THAT(ReadBytes(folder_ / "large").error, HasSubstr("the most is"));
}

TEST(TraceFile, IsWhatAPlannerNeeds) {
  TraceFile file = Example();
  file.sections[0].trace.entries.pop_back();
  for (policy::TraceEntry& entry : file.sections[0].trace.entries) entry.other_bytes = 4096;
  const policy::Result<policy::Plan> plan = policy::MakePlan(PlanInputOf(file, file.sections[0]));
  EXPECT_EQ(plan.error, "");
  EXPECT_EQ(plan.value.loaded_bytes, 0u);
}

}  // namespace
}  // namespace misa::trace
