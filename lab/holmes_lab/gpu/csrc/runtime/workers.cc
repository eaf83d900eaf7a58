// The threads that run the work of streams: as many as run at once, each used again.

#include <sched.h>
#include <signal.h>
#include <time.h>

#include <chrono>
#include <thread>

#include "emulated_gpu.h"
#include "scheduler.h"

namespace gpu {

namespace {

// A kernel that ends this little before its time ends now: the next one begins where it should have ended, so
// that the error does not add up, and a stream of small kernels does not sleep after each. Seconds.
constexpr double kSlack = 100e-6;
constexpr auto kLatest = std::chrono::milliseconds(50);
// Seconds that a worker without work polls for more before it sleeps: a few times the time that a host thread
// needs to wake it.
constexpr double kLooks = 20e-6;

thread_local Work* running = nullptr;

void sleep_until(double when) {
  timespec moment;
  moment.tv_sec = static_cast<time_t>(when);
  moment.tv_nsec = static_cast<long>((when - static_cast<double>(moment.tv_sec)) * 1e9);
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &moment, nullptr) != 0) {}
}

}  // namespace

void Scheduler::hand_over(WorkPointer work) {
  if (!idle_.empty()) {
    Worker* worker = idle_.back();  // the one that ran last: its caches are warm
    idle_.pop_back();
    worker->work = std::move(work);
    worker->has_work.store(true, std::memory_order_release);
    if (worker->asleep) worker->wake.notify_one();
    return;
  }
  auto* worker = new Worker;
  worker->work = std::move(work);
  worker->has_work = true;
  sigset_t all, before;  // signals are for the threads of the program
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread(&Scheduler::worker_main, this, worker).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Scheduler::worker_main(Worker* self) {
  pthread_setname_np(pthread_self(), "emulated-gpu");
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    if (!self->work) look_for_work(self, lock);
    WorkPointer work = std::move(self->work);
    self->has_work = false;
    while (work) {
      bool skip =
          failures_.count(work->stream->device) != 0;  // after an error a device runs nothing any more
      if (random_ && work->kind != Kind::kHostFunction) start_late(lock);
      lock.unlock();
      if (!skip) run(*work);
      if (work->end > now() + kSlack) sleep_until(work->end);
      work->run = nullptr;  // its captured values are released here, not under the lock
      lock.lock();
      --executing_;
      if (random_) moved_.notify_all();
      finish(*work, *devices_[work->stream->device]);
      work = nullptr;
      advance(&work);
    }
    idle_.push_back(self);
  }
}

void Scheduler::look_for_work(Worker* self, std::unique_lock<std::mutex>& lock) {
  lock.unlock();
  for (double end = now() + kLooks; !self->has_work.load(std::memory_order_acquire) && now() < end;) {
    sched_yield();
  }
  lock.lock();
  self->asleep = true;
  self->wake.wait(lock, [&] { return self->work != nullptr; });
  self->asleep = false;
}

void Scheduler::run(Work& work) {
  running = &work;
  work.run();
  running = nullptr;
}

// --gpu-order random: a third of the work starts late, when the host has submitted up to 64 more pieces of
// work; at the latest when the host waits and nothing else runs, or after 50 ms. (Counted, as hosts are slow
// on a busy machine.)
void Scheduler::start_late(std::unique_lock<std::mutex>& lock) {
  random_state_ = random_state_ * 6364136223846793005ull + 1442695040888963407ull;
  uint64_t drawn = random_state_ >> 33;
  if (drawn % 3) return;
  uint64_t until = submitted_ + 1 + drawn / 3 % 64;
  --executing_;
  moved_.notify_all();
  moved_.wait_for(lock, kLatest,
                  [&] { return submitted_ >= until || (!host_waits_.empty() && executing_ == 0); });
  ++executing_;
}

}  // namespace gpu

extern "C" {

egpuRunning egpuThisKernel(void) { return reinterpret_cast<egpuRunning>(gpu::running); }
}
