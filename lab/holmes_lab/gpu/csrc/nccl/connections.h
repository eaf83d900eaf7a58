// The connections of one rank to its peers in a channel. Primitives move data over them.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "reduction.h"

struct ncclConnInfo;

namespace device_side {

class Connections {
 public:
  // protocol: NCCL_PROTO_*; a chunk is moved in slices of several steps each; step_size: elements, 0: the
  // buffer's.
  Connections(int protocol, int slices_per_chunk, int steps_per_slice, int step_size);
  ~Connections();  // the connections remember their steps for the next kernel
  Connections(const Connections&) = delete;

  void receive_from(int peer, int connection);
  void send_to(int peer, int connection);

  // One chunk of `count` elements: [receive from all, reduce with `from`] -> [`to`] and [send to all].
  // own_input: `from` is this rank's input; last: the result is final.
  void move(bool receive, bool send, const void* from, bool own_input, void* to, size_t count, bool last);

 private:
  struct Link {
    int peer = -1;
    ncclConnInfo* info = nullptr;
    uint64_t step = 0;
    char* slot = nullptr;  // the buffer of the slice that is moved
  };
  void slice(bool receive, bool send, const char* from, bool own_input, char* to, size_t count, bool last);
  bool await_data(Link& link);
  bool await_room(Link& link, size_t bytes);
  void await_flags(const Link& link, size_t offset, size_t bytes);
  void read(const Link& link, size_t offset, size_t bytes, char* into);
  void write(const Link& link, size_t offset, size_t bytes, const char* data);
  void post_received(Link& link);
  void post_sent(Link& link);
  size_t wire_bytes(size_t bytes) const;
  template <typename Condition>
  bool wait(const Link& link, const char* direction, Condition condition);

  static constexpr int kMost = 8;
  const int protocol_, slices_, steps_;
  const Reduction reduction_;
  size_t step_size_;  // elements
  Link receive_[kMost], send_[kMost];
  int receives_ = 0, sends_ = 0;
  bool aborted_ = false;
};

}  // namespace device_side
