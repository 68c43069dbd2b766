#include "server/journal.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <fstream>

namespace misa::server {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

class JournalTest : public ::testing::Test {
 protected:
  JournalTest() {
    char name[] = "/tmp/misa-journal-XXXXXX";
    folder_ = mkdtemp(name);
    path_ = folder_ + "/journal.json";
  }
  ~JournalTest() override { std::filesystem::remove_all(folder_); }

  std::string folder_;
  std::string path_;
  std::vector<JournalEntry> entries_;
};

TEST_F(JournalTest, ReadsWhatItWrote) {
  const std::vector<JournalEntry> written = {{"s1", "job \"a\"\n\xff", 12, 345, 1ull << 60, 7}, {"s2", "", 13, 1, 0, 0}};
  ASSERT_EQ(WriteJournalFile(path_, "boot", written), "");
  ASSERT_EQ(ReadJournalFile(path_, "boot", &entries_), "");
  ASSERT_EQ(entries_.size(), 2u);
  EXPECT_EQ(entries_[0].bytes, 1ull << 60);
  EXPECT_EQ(entries_[1], written[1]);
  EXPECT_FALSE(std::filesystem::exists(path_ + ".new"));
}

TEST_F(JournalTest, ForgetsAnEarlierBoot) {
  ASSERT_EQ(WriteJournalFile(path_, "boot", {{"s1", "", 12, 345, 1, 1}}), "");
  EXPECT_EQ(ReadJournalFile(path_, "another boot", &entries_), "");
  EXPECT_THAT(entries_, IsEmpty());
}

TEST_F(JournalTest, SaysWhenItIsDamaged) {
  EXPECT_EQ(ReadJournalFile(path_, "boot", &entries_), "");  // missing is not damaged
  for (const char* text : {"", "{", "[]", "{\"version\":2,\"boot\":\"boot\",\"sessions\":[]}",
                           "{\"version\":1,\"boot\":\"boot\",\"sessions\":[{\"session\":1}]}"}) {
    std::ofstream(path_) << text;
    EXPECT_THAT(ReadJournalFile(path_, "boot", &entries_), HasSubstr("is damaged")) << text;
    EXPECT_THAT(entries_, IsEmpty());
  }
}

TEST_F(JournalTest, SaysWhenItCannotBeWritten) {
  EXPECT_THAT(WriteJournalFile(folder_ + "/none/journal.json", "boot", {}), HasSubstr("could not be created"));
}

}  // namespace
}  // namespace misa::server
