#include "client/cli/format.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "google/protobuf/descriptor.h"

namespace misa::cli {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

namespace {

constexpr char kColumnGap[] = "  ";
constexpr char kBold[] = "\033[1m";
constexpr char kPlain[] = "\033[0m";

// "RESIDENCY_DISK" of enumeration "Residency" is "disk".
std::string EnumWord(const google::protobuf::EnumValueDescriptor& value) {
  std::string prefix;
  for (const char c : value.type()->name()) {
    if (absl::ascii_isupper(c) && !prefix.empty()) prefix += '_';
    prefix += absl::ascii_toupper(c);
  }
  absl::string_view word = value.name();
  absl::ConsumePrefix(&word, prefix + "_");
  return absl::AsciiStrToLower(word);
}

// JSON has no infinity and no NaN.
nlohmann::json NumberOrNull(double value) {
  return std::isfinite(value) ? nlohmann::json(value) : nlohmann::json(nullptr);
}

nlohmann::json SingleToJson(const Message& message, const FieldDescriptor& field) {
  const Reflection& reflection = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return reflection.GetInt32(message, &field);
    case FieldDescriptor::CPPTYPE_INT64:
      return reflection.GetInt64(message, &field);
    case FieldDescriptor::CPPTYPE_UINT32:
      return reflection.GetUInt32(message, &field);
    case FieldDescriptor::CPPTYPE_UINT64:
      return reflection.GetUInt64(message, &field);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return NumberOrNull(reflection.GetDouble(message, &field));
    case FieldDescriptor::CPPTYPE_FLOAT:
      return NumberOrNull(reflection.GetFloat(message, &field));
    case FieldDescriptor::CPPTYPE_BOOL:
      return reflection.GetBool(message, &field);
    case FieldDescriptor::CPPTYPE_ENUM:
      return EnumWord(*reflection.GetEnum(message, &field));
    case FieldDescriptor::CPPTYPE_STRING:
      return reflection.GetString(message, &field);
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return ToJson(reflection.GetMessage(message, &field));
  }
  return nullptr;
}

nlohmann::json RepeatedToJson(const Message& message, const FieldDescriptor& field) {
  const Reflection& reflection = *message.GetReflection();
  nlohmann::json list = nlohmann::json::array();
  for (int i = 0; i < reflection.FieldSize(message, &field); ++i) {
    switch (field.cpp_type()) {
      case FieldDescriptor::CPPTYPE_MESSAGE:
        list.push_back(ToJson(reflection.GetRepeatedMessage(message, &field, i)));
        break;
      case FieldDescriptor::CPPTYPE_STRING:
        list.push_back(reflection.GetRepeatedString(message, &field, i));
        break;
      case FieldDescriptor::CPPTYPE_UINT32:
        list.push_back(reflection.GetRepeatedUInt32(message, &field, i));
        break;
      case FieldDescriptor::CPPTYPE_UINT64:
        list.push_back(reflection.GetRepeatedUInt64(message, &field, i));
        break;
      case FieldDescriptor::CPPTYPE_ENUM:
        list.push_back(EnumWord(*reflection.GetRepeatedEnum(message, &field, i)));
        break;
      case FieldDescriptor::CPPTYPE_DOUBLE:
        list.push_back(NumberOrNull(reflection.GetRepeatedDouble(message, &field, i)));
        break;
      default:  // The contract has no lists of other kinds.
        break;
    }
  }
  return list;
}

// `value` with three significant digits: "1.27", "12.7", "127".
std::string ThreeDigits(double value) {
  const int decimals = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return absl::StrFormat("%.*f", decimals, value);
}

}  // namespace

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

