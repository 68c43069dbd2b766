#include "runtime/predict/ppm_predictor.h"

#include <algorithm>
#include <numeric>

#include "runtime/policy/fnv.h"

namespace misa::predict {
namespace {

constexpr size_t kMostOrder = 16;
constexpr size_t kMostContexts = 1 << 20;
// Places that a context may take.
constexpr size_t kWays = 4;
// Counts are halved at this sum: what followed lately weighs more than what followed long ago.
constexpr uint32_t kMostCount = 256;
// Added to what a context has seen: one that was there once is less sure than one that held nine times out of ten.
constexpr double kDoubt = 1;

}  // namespace

std::string Check(const PpmOptions& options) {
  if (options.order > kMostOrder) {
    return "contexts of " + std::to_string(options.order) + " symbols were asked for, and the longest have " +
           std::to_string(kMostOrder);
  }
  if (options.contexts < kWays || options.contexts > kMostContexts) {
    return std::to_string(options.contexts) + " contexts were to be remembered; their number lies between " +
           std::to_string(kWays) + " and " + std::to_string(kMostContexts);
  }
  return "";
}

PpmPredictor::PpmPredictor(const PpmOptions& options)
    : order_(options.order), history_(options.order), table_(options.contexts / kWays * kWays) {}

void PpmPredictor::Context::Count(Symbol symbol) {
  size_t place = 0;
  for (size_t i = 0; i < kSuccessors; ++i) {
    if (counts[i] > 0 && symbols[i] == symbol) {
      place = i;
      break;
    }
    if (counts[i] < counts[place]) place = i;
  }
  if (counts[place] == 0 || symbols[place] != symbol) {
    symbols[place] = symbol;
    counts[place] = 0;
  }
  ++counts[place];
  if (std::accumulate(counts.begin(), counts.end(), 0u) >= kMostCount) {
    for (uint16_t& count : counts) count /= 2;
  }
}

uint64_t PpmPredictor::Tag(size_t length) const {
  policy::Fnv hash;
  hash.Add64(length);
  for (size_t back = 0; back < length; ++back) hash.Add64(history_.FromEnd(back));
  return std::max<uint64_t>(hash.value(), 1);
}

const PpmPredictor::Context* PpmPredictor::Find(uint64_t tag) const {
  const size_t first = tag % (table_.size() / kWays) * kWays;
  for (size_t i = first; i < first + kWays; ++i) {
    if (table_[i].tag == tag) return &table_[i];
  }
  return nullptr;
}

PpmPredictor::Context* PpmPredictor::FindOrAdd(uint64_t tag) {
  const size_t first = tag % (table_.size() / kWays) * kWays;
  Context* oldest = &table_[first];
  for (size_t i = first; i < first + kWays; ++i) {
    if (table_[i].tag == tag) return &table_[i];
    if (table_[i].used < oldest->used) oldest = &table_[i];
  }
  *oldest = {};
  oldest->tag = tag;
  return oldest;
}

void PpmPredictor::Observe(Symbol symbol) {
  ++observed_;
  for (size_t length = 0; length <= std::min(order_, history_.size()); ++length) {
    Context* context = FindOrAdd(Tag(length));
    context->used = observed_;
    context->Count(symbol);
  }
  if (order_ > 0) history_.Add(symbol);
}

std::optional<Symbol> PpmPredictor::Predict() const {
  std::optional<Symbol> best;
  double surest = 0;
  // Of equals the one that the longest context names.
  for (size_t length = std::min(order_, history_.size()) + 1; length-- > 0;) {
    const Context* context = Find(Tag(length));
    if (context == nullptr) continue;
    const auto most =
        static_cast<size_t>(std::max_element(context->counts.begin(), context->counts.end()) - context->counts.begin());
    const double sure =
        context->counts[most] / (kDoubt + std::accumulate(context->counts.begin(), context->counts.end(), 0.0));
    if (sure <= surest) continue;
    best = context->symbols[most];
    surest = sure;
  }
  return best;
}

size_t PpmPredictor::memory_bytes() const {
  return sizeof(*this) + history_.memory_bytes() + table_.capacity() * sizeof(Context);
}

}  // namespace misa::predict
