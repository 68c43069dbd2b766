#include "runtime/device/modelled_link.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace misa {
namespace {

using Clock = std::chrono::steady_clock;

// Copied in parts, so that the end of the link does not wait for a long copy.
constexpr uint64_t kPartBytes = 4ull << 20;

class ModelledLink final : public Link {
 public:
  ModelledLink(int fd, const LinkModelOptions& options) : fd_(fd), rates_(options.rates), model_(options) {
    stream_ = std::thread([this] { Stream(); });
  }

  ~ModelledLink() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    stream_.join();
    close(fd_);
  }

  void Submit(const Transfer& transfer) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const double now = Now();
      const uint64_t serial = next_serial_++;
      jobs_[serial] = {transfer, now, false, ""};
      model_.Submit(transfer.direction, transfer.bytes, serial, now);
      to_copy_.push_back(serial);
    }
    work_.notify_one();
  }

  void Wait(double timeout_seconds, std::vector<Completion>* completions) override {
    std::unique_lock<std::mutex> lock(mutex_);
    const double end = Now() + timeout_seconds;
    const size_t before = completions->size();
    for (;;) {
      const double now = Now();
      for (const LinkModel::Ended& ended : model_.TakeEnded(now)) ended_[ended.tag] = ended.seconds;
      Collect(now, completions);
      if (std::exchange(woken_, false) || completions->size() > before || now >= end) return;
      const double look = std::min(end, model_.NextEnd());
      changed_.wait_until(lock, start_ + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(look)));
    }
  }

  void Wake() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      woken_ = true;
    }
    changed_.notify_all();
  }

  size_t in_flight() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return jobs_.size();
  }

  policy::LinkRates known_rates() const override { return rates_; }

  double late_seconds() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return late_seconds_;
  }

 private:
  struct Job {
    Transfer transfer;
    double submitted = 0;
    bool copied = false;
    std::string error;
  };

  double Now() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  // Jobs whose bytes have arrived and whose time is over.
  void Collect(double now, std::vector<Completion>* completions) {
    for (auto ended = ended_.begin(); ended != ended_.end();) {
      const auto found = jobs_.find(ended->first);
      if (!found->second.copied) {
        ++ended;
        continue;
      }
      Job& job = found->second;
      late_seconds_ += std::max(0.0, now - ended->second);
      completions->push_back(
          {job.transfer.tag, job.transfer.direction, job.transfer.bytes, now - job.submitted, std::move(job.error)});
      jobs_.erase(found);
      ended = ended_.erase(ended);
    }
  }

  void Stream() {
    pthread_setname_np(pthread_self(), "misa-stream");
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      work_.wait(lock, [this] { return stopping_ || !to_copy_.empty(); });
      if (stopping_) return;
      const uint64_t serial = to_copy_.front();
      to_copy_.pop_front();
      const Transfer transfer = jobs_[serial].transfer;
      lock.unlock();
      std::string error = Copy(transfer);
      lock.lock();
      Job& job = jobs_[serial];
      job.copied = true;
      job.error = std::move(error);
      changed_.notify_all();
    }
  }

  // By calls rather than through a mapping of the file: a file that is shorter than it should be is an error then, not the
  // end of the process, and one that grows needs nothing done.
  std::string Copy(const Transfer& transfer) {
    uint64_t done = 0;
    while (done < transfer.bytes) {
      if (stopping_) return "the link was closed";
      const size_t part = std::min(kPartBytes, transfer.bytes - done);
      const auto offset = static_cast<off_t>(transfer.disk_offset + done);
      const ssize_t moved = transfer.direction == Transfer::Direction::kLoad
                                ? pread(fd_, transfer.address + done, part, offset)
                                : pwrite(fd_, transfer.address + done, part, offset);
      if (moved < 0) {
        if (errno == EINTR || errno == EAGAIN) continue;
        return std::strerror(errno);
      }
      if (moved == 0) return "the host tier's memory ended before the data did";
      done += static_cast<uint64_t>(moved);
    }
    return "";
  }

  const int fd_;
  const policy::LinkRates rates_;
  const Clock::time_point start_ = Clock::now();
  mutable std::mutex mutex_;
  std::condition_variable work_;     // for the stream
  std::condition_variable changed_;  // for who waits
  std::atomic<bool> stopping_{false};
  bool woken_ = false;
  LinkModel model_;
  uint64_t next_serial_ = 0;
  std::map<uint64_t, Job> jobs_;
  std::deque<uint64_t> to_copy_;
  std::map<uint64_t, double> ended_;  // by the model, with the time of it
  double late_seconds_ = 0;
  std::thread stream_;
};

}  // namespace

std::unique_ptr<Link> MakeModelledLink(int fd, const LinkModelOptions& options, std::string* error) {
  *error = options.Check();
  if (!error->empty()) {
    close(fd);
    return nullptr;
  }
  return std::make_unique<ModelledLink>(fd, options);
}

}  // namespace misa
