#include "client/core/fault_door.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

namespace misa {
namespace {

// As many ranges as a session has facets, and some of sessions that end while others begin.
constexpr size_t kMostRanges = 1 << 19;

struct Range {
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};
  std::atomic<Facet*> facet{nullptr};
};

// Read by the handler, so without a lock and without a constructor; pages that were never used take no memory.
Range ranges[kMostRanges];
std::atomic<size_t> range_count{0};  // behind the last one ever used
std::mutex range_mutex;
std::vector<size_t>& FreeRanges() {
  static auto* free = new std::vector<size_t>;
  return *free;
}

std::atomic<FaultServer*> active_server{nullptr};
std::atomic<int> inside{0};

// Handlers found before ours; never freed, a signal may be on its way through one.
std::atomic<const struct sigaction*> previous{nullptr};
std::mutex install_mutex;
// The thread that hands a signal on now: one that comes back to us from there is nobody's.
std::atomic<pid_t> handing_on{0};

Facet* Find(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  const size_t count = range_count.load(std::memory_order_acquire);
  for (size_t i = 0; i < count; ++i) {
    if (at < ranges[i].begin.load(std::memory_order_acquire) || at >= ranges[i].end.load(std::memory_order_acquire)) {
      continue;
    }
    return ranges[i].facet.load(std::memory_order_acquire);
  }
  return nullptr;
}

[[noreturn]] void EndProcess(const std::string& sentence) {
  const std::string line = "misa: a raw pointer to managed memory was used, and its bytes cannot be had: " + sentence +
                           " An access by pointer cannot be refused, so the process ends here.\n";
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
  std::abort();
}

void Serve(Facet* facet) {
  inside.fetch_add(1, std::memory_order_seq_cst);
  FaultServer* server = active_server.load(std::memory_order_seq_cst);
  // One that has just gone: the next try finds what it left, or goes to the handler of before.
  const std::string error = server != nullptr ? server->Serve(*facet) : "";
  inside.fetch_sub(1, std::memory_order_seq_cst);
  if (!error.empty()) EndProcess(error);
}

// An alternate stack is made for little more than a message, and a second fault would overwrite the first one's frame
// there. So the work is done where the thread was: on its own stack, below what it had in use.
struct Errand {
  Facet* facet = nullptr;
  ucontext_t here;
  ucontext_t there;
};

void RunErrand(unsigned high, unsigned low) {
  auto* errand = reinterpret_cast<Errand*>((static_cast<uintptr_t>(high) << 32) | low);
  stack_t none{};
  none.ss_flags = SS_DISABLE;
  stack_t alternate{};
  sigaltstack(&none, &alternate);
  Serve(errand->facet);
  alternate.ss_flags = 0;
  sigaltstack(&alternate, nullptr);
}

uintptr_t StackPointer(const ucontext_t& context) {
#if defined(__x86_64__)
  return static_cast<uintptr_t>(context.uc_mcontext.gregs[REG_RSP]);
#elif defined(__aarch64__)
  return context.uc_mcontext.sp;
#else
  return 0;
#endif
}

void ServeOnOwnStack(Facet* facet, const ucontext_t& context) {
  const auto here = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  const auto alternate = reinterpret_cast<uintptr_t>(context.uc_stack.ss_sp);
  const bool switched =
      (context.uc_stack.ss_flags & SS_DISABLE) == 0 && here >= alternate && here < alternate + context.uc_stack.ss_size;
#if defined(__SANITIZE_THREAD__)
  const uintptr_t stack = 0;  // it follows no thread from one stack to another
#else
  const uintptr_t stack = StackPointer(context);
#endif
  if (!switched || stack == 0) return Serve(facet);
  constexpr uintptr_t kRedZone = 512;
  constexpr uintptr_t kSize = 256 << 10;  // only told to makecontext; the thread's own limit is what holds
  Errand errand;
  errand.facet = facet;
  getcontext(&errand.there);
  errand.there.uc_stack.ss_sp = reinterpret_cast<void*>(((stack - kRedZone) & ~uintptr_t{63}) - kSize);
  errand.there.uc_stack.ss_size = kSize;
  errand.there.uc_link = &errand.here;
  const auto pointer = reinterpret_cast<uintptr_t>(&errand);
  makecontext(&errand.there, reinterpret_cast<void (*)()>(&RunErrand), 2, static_cast<unsigned>(pointer >> 32),
              static_cast<unsigned>(pointer));
  swapcontext(&errand.here, &errand.there);
}

void TakeDefault(int signal, const siginfo_t* info) {
  struct sigaction standard {};
  standard.sa_handler = SIG_DFL;
  sigaction(signal, &standard, nullptr);
  // A fault comes again as soon as its instruction is tried again; a signal that somebody sent does not.
  if (info->si_code <= 0) {
    sigset_t mask;
    sigemptyset(&mask);
    sigaddset(&mask, signal);
    raise(signal);
    pthread_sigmask(SIG_UNBLOCK, &mask, nullptr);
  }
}

// To whoever was there before, as the kernel would have called it.
void HandOn(int signal, siginfo_t* info, void* context) {
  const struct sigaction* before = previous.load(std::memory_order_acquire);
  const auto self = static_cast<pid_t>(syscall(SYS_gettid));
  if (before == nullptr || handing_on.load() == self) return TakeDefault(signal, info);
  if ((before->sa_flags & SA_SIGINFO) == 0) {
    if (before->sa_handler == SIG_IGN && info->si_code <= 0) return;
    if (before->sa_handler == SIG_DFL || before->sa_handler == SIG_IGN) return TakeDefault(signal, info);
  }
  if (before->sa_flags & static_cast<int>(SA_RESETHAND)) previous.store(nullptr);
  sigset_t blocked = before->sa_mask;
  if ((before->sa_flags & SA_NODEFER) == 0) sigaddset(&blocked, signal);
  sigset_t outer;
  pthread_sigmask(SIG_BLOCK, &blocked, &outer);
  handing_on.store(self);
  if (before->sa_flags & SA_SIGINFO) {
    before->sa_sigaction(signal, info, context);
  } else {
    before->sa_handler(signal);
  }
  handing_on.store(0);
  pthread_sigmask(SIG_SETMASK, &outer, nullptr);
}

void OnFault(int signal, siginfo_t* info, void* context) {
  const int kept_errno = errno;
  const bool open = info->si_code > 0 && active_server.load(std::memory_order_acquire) != nullptr;
  Facet* facet = open ? Find(info->si_addr) : nullptr;
  if (facet != nullptr) {
    ServeOnOwnStack(facet, *static_cast<ucontext_t*>(context));
  } else {
    HandOn(signal, info, context);
  }
  errno = kept_errno;
}

}  // namespace

