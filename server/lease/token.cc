#include "server/lease/token.h"

#include <sys/random.h>

#include <array>
#include <cerrno>

namespace misa::server {

bool KernelRandom::Fill(uint8_t* bytes, size_t count) {
  while (count > 0) {
    const ssize_t got = getrandom(bytes, count, 0);
    if (got < 0) {
      if (errno == EINTR) continue;
      return false;
    }
    bytes += got;
    count -= static_cast<size_t>(got);
  }
  return true;
}

std::string MakeToken(RandomSource* random) {
  std::array<uint8_t, 32> bytes;
  if (!random->Fill(bytes.data(), bytes.size())) return "";
  static constexpr char kHex[] = "0123456789abcdef";
  std::string token;
  for (const uint8_t byte : bytes) {
    token += kHex[byte >> 4];
    token += kHex[byte & 15];
  }
  return token;
}

}  // namespace misa::server
