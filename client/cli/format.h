// How misactl shows things: tables for people, JSON for programs. Pure functions of their inputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "google/protobuf/message.h"
#include "misa/v1/types.pb.h"
#include "nlohmann/json.hpp"

namespace misa::cli {

enum class Alignment { kLeft, kRight };

struct Column {
  std::string title;
  Alignment alignment = Alignment::kLeft;
};

// Rows under titles, columns padded with spaces to their widest cell and parted by two; never a tab.
class Table {
 public:
  explicit Table(std::vector<Column> columns);

  // A row has one cell for each column.
  void AddRow(std::vector<std::string> cells);

  size_t row_count() const { return rows_.size(); }

  // `bold_titles` adds the terminal's escape codes around the line of titles.
  std::string Render(bool bold_titles) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// Columns that `text` takes on a terminal: its UTF-8 characters, each counted once.
size_t DisplayWidth(const std::string& text);

// "850 µs", "12.3 ms", "1.27 s", "4 min 05 s", "3 h 12 min", "2 d 04 h"; "-" for a negative value.
std::string FormatSeconds(double seconds);

// "1.1 GB/s", or "-" when it was never measured (0).
std::string FormatRate(double bytes_per_second);

// "27.4 M" for 27400000.
std::string FormatCount(uint64_t count);

// "disk" for RESIDENCY_DISK, "-" when unspecified.
std::string FormatResidency(v1::Residency residency);

// "exact" for MODE_EXACT, "-" when unspecified.
std::string FormatMode(v1::Mode mode);

// Text from a trainer made safe for a terminal: control characters become '?'.
std::string Printable(const std::string& text);

// Every field of a message under its own name: 64-bit integers as plain numbers, enumerations as lower-case words
// without their prefix, fields that are zero included.
nlohmann::json ToJson(const google::protobuf::Message& message);

}  // namespace misa::cli
