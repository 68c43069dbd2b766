// How often predictors name the next module that a step touches: one kind of trace, one JSON object.
//
//   predictors KIND SEED LENGTH [PLUGIN]
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "runtime/predict/bidder.h"
#include "server/predict/plugin.h"
#include "tests/unit/runtime/predict/streams.h"

namespace {

using namespace misa::predict;

// The plug-in's prediction of each symbol, waited for.
class Waiting final : public Predictor {
 public:
  explicit Waiting(std::unique_ptr<misa::server::PredictorPlugin::Instance> instance)
      : instance_(std::move(instance)) {}
  const char* name() const override { return "lstm"; }
  void Observe(Symbol symbol) override {
    std::string problem = instance_->Observe({symbol});
    if (problem.empty()) problem = instance_->Predict(&next_);
    if (problem.empty()) return;
    std::cerr << "predictors: " << problem << "\n";
    std::exit(1);
  }
  std::optional<Symbol> Predict() const override { return next_; }
  size_t memory_bytes() const override { return sizeof(*this); }

 private:
  std::unique_ptr<misa::server::PredictorPlugin::Instance> instance_;
  std::optional<Symbol> next_;
};

// Seconds are counted apart for each.
class Timed final : public Predictor {
 public:
  Timed(std::unique_ptr<Predictor> inner, double* seconds) : inner_(std::move(inner)), seconds_(seconds) {}
  const char* name() const override { return inner_->name(); }
  void Observe(Symbol symbol) override {
    const auto start = std::chrono::steady_clock::now();
    inner_->Observe(symbol);
    next_ = inner_->Predict();
    *seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  std::optional<Symbol> Predict() const override { return next_; }
  size_t memory_bytes() const override { return inner_->memory_bytes(); }

 private:
  std::unique_ptr<Predictor> inner_;
  double* const seconds_;
  std::optional<Symbol> next_;
};

}  // namespace

int main(int argc, char** argv) {
  const std::string kind = argc > 1 ? argv[1] : "";
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  const size_t length = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 0;
  if (length < 1 || length > 10'000'000 || MakeStream(kind, seed, 1).empty()) {
    std::cerr << "predictors: give a kind (dense, layer-drop, tasks, moe), a seed, and 1 to 10000000 symbols.\n";
    return 2;
  }
  const std::vector<Symbol> symbols = MakeStream(kind, seed, length);
  std::vector<std::unique_ptr<Predictor>> predictors;
  predictors.push_back(std::make_unique<LastPredictor>());
  predictors.push_back(std::make_unique<PeriodPredictor>());
  predictors.push_back(std::make_unique<PpmPredictor>(PpmOptions{.order = 4, .contexts = 1 << 14}));
  std::unique_ptr<misa::server::PredictorPlugin> plugin;
  if (argc > 4) {
    std::string problem;
    plugin = misa::server::PredictorPlugin::Load(argv[4], &problem);
    auto instance = plugin ? plugin->Create(seed, &problem) : nullptr;
    if (!instance) {
      std::cerr << "predictors: " << problem << "\n";
      return 1;
    }
    predictors.push_back(std::make_unique<Waiting>(std::move(instance)));
  }
  std::vector<double> seconds(predictors.size());
  std::vector<size_t> memory_bytes;
  for (size_t i = 0; i < predictors.size(); ++i) {
    memory_bytes.push_back(predictors[i]->memory_bytes());
    predictors[i] = std::make_unique<Timed>(std::move(predictors[i]), &seconds[i]);
  }
  Bidder bidder({}, std::move(predictors));
  for (const Symbol symbol : symbols) bidder.Observe(symbol);
  nlohmann::ordered_json row;
  row["trace"] = kind;
  row["seed"] = seed;
  row["symbols"] = length;
  const std::vector<Standing> standings = bidder.standings();
  for (size_t i = 0; i < standings.size(); ++i) {
    const std::string name = standings[i].name;
    row[name + "_accuracy"] = static_cast<double>(standings[i].right) / static_cast<double>(length);
    if (i >= seconds.size()) continue;
    row[name + "_seconds_per_symbol"] = seconds[i] / static_cast<double>(length);
    // What torch holds for the network is not known here.
    if (name != "lstm") row[name + "_memory_bytes"] = memory_bytes[i];
  }
  std::cout << row.dump() << "\n";
  return 0;
}
