// NCCL's host threads ask again and again, sockets and each other. Linked by --wrap around what they ask:
// they nap once in a round of questions (runtime/patience.cc), which ends with a yield or comes back to the
// same socket, until they have all that they asked for.

#include <errno.h>
#include <sched.h>
#include <sys/socket.h>

#include "emulated_gpu.h"

namespace {

thread_local int asked_before = -1;  // a socket

// What the call on the socket returned. done: nothing is left to ask for.
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
