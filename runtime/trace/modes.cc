#include "runtime/trace/modes.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "runtime/policy/fnv.h"
#include "runtime/trace/period.h"

namespace misa::trace {
namespace {

using policy::Trace;
using policy::TraceEntry;
using policy::Use;

// From so many uses of a weight in a period on, it has a backward: between one (a forward) and two.
constexpr double kUsesWithBackward = 1.5;
// A period that uses less than this share of the step's weights is a repetition inside one pass (equal layers, a
// recomputation), not the pass.
constexpr double kLeastWeights = 0.5;

class StepReader {
 public:
  StepReader(const Trace& step, const std::vector<FacetKind>& kinds) : step_(step), kinds_(kinds) {
    std::vector<bool> seen(kinds.size(), false);
    for (const TraceEntry& entry : step.entries) {
      policy::Fnv hash;
      for (const Use& use : entry.uses) {
        hash.Add64(use.facet);
        hash.Add64(use.access);
        if (KindOf(use) == FacetKind::kWeights && !seen[use.facet]) {
          seen[use.facet] = true;
          ++weights_;
        }
      }
      groups_.push_back(hash.value());
    }
  }

  std::vector<Section> Find() const {
    std::vector<Section> found;
    if (weights_ == 0) {
      return found;
    }
    if (std::optional<Trace> eval = Eval()) {
      found.push_back({TraceMode::kEval, std::move(*eval)});
    }
    if (std::optional<Trace> accumulate = Accumulate()) {
      found.push_back({TraceMode::kAccumulate, std::move(*accumulate)});
    }
    return found;
  }

 private:
  struct Content {
    size_t weights = 0;       // distinct
    size_t weight_uses = 0;
    bool writes = false;      // weights, or optimizer state used
    bool adds = false;        // gradients that were there before
    bool creates = false;     // gradients
  };

  FacetKind KindOf(const Use& use) const { return use.facet < kinds_.size() ? kinds_[use.facet] : FacetKind::kUnknown; }
  bool Has(size_t entry, FacetKind kind) const {
    return std::any_of(step_.entries[entry].uses.begin(), step_.entries[entry].uses.end(),
                       [&](const Use& use) { return KindOf(use) == kind; });
  }
  bool Writes(size_t entry, FacetKind kind) const {
    return std::any_of(step_.entries[entry].uses.begin(), step_.entries[entry].uses.end(), [&](const Use& use) {
      return KindOf(use) == kind && (use.access & policy::kWrite) != 0;
    });
  }
  bool Creates(size_t entry) const {
    return std::any_of(step_.entries[entry].uses.begin(), step_.entries[entry].uses.end(), [&](const Use& use) {
      return KindOf(use) == FacetKind::kGradients && (use.access & policy::kCreate) != 0;
    });
  }

  Content Look(size_t begin, size_t end) const {
    Content content;
    std::vector<bool> seen(kinds_.size(), false);
    for (size_t i = begin; i < end; ++i) {
      for (const Use& use : step_.entries[i].uses) {
        const bool written = (use.access & policy::kWrite) != 0;
        switch (KindOf(use)) {
          case FacetKind::kWeights:
            ++content.weight_uses;
            content.weights += seen[use.facet] ? 0 : 1;
            seen[use.facet] = true;
            content.writes = content.writes || written;
            break;
          case FacetKind::kGradients:
            content.creates = content.creates || (use.access & policy::kCreate) != 0;
            content.adds = content.adds || (written && (use.access & policy::kCreate) == 0);
            break;
          case FacetKind::kOptimizer:
            content.writes = true;
            break;
          case FacetKind::kUnknown:
            break;
        }
      }
    }
    return content;
  }

  bool Covers(const Content& content) const {
    return static_cast<double>(content.weights) >= kLeastWeights * static_cast<double>(weights_);
  }
  bool TwiceUsed(const Content& content) const {
    return static_cast<double>(content.weight_uses) >= kUsesWithBackward * static_cast<double>(content.weights);
  }
  bool IsEval(const Content& content) const {
    return Covers(content) && !content.writes && !content.adds && !content.creates && !TwiceUsed(content);
  }
  bool IsAccumulate(const Content& content) const {
    return Covers(content) && !content.writes && !content.creates && (content.adds || TwiceUsed(content));
  }

  // A period shorter than the weights it has to use is none.
  size_t Smallest() const { return std::max<size_t>(1, static_cast<size_t>(kLeastWeights * static_cast<double>(weights_))); }
  Trace Cut(size_t begin, size_t end) const {
    return {{step_.entries.begin() + static_cast<std::ptrdiff_t>(begin),
             step_.entries.begin() + static_cast<std::ptrdiff_t>(end)}};
  }

  // Evaluations come before the training forward, and what the optimizer left to do comes with the first of them. So the
  // repetition begins at the step's beginning, or behind the last deferred update.
  std::optional<Trace> Eval() const {
    const size_t count = groups_.size();
    size_t creates = 0;
    while (creates < count && !Creates(creates)) {
      ++creates;
    }
    std::vector<size_t> starts = {0};
    for (const size_t end : {creates, count}) {
      size_t last = end;
      while (last > 0 && !Has(last - 1, FacetKind::kOptimizer)) {
        --last;
      }
      if (std::find(starts.begin(), starts.end(), last) == starts.end()) {
        starts.push_back(last);
      }
    }
    for (const size_t start : starts) {
      // Read backwards, the beginning is the end that FindPeriod looks at.
      const std::vector<uint64_t> backwards(groups_.rbegin(), groups_.rend() - static_cast<std::ptrdiff_t>(start));
      const size_t period = FindPeriod(backwards, 2, Smallest());
      // The second occurrence: the first one may have waited for what it found away.
      if (period > 0 && IsEval(Look(start + period, start + 2 * period))) {
        return Cut(start + period, start + 2 * period);
      }
    }
    return std::nullopt;
  }

  // What repeats ends with the last gradient. Where gradients are no facets, it ends the step, or comes before an optimizer
  // pass that does.
  std::vector<size_t> BackwardEnds() const {
    const size_t count = groups_.size();
    size_t end = count;
    while (end > 0 && !Writes(end - 1, FacetKind::kGradients)) {
      --end;
    }
    if (end > 0) {
      return {end};
    }
    size_t pass = 0;
    while (pass < count && !Has(pass, FacetKind::kOptimizer)) {
      ++pass;
    }
    return {count, pass};
  }

  std::optional<Trace> Accumulate() const {
    for (const size_t end : BackwardEnds()) {
      const size_t period = FindPeriod(std::span(groups_).first(end), 2, Smallest());
      if (period > 0 && IsAccumulate(Look(end - period, end))) {
        return Cut(end - period, end);
      }
      // A single one beyond the first: it begins where the first has made its last gradient.
      size_t begin = end;
      while (begin > 0 && !Creates(begin - 1)) {
        --begin;
      }
      if (begin > 0 && period == 0) {
        const Content content = Look(begin, end);
        if (content.adds && IsAccumulate(content)) {
          return Cut(begin, end);
        }
      }
    }
    return std::nullopt;
  }

  const Trace& step_;
  const std::vector<FacetKind>& kinds_;
  std::vector<uint64_t> groups_;
  size_t weights_ = 0;  // distinct weights that the step uses
};

}  // namespace

std::vector<Section> FindModes(const Trace& step, const std::vector<FacetKind>& kinds) {
  return StepReader(step, kinds).Find();
}

}  // namespace misa::trace
