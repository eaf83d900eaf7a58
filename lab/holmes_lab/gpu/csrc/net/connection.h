// A connection between two HCAs: messages in order over one TCP connection of their interfaces.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>

#include "hcas.h"

namespace rdma {

struct Connection;

// One message. A receive takes any message that is not longer.
struct Request {
  Connection* connection = nullptr;
  char* data = nullptr;
  uint64_t size = 0, moved = 0;  // moved: bytes, its header's 8 included
  uint64_t header = 0;           // sent before the message: its size
  bool done = false;
};

enum class State { kPending, kReady, kFailed };

struct Connection {
  explicit Connection(int socket, bool sends);
  ~Connection();
  Request* post(void* data, size_t size);
  State progress();  // moves the data that can be moved now; kFailed: the peer has ended or is silent
  int error = 0;     // errno

 private:
  ssize_t move(Request& request);
  int socket_;
  bool sends_;
  std::deque<std::unique_ptr<Request>> posted_, done_;
  friend void release(Request* request);
};

void release(Request* request);  // once it is done

int listen_on(const Hca& hca, sockaddr_in* where);              // a socket, -1 with errno
int start_connecting(const Hca& hca, const sockaddr_in& peer);  // likewise
State connected(int socket, int* error);
int accept_one(int listener);  // -1: nobody yet

}  // namespace rdma
