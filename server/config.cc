#include "server/config.h"

#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cmath>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <numeric>
#include <set>
#include <sstream>

#include "runtime/device/emulated/twin.h"
#include "runtime/memory/byte_size.h"
#include "runtime/memory/lease_protocol.h"

namespace misa::server {
namespace {

size_t EditDistance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
      diagonal = above;
    }
  }
  return row[b.size()];
}

// Walks one document and collects every mistake.
class Reader {
 public:
  using Field = std::pair<std::string, std::function<void(const YAML::Node&, const std::string&)>>;

  Reader(std::string name, std::vector<std::string>* errors) : name_(std::move(name)), errors_(errors) {}

  void Fail(const YAML::Mark& mark, const std::string& sentence) {
    const int line = mark.line < 0 ? 1 : mark.line + 1;
    const int column = mark.column < 0 ? 1 : mark.column + 1;
    errors_->push_back(name_ + ":" + std::to_string(line) + ":" + std::to_string(column) + ": " + sentence);
  }

  // A mapping with these fields and no others.
  void Map(const YAML::Node& node, const std::string& path, const std::vector<Field>& fields) {
    if (!node.IsMap()) {
      Fail(node.Mark(), (path.empty() ? std::string("the file") : path) + " must be a mapping with the keys " + Names(fields));
      return;
    }
    std::set<std::string> seen;
    for (const auto& item : node) {
      if (!item.first.IsScalar()) {
        Fail(item.first.Mark(), "a key must be a plain word");
        continue;
      }
      const std::string key = item.first.Scalar();
      const std::string full = path.empty() ? key : path + "." + key;
      const auto field = std::find_if(fields.begin(), fields.end(), [&](const Field& f) { return f.first == key; });
      if (field == fields.end()) {
        Fail(item.first.Mark(), "the key " + full + " is unknown" + Nearest(key, fields) + "; known here are " + Names(fields));
      } else if (!seen.insert(key).second) {
        Fail(item.first.Mark(), "the key " + full + " is given twice");
      } else {
        field->second(item.second, full);
      }
    }
  }

  std::function<void(const YAML::Node&, const std::string&)> Section(std::vector<Field> fields) {
    return [this, fields = std::move(fields)](const YAML::Node& node, const std::string& path) { Map(node, path, fields); };
  }

  std::function<void(const YAML::Node&, const std::string&)> Text(std::string* out,
                                                                  std::function<std::string(const std::string&)> check) {
    return [this, out, check = std::move(check)](const YAML::Node& node, const std::string& path) {
      if (!node.IsScalar()) return Fail(node.Mark(), path + " must be a text");
      const std::string problem = check ? check(node.Scalar()) : "";
      if (!problem.empty()) return Fail(node.Mark(), path + " " + problem);
      *out = node.Scalar();
    };
  }

  std::function<void(const YAML::Node&, const std::string&)> Bool(bool* out) {
    return [this, out](const YAML::Node& node, const std::string& path) {
      if (!node.IsScalar() || !YAML::convert<bool>::decode(node, *out)) Fail(node.Mark(), path + " must be true or false");
    };
  }

  std::function<void(const YAML::Node&, const std::string&)> Integer(uint32_t* out, uint32_t least, uint32_t most) {
    return [=, this](const YAML::Node& node, const std::string& path) {
      uint64_t value = 0;
      const bool digits = node.IsScalar() && !node.Scalar().empty() && node.Scalar().size() <= 18 &&
                          node.Scalar().find_first_not_of("0123456789") == std::string::npos;
      if (digits) value = std::strtoull(node.Scalar().c_str(), nullptr, 10);
      if (!digits || value < least || value > most) {
        return Fail(node.Mark(), path + " must be a whole number from " + std::to_string(least) + " to " + std::to_string(most) +
                                     Given(node));
      }
      *out = static_cast<uint32_t>(value);
    };
  }

  std::function<void(const YAML::Node&, const std::string&)> Number(double* out, std::function<bool(double)> allowed,
                                                                    std::string range) {
    return [=, this](const YAML::Node& node, const std::string& path) {
      double value = 0;
      if (!node.IsScalar() || !YAML::convert<double>::decode(node, value) || !std::isfinite(value) || !allowed(value)) {
        return Fail(node.Mark(), path + " must be a number " + range + Given(node));
      }
      *out = value;
    };
  }

