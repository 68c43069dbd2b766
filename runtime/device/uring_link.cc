#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>

#include "runtime/device/link.h"

namespace misa {
namespace {

constexpr uint64_t kBlockBytes = 4ull << 20;
// Blocks in flight for each direction: enough to keep the disk busy, few enough that a demand load does not queue long.
constexpr unsigned kBlocksPerDirection = 4;
constexpr unsigned kRingEntries = 32;

class UringLink final : public Link {
 public:
  explicit UringLink(int fd) : fd_(fd) {}

  ~UringLink() override {
    if (ring_ready_) io_uring_queue_exit(&ring_);
    if (wake_fd_ >= 0) close(wake_fd_);
    close(fd_);
  }

  std::string Start() {
    const int result = io_uring_queue_init(kRingEntries, &ring_, 0);
    if (result < 0) {
      return std::string("The kernel does not offer io_uring (") + std::strerror(-result) +
             "); misa needs it for the disk tier. Where a container's seccomp profile forbids it, allow "
             "io_uring_setup, io_uring_enter and io_uring_register.";
    }
    ring_ready_ = true;
    wake_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_fd_ < 0) return std::string("No eventfd could be made (") + std::strerror(errno) + ").";
    return "";
  }

  void Submit(const Transfer& transfer) override {
    auto job = std::make_unique<Job>();
    job->transfer = transfer;
    job->start = std::chrono::steady_clock::now();
    queue_[Index(transfer.direction)].push_back(std::move(job));
    Fill();
  }

  void Wait(double timeout_seconds, std::vector<Completion>* completions) override {
    ArmWake();
    Fill();
    __kernel_timespec timeout{};
    timeout.tv_sec = static_cast<long long>(timeout_seconds);
    timeout.tv_nsec = static_cast<long long>((timeout_seconds - static_cast<double>(timeout.tv_sec)) * 1e9);
    io_uring_cqe* cqe = nullptr;
    io_uring_submit_and_wait_timeout(&ring_, &cqe, 1, &timeout, nullptr);
    while (io_uring_peek_cqe(&ring_, &cqe) == 0) {
      auto* block = static_cast<Block*>(io_uring_cqe_get_data(cqe));
      const int result = cqe->res;
      io_uring_cqe_seen(&ring_, cqe);
      if (block == &wake_block_) {
        wake_armed_ = false;
        uint64_t count;
        while (read(wake_fd_, &count, sizeof(count)) > 0) {
        }
        continue;
      }
      if (block != nullptr) Finish(block, result, completions);
    }
    Fill();
  }

  void Wake() override {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof(one));
  }

  size_t in_flight() const override { return queue_[0].size() + queue_[1].size(); }

 private:
  struct Job;
  struct Block {
    Job* job = nullptr;
    uint64_t from = 0;
    uint64_t bytes = 0;
  };
  struct Job {
    Transfer transfer;
    std::chrono::steady_clock::time_point start;
    uint64_t submitted = 0;  // bytes handed to the kernel
    unsigned outstanding = 0;
    std::string error;
    std::deque<Block> blocks;  // all there were; the kernel knows them by their addresses
  };

  static size_t Index(Transfer::Direction direction) { return direction == Transfer::Direction::kLoad ? 0 : 1; }

  void ArmWake() {
    if (wake_armed_) return;
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    if (sqe == nullptr) return;
    io_uring_prep_poll_add(sqe, wake_fd_, POLLIN);
    io_uring_sqe_set_data(sqe, &wake_block_);
    wake_armed_ = true;
  }

  void SubmitBlock(Block* block) {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_);
    if (sqe == nullptr) {
      io_uring_submit(&ring_);
      sqe = io_uring_get_sqe(&ring_);
    }
    const Transfer& t = block->job->transfer;
    if (t.direction == Transfer::Direction::kLoad) {
      io_uring_prep_read(sqe, fd_, t.address + block->from, static_cast<unsigned>(block->bytes),
                         t.disk_offset + block->from);
    } else {
      io_uring_prep_write(sqe, fd_, t.address + block->from, static_cast<unsigned>(block->bytes),
                          t.disk_offset + block->from);
    }
    io_uring_sqe_set_data(sqe, block);
  }

  // Transfers of one direction run in order, each with all its blocks before the next one's.
  void Fill() {
    bool any = false;
    for (size_t direction = 0; direction < 2; ++direction) {
      for (auto& job : queue_[direction]) {
        while (blocks_[direction] < kBlocksPerDirection && job->submitted < job->transfer.bytes && job->error.empty()) {
          Block* block = &job->blocks.emplace_back(
              Block{job.get(), job->submitted, std::min(kBlockBytes, job->transfer.bytes - job->submitted)});
          job->submitted += block->bytes;
          ++job->outstanding;
          ++blocks_[direction];
          SubmitBlock(block);
          any = true;
        }
        if (blocks_[direction] >= kBlocksPerDirection) break;
      }
    }
    if (any) io_uring_submit(&ring_);
  }

  void Finish(Block* block, int result, std::vector<Completion>* completions) {
    Job* job = block->job;
    if (result == -EINTR || result == -EAGAIN) {
      SubmitBlock(block);
      return;
    }
    if (result > 0 && static_cast<uint64_t>(result) < block->bytes) {
      // A short transfer: the rest follows. Direct I/O needs whole blocks, so a tail that is not one is an error.
      if (result % 512 == 0) {
        block->from += static_cast<uint64_t>(result);
        block->bytes -= static_cast<uint64_t>(result);
        SubmitBlock(block);
        return;
      }
      result = -EIO;
    }
    if (result <= 0 && job->error.empty()) {
      job->error = result == 0 ? "the file ended before the data did" : std::strerror(-result);
    }
    const size_t direction = Index(job->transfer.direction);
    --job->outstanding;
    --blocks_[direction];
    if (job->outstanding > 0 || (job->error.empty() && job->submitted < job->transfer.bytes)) return;
    Completion completion;
    completion.tag = job->transfer.tag;
    completion.direction = job->transfer.direction;
    completion.bytes = job->transfer.bytes;
    completion.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - job->start).count();
    completion.error = job->error;
    completions->push_back(std::move(completion));
    auto& queue = queue_[direction];
    queue.erase(std::find_if(queue.begin(), queue.end(), [job](const auto& other) { return other.get() == job; }));
  }

  const int fd_;
  io_uring ring_{};
  bool ring_ready_ = false;
  int wake_fd_ = -1;
  bool wake_armed_ = false;
  Block wake_block_;
  std::deque<std::unique_ptr<Job>> queue_[2];
  unsigned blocks_[2] = {0, 0};
};

}  // namespace

std::unique_ptr<Link> MakeUringLink(int fd, std::string* error) {
  auto link = std::make_unique<UringLink>(fd);
  *error = link->Start();
  if (!error->empty()) return nullptr;
  return link;
}

}  // namespace misa
