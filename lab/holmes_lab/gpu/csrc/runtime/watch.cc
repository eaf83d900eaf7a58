// State of this process for the lab: a file of one page in HOLMES_GPU_WATCH, "rank<N>.watch", that the lab
// maps.
//
//     0   progress   grows with each kernel, and with each step of a collective
//     8   asked      the lab writes a number here; a thread answers it by writing rank<N>.json, and then
//     16  answered   the same number here
//     24  stacks     the lab writes 1 here to request the Python stacks; 2 here says that they are written
//
// The thread looks every 0.1 s; it starts with the first stream.

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "scheduler.h"
#include "text.h"
#include "watch.h"

namespace gpu {

namespace {

struct Page {
  volatile uint64_t progress, asked, answered, stacks;
};

void write_state(const std::string& path) {
  std::string state = Scheduler::instance().state_json(), draft = path + ".draft";
  FILE* file = fopen(draft.c_str(), "w");
  if (!file) return;
  fputs(state.c_str(), file);
  fclose(file);
  rename(draft.c_str(), path.c_str());
}

void watch(Page* page, std::string path) {
  pthread_setname_np(pthread_self(), "gpu-watch");
  for (;;) {
    page->progress = Scheduler::instance().progress_count();
    if (page->stacks == 1) {
      python_stacks();
      page->stacks = 2;
    }
    uint64_t asked = page->asked;
    if (asked != page->answered) {
      write_state(path);
      page->answered = asked;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
}

}  // namespace

// Python's faulthandler writes the stacks of all threads to rank<N>.stack when this thread gets the signal
// (lab/gpu/operators.py registers it). Without that handler, there are no stacks.
void python_stacks() {
  struct sigaction action;
  if (sigaction(SIGUSR2, nullptr, &action) != 0 || action.sa_handler == SIG_DFL ||
      action.sa_handler == SIG_IGN)
    return;
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR2);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
  raise(SIGUSR2);
}

void start_watch() {
  const char* directory = getenv("HOLMES_GPU_WATCH");
  if (!directory || !*directory || !getenv("RANK")) return;
  std::string base = text("%s/rank%d", directory, rank_of_process());
  int file = open((base + ".watch").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (file < 0 || ftruncate(file, 4096) != 0) return;
  void* mapped = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (mapped != MAP_FAILED) std::thread(watch, static_cast<Page*>(mapped), base + ".json").detach();
}

}  // namespace gpu
