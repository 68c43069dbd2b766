#include "kernels/cpu/gradient_statistics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace misa::kernels {
namespace {

// Written from the formats' definitions, apart from the kernel's own conversion.
long double ValueOf(uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const long double sign = (bits & 0x8000) != 0 ? -1 : 1;
  const long double fraction = static_cast<long double>(mantissa) / (1 << mantissa_bits);
  if (exponent == (1 << exponent_bits) - 1) {
    return mantissa != 0 ? std::numeric_limits<long double>::quiet_NaN()
                         : sign * std::numeric_limits<long double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias);
  return sign * std::ldexp(1 + fraction, exponent - bias);
}

struct Format {
  Element element;
  size_t size;
  const char* name;
};

constexpr Format kFormats[] = {{Element::kFloat32, 4, "Float32"},
                               {Element::kFloat64, 8, "Float64"},
                               {Element::kBfloat16, 2, "Bfloat16"},
                               {Element::kFloat16, 2, "Float16"}};

long double At(const char* p, Element element) {
  switch (element) {
    case Element::kFloat32: {
      float value;
      std::memcpy(&value, p, 4);
      return value;
    }
    case Element::kFloat64: {
      double value;
      std::memcpy(&value, p, 8);
      return value;
    }
    case Element::kBfloat16:
    case Element::kFloat16: {
      uint16_t bits;
      std::memcpy(&bits, p, 2);
      return element == Element::kBfloat16 ? ValueOf(bits, 8, 7) : ValueOf(bits, 5, 10);
    }
  }
  return 0;
}

// `count` random finite elements after `skip` elements, in memory aligned for anything.
std::vector<char> Random(const Format& format, size_t count, size_t skip, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<char> bytes((skip + count + 1) * format.size);
  for (size_t i = 0; i < count; ++i) {
    char* at = bytes.data() + (skip + i) * format.size;
    do {
      if (format.size == 4) {
        const auto value = static_cast<float>(std::normal_distribution<>(0.01, 1)(random));
        std::memcpy(at, &value, 4);
      } else if (format.size == 8) {
        const double value = std::normal_distribution<>(0.01, 1)(random);
        std::memcpy(at, &value, 8);
      } else {
        // Any bits of magnitudes that a double's sum of squares holds: subnormal ones are among those of float16.
        auto bits = static_cast<uint16_t>(random());
        if (format.element == Element::kBfloat16) bits = static_cast<uint16_t>((bits & 0x87ff) | 0x3800);
        std::memcpy(at, &bits, 2);
      }
    } while (!std::isfinite(At(at, format.element)));
  }
  return bytes;
}

class GradientStatistics : public ::testing::TestWithParam<Format> {};

TEST_P(GradientStatistics, AgreesWithAReference) {
  const Format& format = GetParam();
  for (const size_t count : {0, 1, 2, 15, 16, 17, 31, 33, 100, 2047, 2048, 2049, 4095, 10007}) {
    const std::vector<char> data = Random(format, count, 0, count);
    long double sum = 0, squares = 0, magnitude = 0;
    for (size_t i = 0; i < count; ++i) {
      const long double value = At(data.data() + i * format.size, format.element);
      sum += value;
      squares += value * value;
      magnitude += std::fabs(value);
    }
    const Sums sums = MeasureAndCopy(data.data(), nullptr, count, format.element);
    // The error of summing in double precision is bounded by the number of additions.
    const double bound = static_cast<double>(count + 1) * std::numeric_limits<double>::epsilon();
    EXPECT_NEAR(sums.sum, static_cast<double>(sum), static_cast<double>(magnitude) * bound) << count;
    EXPECT_NEAR(sums.sum_squares, static_cast<double>(squares), static_cast<double>(squares) * bound) << count;
  }
}

TEST_P(GradientStatistics, CopiesEveryByteAndNoMore) {
  const Format& format = GetParam();
  for (const size_t count : {0, 1, 17, 2048, 4999}) {
    const std::vector<char> data = Random(format, count, 0, 3 * count);
    std::vector<char> copy(data.size() + 64, 0x5a);
    const Sums with = MeasureAndCopy(data.data(), copy.data(), count, format.element);
    const Sums without = MeasureAndCopy(data.data(), nullptr, count, format.element);
    EXPECT_EQ(std::memcmp(copy.data(), data.data(), count * format.size), 0);
    for (size_t i = count * format.size; i < copy.size(); ++i) ASSERT_EQ(copy[i], 0x5a);
    EXPECT_EQ(with.sum, without.sum);
    EXPECT_EQ(with.sum_squares, without.sum_squares);
  }
}

TEST_P(GradientStatistics, GivesTheSameBitsForEveryAlignment) {
  const Format& format = GetParam();
  for (const size_t count : {1, 100, 4099}) {
    const std::vector<char> data = Random(format, count, 0, count);
    const Sums first = MeasureAndCopy(data.data(), nullptr, count, format.element);
    for (size_t skip = 1; skip < 70; ++skip) {
      std::vector<char> moved((skip + count) * format.size), copy((2 * skip + count) * format.size);
      std::memcpy(moved.data() + skip * format.size, data.data(), count * format.size);
      const Sums sums = MeasureAndCopy(moved.data() + skip * format.size, copy.data() + (skip / 2) * format.size, count,
                                       format.element);
      ASSERT_EQ(std::memcmp(&sums, &first, sizeof(sums)), 0) << skip;
      ASSERT_EQ(std::memcmp(copy.data() + (skip / 2) * format.size, data.data(), count * format.size), 0) << skip;
    }
  }
}

// Wherever the one bad element is, in a vector's middle or in the tail, the sums say so, and the copy is exact.
TEST_P(GradientStatistics, NotANumberAndInfinityShow) {
  const Format& format = GetParam();
  constexpr size_t kCount = 2048 + 21;
  for (const size_t where : {size_t{0}, size_t{7}, size_t{16}, size_t{2047}, size_t{2048}, kCount - 1}) {
    for (const bool infinite : {false, true}) {
      std::vector<char> data = Random(format, kCount, 0, where);
      char* at = data.data() + where * format.size;
      const double value = infinite ? -std::numeric_limits<double>::infinity() : std::nan("");
      const auto narrow = static_cast<float>(value);
      uint32_t bits;
      std::memcpy(&bits, &narrow, 4);
      const auto brain = static_cast<uint16_t>(bits >> 16);
      const uint16_t half = infinite ? 0xfc00 : 0x7e01;
      if (format.element == Element::kFloat32) std::memcpy(at, &narrow, 4);
      if (format.element == Element::kFloat64) std::memcpy(at, &value, 8);
      if (format.element == Element::kBfloat16) std::memcpy(at, &brain, 2);
      if (format.element == Element::kFloat16) std::memcpy(at, &half, 2);
      std::vector<char> copy(data.size());
      const Sums sums = MeasureAndCopy(data.data(), copy.data(), kCount, format.element);
      EXPECT_EQ(std::memcmp(copy.data(), data.data(), kCount * format.size), 0);
      if (infinite) {
        EXPECT_EQ(sums.sum, -std::numeric_limits<double>::infinity());
        EXPECT_EQ(sums.sum_squares, std::numeric_limits<double>::infinity());
      } else {
        EXPECT_TRUE(std::isnan(sums.sum)) << where;
        EXPECT_TRUE(std::isnan(sums.sum_squares)) << where;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Elements, GradientStatistics, ::testing::ValuesIn(kFormats),
                         [](const auto& info) { return std::string(info.param.name); });

// Each of the 65,536 patterns alone: zeros of both signs, subnormal ones, infinities, everything.
TEST(HalfPrecision, EveryPatternHasItsValue) {
  for (const Element element : {Element::kFloat16, Element::kBfloat16}) {
    for (uint32_t pattern = 0; pattern <= 0xffff; ++pattern) {
      const auto bits = static_cast<uint16_t>(pattern);
      const auto expected = static_cast<double>(element == Element::kBfloat16 ? ValueOf(bits, 8, 7) : ValueOf(bits, 5, 10));
      const Sums sums = MeasureAndCopy(&bits, nullptr, 1, element);
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(sums.sum)) << pattern;
      } else {
        ASSERT_EQ(sums.sum, expected) << pattern;
        ASSERT_EQ(sums.sum_squares, expected * expected) << pattern;
      }
    }
  }
}

}  // namespace
}  // namespace misa::kernels
