#include "runtime/trace/trace_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <utility>

#include "runtime/policy/fnv.h"

namespace misa::trace {
namespace {

constexpr char kMagic[] = "\x89misatr\n";
constexpr size_t kMagicBytes = 8;
constexpr size_t kHeaderBytes = kMagicBytes + 4 + 8;
constexpr uint8_t kAllAccess = policy::kRead | policy::kWrite | policy::kCreate | policy::kDiscard;
// Past ten years a time is damage, and nanoseconds of it would leave the 53 bits that a double holds exactly.
constexpr double kMostSeconds = 4e6;
constexpr double kMostRate = 1e18;
// The fewest bytes that one of them takes in a file: what a count can be checked against before anything is reserved.
constexpr size_t kLeastFacetBytes = 4;
constexpr size_t kLeastEntryBytes = 3;
constexpr size_t kLeastSectionBytes = 2;

constexpr std::pair<TraceMode, const char*> kModes[] = {
    {TraceMode::kTrain, "train"}, {TraceMode::kEval, "eval"}, {TraceMode::kAccumulate, "accumulate"}};
constexpr std::pair<FacetKind, const char*> kKinds[] = {{FacetKind::kUnknown, "unknown"},
                                                        {FacetKind::kWeights, "weights"},
                                                        {FacetKind::kGradients, "gradients"},
                                                        {FacetKind::kOptimizer, "optimizer"}};

uint64_t ZigZag(int64_t value) { return (static_cast<uint64_t>(value) << 1) ^ static_cast<uint64_t>(value >> 63); }
int64_t UnZigZag(uint64_t value) { return static_cast<int64_t>(value >> 1) ^ -static_cast<int64_t>(value & 1); }

uint64_t Checksum(std::string_view version, std::string_view body) {
  policy::Fnv hash;
  for (const char c : version) {
    hash.AddByte(static_cast<uint8_t>(c));
  }
  for (const char c : body) {
    hash.AddByte(static_cast<uint8_t>(c));
  }
  return hash.value();
}

class Writer {
 public:
  void Fixed(uint64_t value, int width) {
    for (int i = 0; i < width; ++i) {
      bytes_.push_back(static_cast<char>(value >> (8 * i)));
    }
  }
  void Number(uint64_t value) {
    while (value >= 0x80) {
      bytes_.push_back(static_cast<char>(value | 0x80));
      value >>= 7;
    }
    bytes_.push_back(static_cast<char>(value));
  }
  void Text(std::string_view text) {
    Number(text.size());
    bytes_.append(text);
  }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Once something is wrong, every later read gives 0 and `error` stays what it was first.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  const std::string& error() const { return error_; }
  bool ok() const { return error_.empty(); }
  size_t left() const { return bytes_.size() - at_; }
  void Fail(const std::string& what) {
    if (error_.empty()) {
      error_ = what;
    }
  }

  uint64_t Number(const char* what) {
    uint64_t value = 0;
    for (int shift = 0; ok(); shift += 7) {
      if (at_ == bytes_.size()) {
        Fail(std::string("it ends within ") + what);
        break;
      }
      const auto byte = static_cast<uint8_t>(bytes_[at_++]);
      const uint64_t bits = byte & 0x7f;
      if (shift > 63 || (shift == 63 && bits > 1)) {
        Fail(std::string("a number in ") + what + " has more than 64 bits");
        break;
      }
      value |= bits << shift;
      if ((byte & 0x80) == 0) {
        return value;
      }
    }
    return 0;
  }

  // A count of things that take at least `least_bytes` each: never more than what is left can hold.
  size_t Count(const char* what, size_t most, size_t least_bytes) {
    const uint64_t count = Number(what);
    if (ok() && (count > most || count > left() / least_bytes)) {
      Fail("it claims " + std::to_string(count) + " " + what + ", and " + std::to_string(left()) +
           " bytes are left for them (the most is " + std::to_string(most) + ")");
    }
    return ok() ? static_cast<size_t>(count) : 0;
  }

  std::string Text(const char* what, size_t most) {
    const size_t length = Count(what, most, 1);
    std::string text(bytes_.substr(at_, length));
    at_ += length;
    return text;
  }

