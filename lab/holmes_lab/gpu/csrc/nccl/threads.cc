#include "threads.h"

#include <pthread.h>
#include <signal.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

namespace device_side {

namespace {

constexpr int kAwake = 60;  // turns
constexpr long kTold_ns = 300000000;

struct Helper {
  std::condition_variable wake;
  std::function<void()> task;
};

std::mutex pool_mutex;
std::vector<Helper*>& idle() {
  static auto* helpers = new std::vector<Helper*>;
  return *helpers;
}

void helper_main(Helper* self) {
  pthread_setname_np(pthread_self(), "nccl-block");
  std::unique_lock<std::mutex> lock(pool_mutex);
  for (;;) {
    self->wake.wait(lock, [&] { return static_cast<bool>(self->task); });
    std::function<void()> task = std::move(self->task);
    self->task = nullptr;
    lock.unlock();
    task();
    lock.lock();
    idle().push_back(self);
  }
}

void start(std::function<void()> task) {
  std::unique_lock<std::mutex> lock(pool_mutex);
  if (!idle().empty()) {
    Helper* helper = idle().back();
    idle().pop_back();
    helper->task = std::move(task);
    helper->wake.notify_one();
    return;
  }
  auto* helper = new Helper;
  helper->task = std::move(task);
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread(helper_main, helper).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

void run_together(std::vector<std::function<void()>> tasks) {
  std::mutex mutex;
  std::condition_variable over;
  size_t left = tasks.size() - 1;
  for (size_t index = 0; index + 1 < tasks.size(); ++index) {
    start([&, task = std::move(tasks[index])] {
      task();
      std::lock_guard<std::mutex> lock(mutex);
      if (--left == 0) over.notify_one();
    });
  }
  if (!tasks.empty()) tasks.back()();
  std::unique_lock<std::mutex> lock(mutex);
  over.wait(lock, [&] { return left == 0; });
}

Waiting::Waiting(egpuRunning kernel, volatile uint32_t* abort, std::function<std::string()> describe)
    : kernel_(kernel), abort_(abort), describe_(std::move(describe)) {}

Waiting::~Waiting() {
  if (told_) egpuWaitsFor(kernel_, "");
  if (turns_ > kAwake) egpuProgress();
  egpuGot();
}

bool Waiting::goes_on() {
  if (*abort_) return false;
  ++turns_;
  if (turns_ <= kAwake) {
    __builtin_ia32_pause();
    return true;
  }
  if (egpuAskedInVain() > kTold_ns && !told_) {
    told_ = true;
    egpuWaitsFor(kernel_, describe_().c_str());
  }
  return true;
}

}  // namespace device_side
