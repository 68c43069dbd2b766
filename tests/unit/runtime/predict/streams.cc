#include "tests/unit/runtime/predict/streams.h"

#include "runtime/sim/random.h"

namespace misa::predict {
namespace {

constexpr uint64_t kBlocks = 24;
constexpr uint64_t kMoeBlocks = 12;
constexpr uint64_t kExperts = 8;
constexpr uint64_t kTasks = 3;
constexpr uint64_t kHeadBlocks = 4;
constexpr uint64_t kBatchKinds = 6;

constexpr Symbol Forward(uint64_t module) { return 1000 + module; }
constexpr Symbol Backward(uint64_t module) { return 2000 + module; }

class Maker {
 public:
  Maker(uint64_t seed) : random_(seed) {
    for (auto& kind : routes_) {
      for (uint64_t& expert : kind) expert = random_.Below(kExperts);
    }
  }

  void Dense() {
    for (uint64_t block = 0; block < kBlocks; ++block) Add(Forward(block));
    for (uint64_t block = kBlocks; block-- > 0;) Add(Backward(block));
  }

  void LayerDrop() {
    std::vector<uint64_t> kept;
    for (uint64_t block = 0; block < kBlocks; ++block) {
      if (!random_.Chance(0.1)) kept.push_back(block);
    }
    for (const uint64_t block : kept) Add(Forward(block));
    for (auto block = kept.rbegin(); block != kept.rend(); ++block) Add(Backward(*block));
  }

  void Tasks() {
    // Of the tasks the one after this, as a loader over several data sets takes its turns.
    if (random_.Chance(0.3)) task_ = (task_ + 1) % kTasks;
    const uint64_t head = kBlocks + task_ * kHeadBlocks;
    for (uint64_t block = 0; block < kBlocks / 2; ++block) Add(Forward(block));
    for (uint64_t block = head; block < head + kHeadBlocks; ++block) Add(Forward(block));
    for (uint64_t block = head + kHeadBlocks; block-- > head;) Add(Backward(block));
    for (uint64_t block = kBlocks / 2; block-- > 0;) Add(Backward(block));
  }

  void Moe() {
    if (random_.Chance(0.15)) batch_ = random_.Below(kBatchKinds);
    std::vector<uint64_t> experts;
    for (uint64_t block = 0; block < kMoeBlocks; ++block) {
      const uint64_t expert = random_.Chance(0.08) ? random_.Below(kExperts) : routes_[batch_][block];
      experts.push_back(100 + block * kExperts + expert);
      Add(Forward(block));
      Add(Forward(experts.back()));
    }
    for (uint64_t block = kMoeBlocks; block-- > 0;) {
      Add(Backward(experts[block]));
      Add(Backward(block));
    }
  }

  std::vector<Symbol> symbols;

 private:
  void Add(Symbol symbol) { symbols.push_back(symbol); }

  sim::Random random_;
  uint64_t task_ = 0;
  uint64_t batch_ = 0;
  uint64_t routes_[kBatchKinds][kMoeBlocks];
};

}  // namespace

std::vector<Symbol> MakeStream(const std::string& kind, uint64_t seed, size_t length) {
  Maker maker(seed);
  while (maker.symbols.size() < length) {
    if (kind == "dense") {
      maker.Dense();
    } else if (kind == "layer-drop") {
      maker.LayerDrop();
    } else if (kind == "tasks") {
      maker.Tasks();
    } else if (kind == "moe") {
      maker.Moe();
    } else {
      return {};
    }
  }
  maker.symbols.resize(length);
  return maker.symbols;
}

}  // namespace misa::predict