  // A list of texts, each not empty; the list may be.
  std::function<void(const YAML::Node&, const std::string&)> Words(std::vector<std::string>* out) {
    return [=, this](const YAML::Node& node, const std::string& path) {
      const std::string allowed = path + " must be a list of at most 1000 words, such as [embedding, norm] or []";
      if (!node.IsSequence() || node.size() > 1000) return Fail(node.Mark(), allowed);
      std::vector<std::string> words;
      for (const YAML::Node& item : node) {
        if (!item.IsScalar() || item.Scalar().empty()) return Fail(item.Mark(), allowed);
        words.push_back(item.Scalar());
      }
      *out = std::move(words);
    };
  }

  std::function<void(const YAML::Node&, const std::string&)> Bytes(uint64_t* out,
                                                                   std::function<std::string(uint64_t)> check) {
    return [=, this](const YAML::Node& node, const std::string& path) {
      if (!node.IsScalar()) return Fail(node.Mark(), path + " must be a size in bytes, for example 24GiB");
      uint64_t value = 0;
      std::string problem = ParseByteSize(node.Scalar(), &value);
      if (!problem.empty()) return Fail(node.Mark(), path + ": " + problem);
      problem = check(value);
      if (!problem.empty()) return Fail(node.Mark(), path + " " + problem + Given(node));
      *out = value;
    };
  }

  // Bytes a second, written as a size or as a plain number.
  std::function<void(const YAML::Node&, const std::string&)> Rate(double* out) {
    return [=, this](const YAML::Node& node, const std::string& path) {
      double value = 0;
      uint64_t bytes = 0;
      if (node.IsScalar() && ParseByteSize(node.Scalar(), &bytes).empty()) {
        value = static_cast<double>(bytes);
      } else if (!node.IsScalar() || !YAML::convert<double>::decode(node, value)) {
        value = 0;
      }
      if (!std::isfinite(value) || value <= 0) {
        return Fail(node.Mark(), path + " must be a rate in bytes a second above 0, for example 2GB or 2.0e9" + Given(node));
      }
      *out = value;
    };
  }

  std::function<void(const YAML::Node&, const std::string&)> Capacity(Amount* out) {
    return [=, this](const YAML::Node& node, const std::string& path) {
      const std::string allowed = path + " must be a size above 0 (for example 24GiB) or a share from 1% to 100%";
      if (!node.IsScalar()) return Fail(node.Mark(), allowed);
      const std::string& text = node.Scalar();
      if (!text.empty() && text.back() == '%') {
        char* end = nullptr;
        const std::string number = text.substr(0, text.size() - 1);
        const double percent = std::strtod(number.c_str(), &end);
        if (number.empty() || *end != '\0' || !(percent >= 1 && percent <= 100)) return Fail(node.Mark(), allowed + Given(node));
        *out = {0, percent / 100};
        return;
      }
      uint64_t value = 0;
      const std::string problem = ParseByteSize(text, &value);
      if (!problem.empty()) return Fail(node.Mark(), allowed + ": " + problem);
      if (value == 0) return Fail(node.Mark(), allowed + Given(node));
      *out = {value, 0};
    };
  }

 private:
  static std::string Given(const YAML::Node& node) {
    return node.IsScalar() ? ", and is \"" + node.Scalar() + "\"" : std::string();
  }

  static std::string Names(const std::vector<Field>& fields) {
    std::string names;
    for (const Field& field : fields) names += (names.empty() ? "" : ", ") + field.first;
    return names;
  }

  static std::string Nearest(const std::string& key, const std::vector<Field>& fields) {
    std::string best;
    size_t distance = std::max<size_t>(2, key.size() / 2) + 1;
    for (const Field& field : fields) {
      const size_t d = EditDistance(key, field.first);
      if (d < distance) {
        distance = d;
        best = field.first;
      }
    }
    return best.empty() ? "" : " (did you mean " + best + "?)";
  }

