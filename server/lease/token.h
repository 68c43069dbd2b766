// Session tokens, and the randomness they are made of.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace misa::server {

class RandomSource {
 public:
  virtual ~RandomSource() = default;
  // False where there is no randomness: nothing may be issued then.
  virtual bool Fill(uint8_t* bytes, size_t count) = 0;
};

class KernelRandom : public RandomSource {
 public:
  bool Fill(uint8_t* bytes, size_t count) override;
};

// 32 random bytes in hexadecimal; "" where there is no randomness.
std::string MakeToken(RandomSource* random);

}  // namespace misa::server
