#include "server/calibration.h"

#include <liburing.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace misa::server {
namespace {

constexpr uint64_t kBlockBytes = 4 << 20;
constexpr unsigned kDepth = 4;  // transfers in flight for each direction

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Freer {
  void operator()(void* memory) const { std::free(memory); }
};
using Buffer = std::unique_ptr<void, Freer>;

// One phase: keeps transfers in flight until the time is over, then waits for the last ones.
class Phase {
 public:
  Phase(int fd, uint64_t blocks) : fd_(fd), blocks_(blocks) {}
  ~Phase() {
    if (ready_) io_uring_queue_exit(&ring_);
  }

  std::string Open() {
    const int result = io_uring_queue_init(2 * kDepth, &ring_, 0);
    if (result < 0) return std::string("io_uring is not available (") + strerror(-result) + ")";
    ready_ = true;
    for (Buffer& buffer : buffers_) {
      buffer.reset(std::aligned_alloc(4096, kBlockBytes));
      if (buffer == nullptr) return "no memory for the blocks";
      std::memset(buffer.get(), 0x5a, kBlockBytes);
    }
    return "";
  }

  // Fills the file when `once` is set: every block is written one time, however long that takes within `seconds`.
  std::string Run(bool reads, bool writes, bool once, double seconds, double* read_rate, double* write_rate) {
    const double start = Seconds();
    uint64_t read_bytes = 0;
    uint64_t write_bytes = 0;
    uint64_t next_read = 0;
    uint64_t next_write = blocks_ / 2;
    if (once) next_write = 0;
    uint64_t started = 0;
    unsigned in_flight = 0;
    double now = start;
    std::string problem;
    const auto submit = [&](unsigned slot) {
      const bool write = slot >= kDepth;
      io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
      uint64_t& next = write ? next_write : next_read;
      const uint64_t block = next++ % blocks_;
      if (write) {
        io_uring_prep_write(sqe, fd_, buffers_[slot].get(), kBlockBytes, block * kBlockBytes);
      } else {
        io_uring_prep_read(sqe, fd_, buffers_[slot].get(), kBlockBytes, block * kBlockBytes);
      }
      io_uring_sqe_set_data(sqe, reinterpret_cast<void*>(static_cast<uintptr_t>(slot)));
      ++in_flight;
      ++started;
    };
    for (unsigned slot = 0; slot < 2 * kDepth; ++slot) {
      const bool write = slot >= kDepth;
      if ((write ? writes : reads) && !(once && started >= blocks_)) submit(slot);
    }
    io_uring_submit(&ring_);
    while (in_flight > 0) {
      io_uring_cqe* cqe = nullptr;
      // A disk that answers nothing for seconds is not worth measuring, and a start must not hang on it.
      __kernel_timespec timeout{2, 0};
      const int waited = io_uring_wait_cqe_timeout(&ring_, &cqe, &timeout);
      if (waited == -EINTR) continue;
      if (waited < 0) return "the disk did not answer in two seconds";
      const auto slot = static_cast<unsigned>(reinterpret_cast<uintptr_t>(io_uring_cqe_get_data(cqe)));
      const int result = cqe->res;
      io_uring_cqe_seen(&ring_, cqe);
      --in_flight;
      if (result <= 0) {
        problem = result == 0 ? "a transfer moved nothing" : std::string("a transfer failed (") + strerror(-result) + ")";
        continue;
      }
      (slot >= kDepth ? write_bytes : read_bytes) += static_cast<uint64_t>(result);
      now = Seconds();
      const bool over = now - start >= seconds || (once && started >= blocks_);
      if (problem.empty() && !over) {
        submit(slot);
        io_uring_submit(&ring_);
      }
    }
    if (!problem.empty()) return problem;
    const double elapsed = std::max(now - start, 1e-6);
    if (read_rate != nullptr) *read_rate = static_cast<double>(read_bytes) / elapsed;
    if (write_rate != nullptr) *write_rate = static_cast<double>(write_bytes) / elapsed;
    filled_blocks_ = started;
    return "";
  }

  uint64_t filled_blocks() const { return filled_blocks_; }
  void set_blocks(uint64_t blocks) { blocks_ = blocks; }

 private:
  const int fd_;
  uint64_t blocks_;
  uint64_t filled_blocks_ = 0;
  bool ready_ = false;
  io_uring ring_{};
  Buffer buffers_[2 * kDepth];
};

}  // namespace

policy::LinkRates DefaultLink() { return {500e6, 400e6, 300e6, 250e6}; }

std::string Calibrate(device::LowerTier* disk, uint64_t file_bytes, double seconds, policy::LinkRates* link) {
  std::unique_ptr<device::TierFile> file;
  device::TierOutcome outcome = disk->Create(&file);
  if (!outcome.ok()) return outcome.sentence;
  // A full disk calibrates on less rather than not at all.
  file_bytes = std::min(file_bytes, disk->FreeBytes() / 4);
  uint64_t blocks = file_bytes / kBlockBytes;
  if (blocks < 4) return "the disk has no room to measure it";
  outcome = file->Reserve(blocks * kBlockBytes);
  if (!outcome.ok()) return outcome.sentence;
  Phase phase(file->fd(), blocks);
  std::string problem = phase.Open();
  if (!problem.empty()) return problem;
  policy::LinkRates measured;
  // The first pass writes every block: reading blocks that were only reserved would measure zeros from nowhere.
  problem = phase.Run(false, true, true, seconds * 0.4, nullptr, &measured.unload);
  if (!problem.empty()) return problem;
  blocks = std::min(blocks, phase.filled_blocks());
  if (blocks < 2) return "the disk is too slow to be measured in " + std::to_string(seconds) + " s";
  phase.set_blocks(blocks);
  problem = phase.Run(true, false, false, seconds * 0.25, &measured.load, nullptr);
  if (!problem.empty()) return problem;
  problem = phase.Run(true, true, false, seconds * 0.35, &measured.duplex_load, &measured.duplex_unload);
  if (!problem.empty()) return problem;
  if (measured.load <= 0 || measured.unload <= 0 || measured.duplex_load <= 0 || measured.duplex_unload <= 0) {
    return "a direction moved nothing";
  }
  measured.duplex_load = std::min(measured.duplex_load, measured.load);
  measured.duplex_unload = std::min(measured.duplex_unload, measured.unload);
  *link = measured;
  return "";
}

}  // namespace misa::server
