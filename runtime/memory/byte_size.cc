#include "runtime/memory/byte_size.h"

#include <cctype>
#include <cstdio>
#include <limits>

namespace misa {
namespace {

struct Unit {
  std::string_view name;
  uint64_t factor;
};

constexpr Unit kUnits[] = {
    {"", 1},
    {"B", 1},
    {"KiB", 1ull << 10},
    {"MiB", 1ull << 20},
    {"GiB", 1ull << 30},
    {"TiB", 1ull << 40},
    {"kB", 1000ull},
    {"KB", 1000ull},
    {"MB", 1000ull * 1000},
    {"GB", 1000ull * 1000 * 1000},
    {"TB", 1000ull * 1000 * 1000 * 1000},
};

std::string Refusal(std::string_view text, std::string_view why) {
  return "\"" + std::string(text) + "\" is not a size in bytes: " + std::string(why) +
         "; write for example 24GiB, 512MiB, 64KiB, 100GB or 1000000";
}

}  // namespace

std::string ParseByteSize(std::string_view text, uint64_t* bytes) {
  std::string_view rest = text;
  while (!rest.empty() && std::isspace(static_cast<unsigned char>(rest.front()))) rest.remove_prefix(1);
  while (!rest.empty() && std::isspace(static_cast<unsigned char>(rest.back()))) rest.remove_suffix(1);
  size_t at = 0;
  uint64_t whole = 0;
  const auto digit = [&] { return at < rest.size() && rest[at] >= '0' && rest[at] <= '9'; };
  if (!digit()) return Refusal(text, "it does not start with a digit");
  constexpr uint64_t kMax = std::numeric_limits<uint64_t>::max();
  for (; digit(); ++at) {
    const uint64_t next = static_cast<uint64_t>(rest[at] - '0');
    if (whole > (kMax - next) / 10) return Refusal(text, "the number is too large");
    whole = whole * 10 + next;
  }
  // The fraction as numerator and denominator, so that "0.1GB" is exact. Eighteen digits fit beside any unit.
  uint64_t numerator = 0;
  uint64_t denominator = 1;
  if (at < rest.size() && rest[at] == '.') {
    ++at;
    if (!digit()) return Refusal(text, "digits must follow the decimal point");
    for (int count = 0; digit(); ++at, ++count) {
      if (count == 9) return Refusal(text, "it has more than nine decimals");
      numerator = numerator * 10 + static_cast<uint64_t>(rest[at] - '0');
      denominator *= 10;
    }
  }
  std::string_view name = rest.substr(at);
  while (!name.empty() && name.front() == ' ') name.remove_prefix(1);
  for (const Unit& unit : kUnits) {
    if (name != unit.name) continue;
    if (whole > kMax / unit.factor) return Refusal(text, "the number is too large");
    const auto fraction = static_cast<uint64_t>(static_cast<unsigned __int128>(numerator) * unit.factor / denominator);
    const uint64_t scaled = whole * unit.factor;
    if (scaled > kMax - fraction) return Refusal(text, "the number is too large");
    *bytes = scaled + fraction;
    return "";
  }
  return Refusal(text, "the unit \"" + std::string(name) + "\" is unknown");
}

std::string FormatByteSize(uint64_t bytes) {
  constexpr Unit kBinary[] = {{"TiB", 1ull << 40}, {"GiB", 1ull << 30}, {"MiB", 1ull << 20}, {"KiB", 1ull << 10}};
  for (const Unit& unit : kBinary) {
    if (bytes < unit.factor) continue;
    char text[64];
    if (bytes % unit.factor == 0) {
      std::snprintf(text, sizeof text, "%llu%s", static_cast<unsigned long long>(bytes / unit.factor), unit.name.data());
    } else {
      std::snprintf(text, sizeof text, "%.2f%s", static_cast<double>(bytes) / static_cast<double>(unit.factor),
                    unit.name.data());
    }
    return text;
  }
  return std::to_string(bytes) + "B";
}

}  // namespace misa
