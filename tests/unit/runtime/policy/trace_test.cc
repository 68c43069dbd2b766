#include "runtime/policy/trace.h"

#include <gtest/gtest.h>

namespace misa::policy {
namespace {

Trace Sample() { return {{{{{1, kRead}, {2, kWrite}}, 0.5, 100}, {{{3, kCreate | kWrite}}, 0.25, 200}}}; }

TEST(TraceDigest, DependsOnFacetsAccessAndOrder) {
  const uint64_t digest = Digest(Sample());
  Trace other = Sample();
  other.entries[0].uses[0].facet = 4;
  EXPECT_NE(Digest(other), digest);
  other = Sample();
  other.entries[1].uses[0].access = kCreate;
  EXPECT_NE(Digest(other), digest);
  other = Sample();
  std::swap(other.entries[0], other.entries[1]);
  EXPECT_NE(Digest(other), digest);
  other = Sample();
  other.entries.pop_back();
  EXPECT_NE(Digest(other), digest);
}

TEST(TraceDigest, TellsOnePositionFromTwo) {
  EXPECT_NE(Digest({{{{{1, kRead}, {2, kRead}}, 0, 0}}}), Digest({{{{{1, kRead}}, 0, 0}, {{{2, kRead}}, 0, 0}}}));
}

TEST(TraceDigest, IgnoresTimesAndBytes) {
  Trace other = Sample();
  other.entries[0].compute_seconds = 9;
  other.entries[1].other_bytes = 9;
  EXPECT_EQ(Digest(other), Digest(Sample()));
}

TEST(TraceDigest, IsTheSameEverywhere) {
  EXPECT_EQ(Digest(Trace{}), 0xcbf29ce484222325ull);
  // One position with no uses: FNV-1a of eight zero bytes.
  EXPECT_EQ(Digest(Trace{{TraceEntry{}}}), 0xa8c7f832281a39c5ull);
}

}  // namespace
}  // namespace misa::policy
