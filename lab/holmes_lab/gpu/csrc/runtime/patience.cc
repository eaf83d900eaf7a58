// Waits of host threads that poll (NCCL's, and the blocks of its kernels). On a GPU node each
// has a core for that; here many ranks share two. A thread that has polled for some time without result naps
// for a sixteenth of that time: it notices the result at most 6 % or 3 ms late, and its waiting costs next to
// nothing.

#include <time.h>

#include <algorithm>

#include "emulated_gpu.h"

namespace {

constexpr long kAwake_ns = 50000, kShortest_ns = 20000, kLongest_ns = 3000000;
constexpr long kElsewhere_ns = 200000000;  // between two polls: the thread had stopped polling

thread_local long began_ns = 0, asked_ns = 0;

long now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000 + now.tv_nsec;
}

}  // namespace

void egpuGot(void) { began_ns = 0; }

long egpuAskedInVain(void) {
  long now = now_ns();
  if (began_ns == 0 || now - asked_ns > kElsewhere_ns) began_ns = now;
  long waited = now - began_ns;
  if (waited >= kAwake_ns) {
    timespec nap{0, std::clamp(waited / 16, kShortest_ns, kLongest_ns)};
    nanosleep(&nap, nullptr);
    now = now_ns();
  }
  asked_ns = now;
  return waited;
}
