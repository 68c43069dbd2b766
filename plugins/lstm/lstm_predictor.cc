// The LSTM predictor: a small recurrent network that is trained on the sequence while it predicts it.
#include <torch/torch.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime/predict/plugin_abi.h"
#include "runtime/sim/random.h"

namespace {

constexpr uint32_t kDefaultSymbols = 256;
constexpr uint32_t kMostSymbols = 4096;
constexpr uint32_t kDefaultTrainEvery = 8;
constexpr int64_t kEmbedding = 32;
constexpr int64_t kHidden = 64;
// One round of training: the newest symbols and some stretches of before, so that what is rare is not forgotten.
constexpr int64_t kStretch = 48;
constexpr int64_t kStretches = 4;
constexpr size_t kHistory = 4096;
constexpr double kLearningRate = 5e-3;
// The symbol of all that came after the table was full.
constexpr int64_t kOther = 0;

class Lstm {
 public:
  explicit Lstm(const misa_predictor_options& options)
      : limit_(options.most_symbols != 0 ? options.most_symbols : kDefaultSymbols),
        train_every_(options.train_every != 0 ? options.train_every : kDefaultTrainEvery),
        random_(options.seed) {
    if (limit_ < 2 || limit_ > kMostSymbols) {
      throw std::invalid_argument("it was to tell " + std::to_string(limit_) + " symbols apart, and can 2 to " +
                                  std::to_string(kMostSymbols));
    }
    // Torch's generator belongs to the process.
    static std::mutex seeding;
    std::lock_guard<std::mutex> lock(seeding);
    at::set_num_threads(1);
    torch::manual_seed(options.seed);
    embedding_ = torch::nn::Embedding(limit_, kEmbedding);
    lstm_ = torch::nn::LSTM(torch::nn::LSTMOptions(kEmbedding, kHidden));
    head_ = torch::nn::Linear(kHidden, limit_);
    std::vector<torch::Tensor> parameters;
    for (const auto& module :
         std::initializer_list<std::shared_ptr<torch::nn::Module>>{embedding_.ptr(), lstm_.ptr(), head_.ptr()}) {
      for (const torch::Tensor& parameter : module->parameters()) parameters.push_back(parameter);
    }
    optimizer_ = std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(kLearningRate));
    symbols_.push_back(0);  // kOther's place
  }

  void Observe(const uint64_t* symbols, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      if (history_.size() == 2 * kHistory) history_.erase(history_.begin(), history_.begin() + kHistory);
      history_.push_back(Index(symbols[i]));
      if (++since_training_ < train_every_ || history_.size() <= kStretch) continue;
      since_training_ = 0;
      Train();
    }
    // Once for all of them: only what follows the last one is asked for.
    if (count > 0) Run();
  }

  bool Predict(uint64_t* symbol) const {
    if (next_ == kOther) return false;
    *symbol = symbols_[static_cast<size_t>(next_)];
    return true;
  }

 private:
  int64_t Index(uint64_t symbol) {
    const auto found = index_.find(symbol);
    if (found != index_.end()) return found->second;
    if (symbols_.size() >= limit_) return kOther;
    symbols_.push_back(symbol);
    return index_[symbol] = static_cast<int64_t>(symbols_.size()) - 1;
  }

  torch::Tensor Forward(const torch::Tensor& input) { return head_(std::get<0>(lstm_(embedding_(input)))); }

  void Train() {
    const auto newest = static_cast<int64_t>(history_.size()) - kStretch - 1;
    const auto oldest = static_cast<int64_t>(history_.size() - std::min(history_.size(), kHistory));
    torch::Tensor stretches = torch::empty({kStretch + 1, kStretches}, torch::kLong);
    auto cells = stretches.accessor<int64_t, 2>();
    for (int64_t column = 0; column < kStretches; ++column) {
      const int64_t begin =
          column == 0 ? newest
                      : oldest + static_cast<int64_t>(random_.Below(static_cast<uint64_t>(newest - oldest + 1)));
      for (int64_t row = 0; row <= kStretch; ++row) cells[row][column] = history_[static_cast<size_t>(begin + row)];
    }
    const torch::Tensor scores = Forward(stretches.slice(0, 0, kStretch)).reshape({-1, static_cast<int64_t>(limit_)});
    const torch::Tensor loss = torch::nn::functional::cross_entropy(scores, stretches.slice(0, 1).reshape(-1));
    optimizer_->zero_grad();
    loss.backward();
    optimizer_->step();
  }

  // What follows the newest symbols. From a fresh state: one that was carried along would be of weights that are no
  // more.
  void Run() {
    torch::NoGradGuard no_gradients;
    const size_t count = std::min<size_t>(history_.size(), kStretch);
    const torch::Tensor input =
        torch::from_blob(history_.data() + (history_.size() - count), {static_cast<int64_t>(count), 1}, torch::kLong);
    torch::Tensor scores = Forward(input)[-1][0];
    next_ = scores.slice(0, 0, static_cast<int64_t>(symbols_.size())).argmax().item<int64_t>();
  }

  const uint32_t limit_;
  const uint32_t train_every_;
  misa::sim::Random random_;
  std::unordered_map<uint64_t, int64_t> index_;
  std::vector<uint64_t> symbols_;  // by index
  std::vector<int64_t> history_;
  uint32_t since_training_ = 0;
  int64_t next_ = kOther;
  torch::nn::Embedding embedding_{nullptr};
  torch::nn::LSTM lstm_{nullptr};
  torch::nn::Linear head_{nullptr};
  std::unique_ptr<torch::optim::Adam> optimizer_;
};

void Say(const char* sentence, char* error, size_t error_bytes) {
  if (error_bytes == 0) return;
  std::strncpy(error, sentence, error_bytes - 1);
  error[error_bytes - 1] = '\0';
}

// No exception leaves the library.
template <typename F>
int Guarded(char* error, size_t error_bytes, F body) {
  try {
    body();
    return 0;
  } catch (const std::exception& exception) {
    Say(exception.what(), error, error_bytes);
  } catch (...) {
    Say("an error without a name", error, error_bytes);
  }
  return 1;
}

void* Create(const misa_predictor_options* options, char* error, size_t error_bytes) {
  Lstm* made = nullptr;
  Guarded(error, error_bytes, [&] { made = new Lstm(*options); });
  return made;
}

void Destroy(void* instance) { delete static_cast<Lstm*>(instance); }

int Observe(void* instance, const uint64_t* symbols, size_t count, char* error, size_t error_bytes) {
  return Guarded(error, error_bytes, [&] { static_cast<Lstm*>(instance)->Observe(symbols, count); });
}

int Predict(void* instance, uint64_t* symbol, int* known, char* error, size_t error_bytes) {
  return Guarded(error, error_bytes, [&] { *known = static_cast<Lstm*>(instance)->Predict(symbol) ? 1 : 0; });
}

constexpr misa_predictor_plugin_v1 kPlugin = {
    MISA_PREDICTOR_ABI_VERSION, sizeof(misa_predictor_plugin_v1), "lstm", Create, Destroy, Observe, Predict};

}  // namespace

extern "C" __attribute__((visibility("default"))) const misa_predictor_plugin_v1* misa_predictor_plugin(
    uint32_t abi_version) {
  return abi_version == MISA_PREDICTOR_ABI_VERSION ? &kPlugin : nullptr;
}