 private:
  std::string_view bytes_;
  size_t at_ = 0;
  std::string error_;
};

void ReadFacets(Reader* in, TraceFile* file) {
  const size_t count = in->Count("facets", kMostFacets, kLeastFacetBytes);
  file->facets.reserve(count);
  std::string before;
  size_t names = 0;
  for (size_t i = 0; i < count && in->ok(); ++i) {
    FacetInfo facet;
    const uint64_t shared = in->Number("a facet's name");
    if (shared > before.size()) {
      return in->Fail("facet " + std::to_string(i) + " shares " + std::to_string(shared) +
                      " bytes with a name that has " + std::to_string(before.size()));
    }
    facet.name = before.substr(0, shared) + in->Text("bytes of a facet's name", kMostNameBytes - shared);
    // A shared beginning costs nothing in the file, so it is the names' sum that has to be bounded.
    names += facet.name.size();
    if (names > kMostNamesBytes) {
      return in->Fail("its names have more than " + std::to_string(kMostNamesBytes) + " bytes together");
    }
    facet.kind = static_cast<FacetKind>(std::min<uint64_t>(in->Number("a facet's kind"), 255));
    facet.bytes = in->Number("a facet's size");
    before = facet.name;
    file->facets.push_back(std::move(facet));
  }
}

void ReadSection(Reader* in, Section* section) {
  section->mode = static_cast<TraceMode>(std::min<uint64_t>(in->Number("a section's mode"), 255));
  const size_t count = in->Count("entries", kMostEntries, kLeastEntryBytes);
  section->trace.entries.reserve(count);
  int64_t facet = 0;
  uint64_t other = 0;
  for (size_t i = 0; i < count && in->ok(); ++i) {
    policy::TraceEntry entry;
    const size_t uses = in->Count("uses", kMostFacets, 1);
    entry.uses.reserve(uses);
    for (size_t u = 0; u < uses && in->ok(); ++u) {
      const uint64_t word = in->Number("a use");
      const int64_t step = UnZigZag(word >> 4);
      facet += std::clamp<int64_t>(step, -(int64_t{1} << 32), int64_t{1} << 32);
      if (facet < 0 || facet >= static_cast<int64_t>(kMostFacets)) {
        return in->Fail("entry " + std::to_string(i) + " uses facet " + std::to_string(facet));
      }
      entry.uses.push_back({static_cast<uint32_t>(facet), static_cast<uint8_t>(word & 15)});
    }
    entry.compute_seconds = static_cast<double>(in->Number("a time")) / 1e9;
    other += static_cast<uint64_t>(UnZigZag(in->Number("a count of other bytes")));
    entry.other_bytes = other;
    section->trace.entries.push_back(std::move(entry));
  }
}

std::string Errno() { return std::strerror(errno); }

}  // namespace

const char* ModeName(TraceMode mode) {
  for (const auto& [value, name] : kModes) {
    if (value == mode) {
      return name;
    }
  }
  return "unknown";
}

const char* KindName(FacetKind kind) {
  for (const auto& [value, name] : kKinds) {
    if (value == kind) {
      return name;
    }
  }
  return "unknown";
}

bool ModeOfName(std::string_view name, TraceMode* mode) {
  for (const auto& [value, known] : kModes) {
    if (name == known) {
      *mode = value;
      return true;
    }
  }
  return false;
}

bool KindOfName(std::string_view name, FacetKind* kind) {
  for (const auto& [value, known] : kKinds) {
    if (name == known) {
      *kind = value;
      return true;
    }
  }
  return false;
}

const Section* TraceFile::Find(TraceMode mode) const {
  for (const Section& section : sections) {
    if (section.mode == mode) {
      return &section;
    }
  }
  return nullptr;
}

std::string Check(const TraceFile& file) {
  if (file.facets.size() > kMostFacets) {
    return "it has " + std::to_string(file.facets.size()) + " facets, and the most is " + std::to_string(kMostFacets);
  }
  for (const auto& [name, rate] :
       {std::pair{"load", file.link.load}, std::pair{"unload", file.link.unload},
        std::pair{"duplex load", file.link.duplex_load}, std::pair{"duplex unload", file.link.duplex_unload}}) {
    if (!std::isfinite(rate) || rate < 0 || rate > kMostRate) {
      return std::string("the link's ") + name + " rate is " + std::to_string(rate) + " bytes per second";
    }
  }
  for (size_t i = 0; i < file.facets.size(); ++i) {
    const FacetInfo& facet = file.facets[i];
    if (facet.bytes == 0) {
      return "facet " + std::to_string(i) + " has a size of 0 bytes";
    }
    if (facet.name.size() > kMostNameBytes) {
      return "facet " + std::to_string(i) + " has a name of " + std::to_string(facet.name.size()) + " bytes";
    }
    if (facet.kind > FacetKind::kOptimizer) {
      return "facet " + std::to_string(i) + " is of the unknown kind " + std::to_string(static_cast<int>(facet.kind));
    }
  }
  if (file.sections.empty()) {
    return "it has no section, so no trace";
  }
  uint32_t seen = 0;
  for (const Section& section : file.sections) {
    const int mode = static_cast<int>(section.mode);
    if (mode < 1 || mode > 3) {
      return "a section is of the unknown mode " + std::to_string(mode);
    }
    const std::string where = std::string("section ") + ModeName(section.mode);
    if ((seen >> mode & 1) != 0) {
      return where + " is there twice";
    }
    seen |= 1u << mode;
    if (section.trace.entries.empty()) {
      return where + " has no entries";
    }
    if (section.trace.entries.size() > kMostEntries) {
      return where + " has more than " + std::to_string(kMostEntries) + " entries";
    }
    for (size_t i = 0; i < section.trace.entries.size(); ++i) {
      const policy::TraceEntry& entry = section.trace.entries[i];
      const std::string at = where + ", entry " + std::to_string(i);
      if (!std::isfinite(entry.compute_seconds) || entry.compute_seconds < 0 || entry.compute_seconds > kMostSeconds) {
        return at + " has a compute time of " + std::to_string(entry.compute_seconds) + " seconds";
      }
      for (const policy::Use& use : entry.uses) {
        if (use.facet >= file.facets.size()) {
          return at + " uses facet " + std::to_string(use.facet) + ", and there are " +
                 std::to_string(file.facets.size());
        }
        if (use.access == 0 || (use.access & ~kAllAccess) != 0) {
          return at + " has the unknown access " + std::to_string(use.access);
        }
      }
    }
  }
  return "";
}

policy::Result<std::string> Encode(const TraceFile& file) {
  policy::Result<std::string> result;
  if (const std::string wrong = Check(file); !wrong.empty()) {
    result.error = "The trace cannot be written: " + wrong + ".";
    return result;
  }
  Writer body;
  body.Text(file.label.substr(0, kMostNameBytes));
  body.Number(file.budget_bytes);
  body.Number(file.reserve_bytes);
  for (const double rate : {file.link.load, file.link.unload, file.link.duplex_load, file.link.duplex_unload}) {
    body.Number(static_cast<uint64_t>(std::llround(rate)));
  }
  body.Number(file.facets.size());
  std::string_view before;
  for (const FacetInfo& facet : file.facets) {
    size_t shared = 0;
    while (shared < before.size() && shared < facet.name.size() && before[shared] == facet.name[shared]) {
      ++shared;
    }
    body.Number(shared);
    body.Text(std::string_view(facet.name).substr(shared));
    body.Number(static_cast<uint64_t>(facet.kind));
    body.Number(facet.bytes);
    before = facet.name;
  }
  body.Number(file.sections.size());
  for (const Section& section : file.sections) {
    body.Number(static_cast<uint64_t>(section.mode));
    body.Number(section.trace.entries.size());
    int64_t facet = 0;
    uint64_t other = 0;
    for (const policy::TraceEntry& entry : section.trace.entries) {
      body.Number(entry.uses.size());
      for (const policy::Use& use : entry.uses) {
        body.Number(ZigZag(static_cast<int64_t>(use.facet) - facet) << 4 | use.access);
        facet = use.facet;
      }
      body.Number(static_cast<uint64_t>(std::llround(entry.compute_seconds * 1e9)));
      body.Number(ZigZag(static_cast<int64_t>(entry.other_bytes - other)));
      other = entry.other_bytes;
    }
  }
  const std::string bytes = body.Take();
  Writer version;
  version.Fixed(kTraceFileVersion, 4);
  const std::string version_bytes = version.Take();
  Writer sum;
  sum.Fixed(Checksum(version_bytes, bytes), 8);
  result.value = std::string(kMagic, kMagicBytes) + version_bytes + sum.Take() + bytes;
  return result;
}

bool LooksLikeTraceFile(std::string_view bytes) {
  return !bytes.empty() && bytes.front() == kMagic[0];
}

policy::Result<TraceFile> Decode(std::string_view bytes) {
  policy::Result<TraceFile> result;
  const auto fail = [&](const std::string& what) {
    result.value = {};
    result.error = "The trace file cannot be read: " + what + ". Record it again.";
    return result;
  };
  if (bytes.size() < kHeaderBytes) {
    return fail("it has " + std::to_string(bytes.size()) + " bytes, and its head alone takes " +
                std::to_string(kHeaderBytes));
  }
  if (bytes.substr(0, kMagicBytes) != std::string_view(kMagic, kMagicBytes)) {
    return fail("it does not begin like a misa trace");
  }
  const auto fixed = [&](size_t from, int width) {
    uint64_t value = 0;
    for (int i = 0; i < width; ++i) {
      value |= static_cast<uint64_t>(static_cast<uint8_t>(bytes[from + static_cast<size_t>(i)])) << (8 * i);
    }
    return value;
  };
  const uint64_t version = fixed(kMagicBytes, 4);
  if (version > kTraceFileVersion) {
    result.error = "The trace file cannot be read: it is of version " + std::to_string(version) +
                   ", and this misa reads up to " + std::to_string(kTraceFileVersion) + ". Use a newer misactl.";
    return result;
  }
  const std::string_view body = bytes.substr(kHeaderBytes);
  if (version == 0 || Checksum(bytes.substr(kMagicBytes, 4), body) != fixed(kMagicBytes + 4, 8)) {
    return fail("its checksum is not that of its content, so it was damaged or cut off");
  }
  Reader in(body);
  TraceFile& file = result.value;
  file.label = in.Text("bytes of its label", kMostNameBytes);
  file.budget_bytes = in.Number("the budget");
  file.reserve_bytes = in.Number("the reserve");
  for (double* rate : {&file.link.load, &file.link.unload, &file.link.duplex_load, &file.link.duplex_unload}) {
    *rate = static_cast<double>(in.Number("a link's rate"));
  }
  ReadFacets(&in, &file);
  const size_t sections = in.Count("sections", 3, kLeastSectionBytes);
  for (size_t i = 0; i < sections && in.ok(); ++i) {
    ReadSection(&in, &file.sections.emplace_back());
  }
  if (!in.ok()) {
    return fail(in.error());
  }
  if (in.left() != 0) {
    return fail("it goes on for " + std::to_string(in.left()) + " bytes after its end");
  }
  if (const std::string wrong = Check(file); !wrong.empty()) {
    return fail(wrong);
  }
  return result;
}

policy::Result<std::string> ReadBytes(const std::string& path) {
  policy::Result<std::string> result;
  const auto fail = [&](const std::string& why) {
    result.value.clear();
    result.error = path + " cannot be read: " + why + ".";
    return result;
  };
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    return fail(Errno());
  }
  struct stat about;
  if (fstat(fd, &about) != 0 || !S_ISREG(about.st_mode)) {
    close(fd);
    return fail("it is not a regular file");
  }
  if (about.st_size > static_cast<off_t>(kMostFileBytes)) {
    close(fd);
    return fail("it has " + std::to_string(about.st_size) + " bytes, and the most is " + std::to_string(kMostFileBytes));
  }
  char buffer[1 << 16];
  ssize_t got = 0;
  while ((got = read(fd, buffer, sizeof(buffer))) != 0) {
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got < 0 || result.value.size() + static_cast<size_t>(got) > kMostFileBytes) {
      const std::string why = got < 0 ? Errno() : "it grew past " + std::to_string(kMostFileBytes) + " bytes";
      close(fd);
      return fail(why);
    }
    result.value.append(buffer, static_cast<size_t>(got));
  }
  close(fd);
  return result;
}