  const std::string name_;
  std::vector<std::string>* const errors_;
};

std::string CheckAbsolute(const std::string& path) {
  if (!path.empty() && path.front() == '/') return "";
  return "must be an absolute path, and is \"" + path + "\"";
}

// HOST:PORT with a numeric host; IPv6 in brackets.
std::string CheckListen(const std::string& listen) {
  const size_t colon = listen.rfind(':');
  const std::string port = colon == std::string::npos ? "" : listen.substr(colon + 1);
  if (colon == std::string::npos || colon == 0 || port.empty() || port.size() > 5 ||
      port.find_first_not_of("0123456789") != std::string::npos || std::stoul(port) > 65535) {
    return "must be HOST:PORT, for example 127.0.0.1:9465 (port 0: any free one), and is \"" + listen + "\"";
  }
  return "";
}

bool IsLoopback(const std::string& listen) {
  const std::string host = listen.substr(0, listen.rfind(':'));
  return host.rfind("127.", 0) == 0 || host == "[::1]" || host == "localhost";
}

// What needs more than one key.
std::string CheckDevice(const Config& config) {
  const Config::Device& d = config.device;
  if (!config.emulated()) {
    if (d.twin.empty() && d.compute_flops == 0 && d.duplex_factor == 0 && d.latency_seconds < 0) return "";
    return "device.twin, compute_flops, duplex_factor and latency_seconds belong to an emulated device: set device.kind: "
           "emulated, or leave them out";
  }
  if (d.twin.empty() && (config.link.load_bytes_per_second == 0 || config.link.unload_bytes_per_second == 0)) {
    return "an emulated device needs a link: give device.twin (" + device::TwinNames() +
           "), or link.load_bytes_per_second and link.unload_bytes_per_second";
  }
  if (d.twin.empty() && d.compute_flops > 0) {
    return "device.compute_flops says what a twin's rate is a part of, and no device.twin is given";
  }
  const Config::Link& l = config.link;
  if ((l.duplex_load_bytes_per_second > l.load_bytes_per_second && l.load_bytes_per_second > 0) ||
      (l.duplex_unload_bytes_per_second > l.unload_bytes_per_second && l.unload_bytes_per_second > 0)) {
    return "an emulated link cannot be faster in a direction while the other one is busy than it is alone: lower "
           "link.duplex_load_bytes_per_second and link.duplex_unload_bytes_per_second";
  }
  return "";
}

}  // namespace

uint64_t Amount::Of(uint64_t total) const {
  return share > 0 ? static_cast<uint64_t>(share * static_cast<double>(total)) : bytes;
}

bool Config::HasLink() const {
  return link.load_bytes_per_second > 0 && link.unload_bytes_per_second > 0 && link.duplex_load_bytes_per_second > 0 &&
         link.duplex_unload_bytes_per_second > 0;
}