void Table::AddRow(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

std::string Table::Render(bool bold_titles) const {
  std::vector<size_t> widths;
  for (const Column& column : columns_) widths.push_back(DisplayWidth(column.title));
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], DisplayWidth(row[i]));
  }
  const auto line = [&](const auto& cell_of) {
    std::string text;
    for (size_t i = 0; i < columns_.size(); ++i) {
      const std::string& cell = cell_of(i);
      const std::string padding(widths[i] - DisplayWidth(cell), ' ');
      if (i > 0) text += kColumnGap;
      text += columns_[i].alignment == Alignment::kRight ? padding + cell : cell + padding;
    }
    absl::StripTrailingAsciiWhitespace(&text);
    return text;
  };
  const std::string titles = line([&](size_t i) -> const std::string& { return columns_[i].title; });
  std::string text = bold_titles ? absl::StrCat(kBold, titles, kPlain, "\n") : absl::StrCat(titles, "\n");
  for (const auto& row : rows_) {
    absl::StrAppend(&text, line([&](size_t i) -> const std::string& { return row[i]; }), "\n");
  }
  return text;
}

size_t DisplayWidth(const std::string& text) {
  // Bytes 10xxxxxx continue a character that was counted already.
  return std::count_if(text.begin(), text.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
}

std::string FormatSeconds(double seconds) {
  if (!std::isfinite(seconds) || seconds < 0) return "-";
  if (seconds == 0) return "0 s";
  if (seconds < 0.0009995) return absl::StrCat(ThreeDigits(seconds * 1e6), " µs");
  if (seconds < 0.9995) return absl::StrCat(ThreeDigits(seconds * 1e3), " ms");
  if (seconds < 119.5) return absl::StrCat(ThreeDigits(seconds), " s");
  const int64_t whole = std::llround(seconds);
  if (whole < 2 * 3600) return absl::StrFormat("%d min %02d s", whole / 60, whole % 60);
  if (whole < 48 * 3600) return absl::StrFormat("%d h %02d min", whole / 3600, whole / 60 % 60);
  return absl::StrFormat("%d d %02d h", whole / 86400, whole / 3600 % 24);
}

std::string FormatRate(double bytes_per_second) {
  if (!std::isfinite(bytes_per_second) || bytes_per_second <= 0) return "-";
  if (bytes_per_second < 999.5e6) return absl::StrCat(ThreeDigits(bytes_per_second / 1e6), " MB/s");
  return absl::StrCat(ThreeDigits(bytes_per_second / 1e9), " GB/s");
}

std::string FormatCount(uint64_t count) {
  const double value = static_cast<double>(count);
  if (count < 1000) return absl::StrCat(count);
  if (value < 999.5e3) return absl::StrCat(ThreeDigits(value / 1e3), " k");
  if (value < 999.5e6) return absl::StrCat(ThreeDigits(value / 1e6), " M");
  return absl::StrCat(ThreeDigits(value / 1e9), " G");
}

std::string FormatResidency(v1::Residency residency) {
  const auto* value = v1::Residency_descriptor()->FindValueByNumber(residency);
  if (value == nullptr || residency == v1::RESIDENCY_UNSPECIFIED) return "-";
  return EnumWord(*value);
}

std::string FormatMode(v1::Mode mode) {
  const auto* value = v1::Mode_descriptor()->FindValueByNumber(mode);
  if (value == nullptr || mode == v1::MODE_UNSPECIFIED) return "-";
  return EnumWord(*value);
}

std::string Printable(const std::string& text) {
  std::string safe = text;
  for (char& c : safe) {
    if (absl::ascii_iscntrl(c)) c = '?';
  }
  return safe;
}

nlohmann::json ToJson(const Message& message) {
  nlohmann::json object = nlohmann::json::object();
  const auto& descriptor = *message.GetDescriptor();
  for (int i = 0; i < descriptor.field_count(); ++i) {
    const FieldDescriptor& field = *descriptor.field(i);
    object[field.name()] = field.is_repeated() ? RepeatedToJson(message, field) : SingleToJson(message, field);
  }
  return object;
}

}  // namespace misa::cli
