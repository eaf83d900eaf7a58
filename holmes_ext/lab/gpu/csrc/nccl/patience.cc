// NCCL's host threads wait by asking again and again; on a GPU node each has a core for that, here many ranks
// share two. Linked by --wrap around what they ask: who asks in vain many times in a row sleeps a little.

#include <errno.h>
#include <sched.h>
#include <sys/socket.h>
#include <time.h>

#include <algorithm>

namespace {

constexpr long kGap_ns = 40000;  // longer between two calls: the thread did something else
constexpr int kFree = 20;        // vain calls before it sleeps
constexpr long kStep_ns = 4000, kLongest_ns = 150000;

void in_vain() {
  thread_local timespec last{};
  thread_local int calls = 0;
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  long gap = (now.tv_sec - last.tv_sec) * 1000000000 + now.tv_nsec - last.tv_nsec;
  calls = gap < kGap_ns ? calls + 1 : 0;
  if (calls > kFree) {
    timespec span{0, std::min(kStep_ns * (calls - kFree), kLongest_ns)};
    nanosleep(&span, nullptr);
    clock_gettime(CLOCK_MONOTONIC, &now);
  }
  last = now;
}

// What a call on a socket returned, after a sleep where it asked in vain.
template <typename Result>
Result tried(Result result) {
  if (result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    in_vain();
    errno = EAGAIN;
  }
  return result;
}

}  // namespace

extern "C" {

int __wrap_sched_yield() {
  in_vain();
  return 0;
}

ssize_t __real_recv(int socket, void* buffer, size_t size, int flags);
ssize_t __wrap_recv(int socket, void* buffer, size_t size, int flags) {
  return tried(__real_recv(socket, buffer, size, flags));
}

ssize_t __real_send(int socket, const void* buffer, size_t size, int flags);
ssize_t __wrap_send(int socket, const void* buffer, size_t size, int flags) {
  return tried(__real_send(socket, buffer, size, flags));
}

int __real_accept(int socket, struct sockaddr* address, socklen_t* length);
int __wrap_accept(int socket, struct sockaddr* address, socklen_t* length) {
  return tried(__real_accept(socket, address, length));
}
}