std::vector<std::string> ParseConfig(const std::string& text, const std::string& name, Config* config) {
  std::vector<std::string> errors;
  Config result;
  const char* variable = std::getenv(kRuntimeDirectoryVariable);
  result.runtime_dir = variable != nullptr && *variable != '\0' ? variable : kDefaultRuntimeDirectory;
  Reader reader(name, &errors);
  YAML::Node root;
  try {
    root = YAML::Load(text);
  } catch (const YAML::Exception& exception) {
    reader.Fail(exception.mark, "this is not YAML (" + exception.msg + ")");
    return errors;
  }
  const auto share = [](double v) { return v >= 0 && v <= 1; };
  const auto no_check = [](uint64_t) { return std::string(); };
  const auto above_0 = [](double v) { return v > 0; };
  const auto one_of = [](const std::string& one, const std::string& other) {
    return [=](const std::string& word) {
      return word == one || word == other ? std::string() : "must be " + one + " or " + other + ", and is \"" + word + "\"";
    };
  };
  std::string signal = "variance";
  std::string residency = "plan";
  GuardOptions& guards = result.policy.guards;
  // Where both are given, for checks that need two keys.
  YAML::Mark listen_mark = YAML::Mark::null_mark();
  YAML::Mark policy_mark = YAML::Mark::null_mark();
  if (!root.IsNull()) {
    try {
      reader.Map(
          root, "",
          {{"runtime_dir", reader.Text(&result.runtime_dir, CheckAbsolute)},
           {"device", reader.Section({{"kind", reader.Text(&result.device.kind,
                                                           [](const std::string& kind) {
                                                             const bool known = kind == "cpu" || kind == "emulated";
                                                             return known ? std::string()
                                                                          : "must be cpu or emulated (no other kind is known to "
                                                                            "this build), and is \"" + kind + "\"";
                                                           })},
                                      {"twin", reader.Text(&result.device.twin,
                                                           [](const std::string& twin) {
                                                             return device::FindTwin(twin) != nullptr
                                                                        ? std::string()
                                                                        : "must be one of " + device::TwinNames() +
                                                                              ", and is \"" + twin + "\"";
                                                           })},
                                      {"compute_flops", reader.Number(&result.device.compute_flops,
                                                                      [](double v) { return v > 0; },
                                                                      "of operations a second above 0")},
                                      {"duplex_factor", reader.Number(&result.device.duplex_factor,
                                                                      [](double v) { return v > 0 && v <= 1; },
                                                                      "above 0 and up to 1")},
                                      {"latency_seconds", reader.Number(&result.device.latency_seconds,
                                                                        [](double v) { return v >= 0 && v <= 1; },
                                                                        "from 0 to 1")},
                                      {"capacity", reader.Capacity(&result.device.capacity)},
                                      {"chunk", reader.Bytes(&result.device.chunk_bytes, [](uint64_t v) {
                                         const bool fits = v >= 4096 && v <= (1ull << 30) && (v & (v - 1)) == 0;
                                         return fits ? std::string() : std::string("must be a power of two from 4KiB to 1GiB");
                                       })}})},
           {"host", reader.Section({{"capacity", reader.Capacity(&result.host.capacity)}})},
           {"disk", reader.Section({{"directory", reader.Text(&result.disk.directory, CheckAbsolute)},
                                    {"capacity", reader.Capacity(&result.disk.capacity)},
                                    {"calibrate", reader.Bool(&result.disk.calibrate)}})},
           {"link", reader.Section({{"load_bytes_per_second", reader.Rate(&result.link.load_bytes_per_second)},
                                    {"unload_bytes_per_second", reader.Rate(&result.link.unload_bytes_per_second)},
                                    {"duplex_load_bytes_per_second", reader.Rate(&result.link.duplex_load_bytes_per_second)},
                                    {"duplex_unload_bytes_per_second", reader.Rate(&result.link.duplex_unload_bytes_per_second)}})},
           {"metrics", [&](const YAML::Node& node, const std::string& path) {
              listen_mark = node.Mark();
              if (node.IsMap() && node["listen"]) listen_mark = node["listen"].Mark();
              reader.Map(node, path,
                         {{"listen", reader.Text(&result.metrics.listen, CheckListen)},
                          {"allow_remote", reader.Bool(&result.metrics.allow_remote)},
                          {"module_series_limit", reader.Integer(&result.metrics.module_series_limit, 0, 99)}});
            }},
           {"events", reader.Section({{"file", reader.Text(&result.events.file,
                                                           [](const std::string& path) {
                                                             return path.empty() ? std::string() : CheckAbsolute(path);
                                                           })},
                                      {"memory", reader.Integer(&result.events.memory, 1, 1'000'000)}})},
           {"policy", [&](const YAML::Node& node, const std::string& path) {
              policy_mark = node.Mark();
              reader.Map(node, path,
                         {{"alpha", reader.Number(&result.policy.alpha, [](double v) { return v > 0 && v <= 1; },
                                                  "above 0 and up to 1")},
                          {"hot", reader.Number(&result.policy.hot, share, "from 0 to 1")},
                          {"cold", reader.Number(&result.policy.cold, share, "from 0 to 1")},
                          {"reserve", reader.Bytes(&result.policy.reserve_bytes, no_check)},
                          {"window", reader.Integer(&result.policy.window, 1, 10000)},
                          {"signal", reader.Text(&signal, one_of("variance", "squared_norm"))},
                          {"residency", reader.Text(&residency, one_of("plan", "importance"))}});
            }},
           {"guards",
            reader.Section(
                {{"wait_for_stable_loss", reader.Bool(&guards.wait_for_stable_loss)},
                 {"stable_window", reader.Integer(&guards.stability.window, 4, 100000)},
                 {"stable_tolerance", reader.Number(&guards.stability.tolerance, above_0, "above 0")},
                 {"stable_hold", reader.Integer(&guards.stability.hold, 1, 100000)},
                 {"watch_swings", reader.Bool(&guards.watch_swings)},
                 {"swing_window", reader.Integer(&guards.swings.window, 12, 1024)},
                 {"swing_correlation", reader.Number(&guards.swings.correlation, [](double v) { return v > 0 && v < 1; },
                                                     "above 0 and below 1")},
                 {"swing_amplitude", reader.Number(&guards.swings.least_amplitude, [](double v) { return v >= 0; },
                                                   "of at least 0")},
                 {"swing_alpha_factor", reader.Number(&guards.response.alpha_factor, [](double v) { return v >= 1; },
                                                      "of at least 1")},
                 {"swing_hot_step", reader.Number(&guards.response.hot_step, share, "from 0 to 1")},
                 {"swing_levels", reader.Integer(&guards.response.most_levels, 1, 100)},
                 {"swing_calm_steps", reader.Integer(&guards.response.calm_steps, 1, 1'000'000)},
                 {"pins", reader.Words(&guards.pins)},
                 {"sparse_attention", reader.Words(&guards.sparse_attention)}})},
           {"limits", reader.Section({{"sessions", reader.Integer(&result.limits.sessions, 1, 4096)},
                                      {"queue", reader.Integer(&result.limits.queue, 16, 1'000'000)}})}});
    } catch (const YAML::Exception& exception) {
      reader.Fail(exception.mark, "this cannot be read (" + exception.msg + ")");
    }
  }
  if (errors.empty()) {
    const std::string problem = CheckDevice(result);
    if (!problem.empty()) reader.Fail(root["device"] ? root["device"].Mark() : YAML::Mark::null_mark(), problem);
  }
  result.policy.signal = signal == "variance" ? policy::Signal::kVariance : policy::Signal::kSquaredNorm;
  result.policy.keep_hot = residency == "importance";
  if (errors.empty() && result.policy.cold >= result.policy.hot) {
    reader.Fail(policy_mark, "policy.cold must be below policy.hot: a module between them keeps what it was");
  }
  if (errors.empty() && !IsLoopback(result.metrics.listen) && !result.metrics.allow_remote) {
    reader.Fail(listen_mark, "metrics.listen is " + result.metrics.listen +
                                 ", which other machines can reach, and the metrics are plain HTTP without a password; use "
                                 "127.0.0.1, or set metrics.allow_remote: true");
  }
  if (errors.empty()) *config = result;
  return errors;
}

std::vector<std::string> LoadConfig(const std::string& path, Config* config) {
  if (path.empty()) return ParseConfig("", "defaults", config);
  std::ifstream in(path);
  if (!in) return {path + ":1:1: the file cannot be read (" + std::string(strerror(errno)) + ")"};
  std::stringstream text;
  text << in.rdbuf();
  if (in.bad()) return {path + ":1:1: the file cannot be read"};
  return ParseConfig(text.str(), path, config);
}

std::vector<std::string> RestartKeys(const Config& before, const Config& after) {
  std::vector<std::string> keys;
  if (before.runtime_dir != after.runtime_dir) keys.push_back("runtime_dir");
  if (!(before.device == after.device)) keys.push_back("device");
  if (!(before.disk == after.disk)) keys.push_back("disk");
  if (!(before.host == after.host)) keys.push_back("host");
  if (!(before.link == after.link)) keys.push_back("link");
  if (!(before.metrics == after.metrics)) keys.push_back("metrics");
  if (before.events.memory != after.events.memory) keys.push_back("events.memory");
  if (!(before.limits == after.limits)) keys.push_back("limits");
  return keys;
}

}  // namespace misa::server