void KeepFaultDoor() {
  struct sigaction now {};
  if (sigaction(SIGSEGV, nullptr, &now) != 0) return;
  if ((now.sa_flags & SA_SIGINFO) != 0 && now.sa_sigaction == &OnFault) return;
  std::lock_guard<std::mutex> lock(install_mutex);
  previous.store(new struct sigaction(now), std::memory_order_release);
  struct sigaction ours {};
  ours.sa_sigaction = &OnFault;
  // A fault within the work for a fault is served as well; a thread whose stack has run out still reaches the handler.
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGSEGV, &ours, nullptr);
}

void SetFaultServer(FaultServer* server) {
  if (server != nullptr) KeepFaultDoor();
  active_server.store(server, std::memory_order_seq_cst);
  if (server == nullptr) {
    // What waits there has deadlines of its own.
    while (inside.load(std::memory_order_seq_cst) > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

size_t AddFaultRange(const char* begin, uint64_t bytes, Facet* facet) {
  std::lock_guard<std::mutex> lock(range_mutex);
  std::vector<size_t>& free = FreeRanges();
  size_t i = range_count.load(std::memory_order_relaxed);
  if (!free.empty()) {
    i = free.back();
    free.pop_back();
  } else if (i == kMostRanges) {
    return kMostRanges;  // an access to this one while it is away ends as it would without a door
  }
  ranges[i].facet.store(facet, std::memory_order_release);
  ranges[i].begin.store(reinterpret_cast<uintptr_t>(begin), std::memory_order_release);
  ranges[i].end.store(reinterpret_cast<uintptr_t>(begin) + bytes, std::memory_order_release);
  if (i == range_count.load(std::memory_order_relaxed)) range_count.store(i + 1, std::memory_order_release);
  return i;
}

void RemoveFaultRange(size_t range) {
  if (range >= kMostRanges) return;
  std::lock_guard<std::mutex> lock(range_mutex);
  ranges[range].end.store(0, std::memory_order_release);
  ranges[range].begin.store(0, std::memory_order_release);
  FreeRanges().push_back(range);
}

}  // namespace misa
