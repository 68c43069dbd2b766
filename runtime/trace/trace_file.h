// Touch traces as a file: what `misactl trace record` writes and simulations read.
//
// Layout, version 1. Integers are base-128 varints, least group first, unless a width is given; zz() is zigzag.
//   magic      8 bytes: 89 "misatr" 0A
//   version    4 bytes, little end first
//   checksum   8 bytes, little end first: FNV-1a of version and body
//   body       label; budget and reserve bytes; the link's four rates in bytes per second;
//              facets:   count, then of each: bytes its name shares with the name before, the rest of the name, kind, bytes;
//              sections: count, then of each: mode, count of entries, then of each: count of uses; of each use
//                        zz(facet - facet of the use before) << 4 | access; nanoseconds; zz(other bytes - those before).
//              A text is its length and its bytes. Nothing follows.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/policy/planner.h"
#include "runtime/policy/trace.h"

namespace misa::trace {

// What a period was recorded of.
enum class TraceMode : uint8_t {
  kTrain = 1,       // a whole step: from one optimizer step to the next
  kEval = 2,        // one forward without gradients
  kAccumulate = 3,  // one forward and backward that adds to gradients
};
// The same values as misa.v1.FacetKind.
enum class FacetKind : uint8_t { kUnknown = 0, kWeights = 1, kGradients = 2, kOptimizer = 3 };

// "train", "eval", "accumulate"; "weights", "gradients", "optimizer", "unknown".
const char* ModeName(TraceMode mode);
const char* KindName(FacetKind kind);
// False where there is none of that name.
bool ModeOfName(std::string_view name, TraceMode* mode);
bool KindOfName(std::string_view name, FacetKind* kind);

struct FacetInfo {
  std::string name;  // of its module
  FacetKind kind = FacetKind::kUnknown;
  uint64_t bytes = 0;

  bool operator==(const FacetInfo&) const = default;
};

struct Section {
  TraceMode mode = TraceMode::kTrain;
  policy::Trace trace;  // facets are indices into TraceFile::facets
};

struct TraceFile {
  std::string label;  // where it comes from, for people
  // What the session had; 0 where that is not known.
  uint64_t budget_bytes = 0;
  uint64_t reserve_bytes = 0;
  policy::LinkRates link;
  std::vector<FacetInfo> facets;
  std::vector<Section> sections;  // at most one of a mode

  const Section* Find(TraceMode mode) const;
};

inline constexpr uint32_t kTraceFileVersion = 1;
inline constexpr size_t kMostFileBytes = size_t{64} << 20;
inline constexpr size_t kMostFacets = 1 << 20;
inline constexpr size_t kMostEntries = 1 << 22;  // of a section
inline constexpr size_t kMostNameBytes = 4096;
inline constexpr size_t kMostNamesBytes = size_t{64} << 20;  // all together

// "" or a sentence: what is wrong with the content (facets out of range, times that are not finite, unknown access, …).
std::string Check(const TraceFile& file);

// The bytes of a file, or a sentence. Times are kept to the nanosecond, rates to the byte per second.
policy::Result<std::string> Encode(const TraceFile& file);
// Any bytes whatever: a damaged, truncated or newer file gives a sentence, and memory stays proportional to `bytes`.
policy::Result<TraceFile> Decode(std::string_view bytes);

// True where the bytes begin like a trace file, damaged or not.
bool LooksLikeTraceFile(std::string_view bytes);

// A file's content of at most kMostFileBytes, or a sentence.
policy::Result<std::string> ReadBytes(const std::string& path);
// All or nothing: a file of that name is replaced only by a whole one. "" or a sentence.
std::string WriteBytes(const std::string& path, std::string_view bytes);

// What a planner needs to know of one section.
policy::PlanInput PlanInputOf(const TraceFile& file, const Section& section);

}  // namespace misa::trace
