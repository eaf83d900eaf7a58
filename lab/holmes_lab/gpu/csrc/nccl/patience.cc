// NCCL's host threads poll sockets and each other. The polled functions are wrapped by the linker's --wrap: a
// thread naps once in each round of polls (runtime/patience.cc) until it has all results. A round ends with a
// yield, or with the next poll of the same socket.

#include <errno.h>
#include <sched.h>
#include <sys/socket.h>

#include "emulated_gpu.h"

namespace {

thread_local int asked_before = -1;  // a socket

// Takes the result of the call on the socket. done: nothing is left to poll for.
template <typename Result>
Result tried(int socket, Result result, bool done) {
  if (done) {
    egpuGot();
    asked_before = -1;
  } else if (result < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    if (socket == asked_before) egpuAskedInVain();
    asked_before = socket;
    errno = EAGAIN;
  }
  return result;
}

}  // namespace

extern "C" {

int __wrap_sched_yield() {
  asked_before = -1;
  egpuAskedInVain();
  return 0;
}

ssize_t __real_recv(int socket, void* buffer, size_t size, int flags);
ssize_t __wrap_recv(int socket, void* buffer, size_t size, int flags) {
  ssize_t moved = __real_recv(socket, buffer, size, flags);
  return tried(socket, moved, moved == static_cast<ssize_t>(size));
}

ssize_t __real_send(int socket, const void* buffer, size_t size, int flags);
ssize_t __wrap_send(int socket, const void* buffer, size_t size, int flags) {
  ssize_t moved = __real_send(socket, buffer, size, flags);
  return tried(socket, moved, moved == static_cast<ssize_t>(size));
}

int __real_accept(int socket, struct sockaddr* address, socklen_t* length);
int __wrap_accept(int socket, struct sockaddr* address, socklen_t* length) {
  int accepted = __real_accept(socket, address, length);
  return tried(socket, accepted, accepted >= 0);
}
}
