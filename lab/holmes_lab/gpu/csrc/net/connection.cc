#include "connection.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>

#include "emulated_gpu.h"

// Not there where NCCL runs on a physical GPU (tests/carriers.py).
extern "C" __attribute__((weak)) void egpuGot(void);

namespace rdma {

namespace {

constexpr uint64_t kHeader = sizeof(uint64_t);

long variable(const char* name, long otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::atol(value) : otherwise;
}

// An InfiniBand queue pair gives up after its retries: 4.096 us x 2^NCCL_IB_TIMEOUT each (InfiniBand
// specification, 9.7.6.1.3), NCCL_IB_RETRY_CNT times. Milliseconds.
unsigned patience() {
  return static_cast<unsigned>(4.096e-3 * std::pow(2.0, variable("NCCL_IB_TIMEOUT", 20)) *
                               variable("NCCL_IB_RETRY_CNT", 7));
}

int make_socket(const Hca& hca) {
  int made = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (made < 0) return -1;
  // Only over the HCA's own interface. Without the right to bind to a device its address must do.
  setsockopt(made, SOL_SOCKET, SO_BINDTODEVICE, hca.device.c_str(),
             static_cast<socklen_t>(hca.device.size()));
  sockaddr_in local = hca.address;
  local.sin_port = 0;
  if (bind(made, reinterpret_cast<sockaddr*>(&local), sizeof local) != 0) {
    close(made);
    return -1;
  }
  return made;
}

void tune(int socket) {
  int on = 1;
  unsigned limit = patience();
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &limit, sizeof limit);
}

}  // namespace

int listen_on(const Hca& hca, sockaddr_in* where) {
  int made = make_socket(hca);
  socklen_t length = sizeof *where;
  if (made >= 0 && listen(made, 1024) == 0 &&
      getsockname(made, reinterpret_cast<sockaddr*>(where), &length) == 0)
    return made;
  if (made >= 0) close(made);
  return -1;
}

int start_connecting(const Hca& hca, const sockaddr_in& peer) {
  int made = make_socket(hca);
  if (made < 0) return -1;
  tune(made);
  if (connect(made, reinterpret_cast<const sockaddr*>(&peer), sizeof peer) != 0 && errno != EINPROGRESS) {
    close(made);
    return -1;
  }
  return made;
}

State connected(int socket, int* error) {
  pollfd one{socket, POLLOUT, 0};
  if (poll(&one, 1, 0) == 0) return State::kPending;
  socklen_t length = sizeof *error;
  getsockopt(socket, SOL_SOCKET, SO_ERROR, error, &length);
  return *error ? State::kFailed : State::kReady;
}

int accept_one(int listener) {
  int made = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (made >= 0) tune(made);
  return made;
}

Connection::Connection(int socket, bool sends) : socket_(socket), sends_(sends) {}

Connection::~Connection() { close(socket_); }

Request* Connection::post(void* data, size_t size) {
  posted_.push_back(std::make_unique<Request>());
  Request* request = posted_.back().get();
  request->connection = this;
  request->data = static_cast<char*>(data);
  request->size = size;
  request->header = size;
  return request;
}

ssize_t Connection::move(Request& request) {
  bool in_header = request.moved < kHeader;
  char* place = in_header ? reinterpret_cast<char*>(&request.header) + request.moved
                          : request.data + request.moved - kHeader;
  size_t left = in_header ? kHeader - request.moved : request.header + kHeader - request.moved;
  if (sends_) return send(socket_, place, left, MSG_NOSIGNAL | (in_header && request.size ? MSG_MORE : 0));
  return recv(socket_, place, left, 0);
}

State Connection::progress() {
  while (!posted_.empty()) {
    Request& request = *posted_.front();
    ssize_t moved = move(request);
    if (moved < 0 && (errno == EAGAIN || errno == EINTR)) return State::kPending;
    if (moved <= 0) {
      error = moved == 0 ? ECONNRESET : errno;
      return State::kFailed;
    }
    request.moved += static_cast<uint64_t>(moved);
    if (request.moved >= kHeader && request.header > request.size) {
      error = EMSGSIZE;
      return State::kFailed;
    }
    if (request.moved == request.header + kHeader) {
      if (egpuGot) egpuGot();
      request.done = true;
      request.size = request.header;
      done_.push_back(std::move(posted_.front()));
      posted_.pop_front();
    }
  }
  return State::kReady;
}

void release(Request* request) {
  auto& done = request->connection->done_;
  for (auto place = done.begin(); place != done.end(); ++place) {
    if (place->get() == request) {
      done.erase(place);
      return;
    }
  }
}

}  // namespace rdma