std::string WriteBytes(const std::string& path, std::string_view bytes) {
  // Beside its place, so that the rename stays within one file system.
  const std::string beside = path + ".new-" + std::to_string(getpid());
  const int fd = open(beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) {
    return path + " cannot be written: " + Errno() + ".";
  }
  std::string why;
  size_t done = 0;
  while (done < bytes.size() && why.empty()) {
    const ssize_t wrote = write(fd, bytes.data() + done, bytes.size() - done);
    if (wrote < 0 && errno == EINTR) {
      continue;
    }
    if (wrote <= 0) {
      why = wrote < 0 ? Errno() : "nothing could be written";
    } else {
      done += static_cast<size_t>(wrote);
    }
  }
  if (close(fd) != 0 && why.empty()) {
    why = Errno();
  }
  if (why.empty() && rename(beside.c_str(), path.c_str()) != 0) {
    why = Errno();
  }
  if (!why.empty()) {
    unlink(beside.c_str());
    return path + " cannot be written: " + why + ". A file of that name is as it was.";
  }
  return "";
}

policy::PlanInput PlanInputOf(const TraceFile& file, const Section& section) {
  policy::PlanInput input;
  input.facet_bytes.reserve(file.facets.size());
  for (const FacetInfo& facet : file.facets) {
    input.facet_bytes.push_back(facet.bytes);
  }
  input.trace = section.trace;
  input.budget_bytes = file.budget_bytes;
  input.reserve_bytes = file.reserve_bytes;
  input.link = file.link;
  return input;
}

}  // namespace misa::trace
