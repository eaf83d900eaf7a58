#include "connections.h"

#include <atomic>
#include <cstring>

#include "device_side.h"
#include "text.h"
#include "threads.h"

// How data lies in a slot of a connection's buffer:
//     Simple   as it is; the sender's tail says that it is there
//     LL       lines of 16 bytes: 4 of data, flag, 4 of data, flag
//     LL128    lines of 128 bytes: 120 of data, 8 of flag
// A flag is the step's number + 1. The receiver's head returns credits. (NCCL, src/device/prims_*.h,
// transport/net.cc)

namespace device_side {

namespace {

constexpr size_t kBlock =
    1920;  // bytes of data that are moved at once: whole lines of both kinds, in the first cache
constexpr size_t kLLData = 8, kLLLine = 16, kLL128Data = 120, kLL128Line = 128;

size_t lines(size_t bytes, size_t line) { return (bytes + line - 1) / line; }

uint64_t load(const volatile uint64_t* place) {
  uint64_t value = *place;
  std::atomic_thread_fence(std::memory_order_acquire);
  return value;
}

void store(volatile uint64_t* place, uint64_t value) {
  std::atomic_thread_fence(std::memory_order_release);
  *place = value;
}

}  // namespace

Connections::Connections(int protocol, int slices_per_chunk, int steps_per_slice, int step_size)
    : protocol_(protocol), slices_(slices_per_chunk), steps_(steps_per_slice), reduction_(shared->reduction) {
  size_t buffer = shared->comm.buffSizes[protocol] / NCCL_STEPS;
  step_size_ = step_size ? step_size : buffer / reduction_.size();
}

Connections::~Connections() {
  for (int i = 0; i < receives_; ++i) receive_[i].info->step = receive_[i].step;
  for (int i = 0; i < sends_; ++i) send_[i].info->step = send_[i].step;
}

static uint64_t whole_chunks(uint64_t step, uint64_t chunk) { return (step + chunk - 1) / chunk * chunk; }

void Connections::receive_from(int peer, int connection) {
  ncclConnInfo* info = &shared->channel.peers[peer]->recv[connection];
  Link& link = receive_[receives_++] = {peer, info, whole_chunks(info->step, slices_ * steps_), nullptr};
  if (protocol_ == NCCL_PROTO_SIMPLE && link.step != info->step) store(info->head, link.step);
}

void Connections::send_to(int peer, int connection) {
  ncclConnInfo* info = &shared->channel.peers[peer]->send[connection];
  send_[sends_++] = {peer, info, whole_chunks(info->step, slices_ * steps_), nullptr};
}

// Slices of a chunk, as in NCCL's genericOp: both sides and the proxies count slices.
void Connections::move(bool receive, bool send, const void* from, bool own_input, void* to, size_t count,
                       bool last) {
  size_t size = reduction_.size(), whole = step_size_ * steps_, offset = 0;
  if (protocol_ != NCCL_PROTO_SIMPLE) whole = count;
  if (protocol_ == NCCL_PROTO_SIMPLE) whole = std::max(lines(count, 16 * slices_) * 16, whole / 32);
  for (int index = 0; index < slices_; ++index) {
    size_t part = std::min(whole, count - offset);
    const char* source = from ? static_cast<const char*>(from) + offset * size : nullptr;
    char* target = to ? static_cast<char*>(to) + offset * size : nullptr;
    slice(receive, send, source, own_input, target, part, last);
    offset += part;
  }
}

void Connections::slice(bool receive, bool send, const char* from, bool own_input, char* to, size_t count,
                        bool last) {
  const size_t size = reduction_.size(), bytes = count * size;
  for (int i = 0; send && i < sends_; ++i) await_room(send_[i], bytes);
  for (int i = 0; receive && i < receives_; ++i) await_data(receive_[i]);
  bool pre = own_input && from && reduction_.has_before(), post = last && reduction_.has_after();
  alignas(64) char result[kBlock], other[kBlock];
  for (size_t offset = 0; offset < bytes && !aborted_; offset += kBlock) {
    size_t part = std::min(kBlock, bytes - offset);
    int next = 0;
    if (from) {
      std::memcpy(result, from + offset, part);
      if (pre) reduction_.before(result, part / size);
    } else if (receive) {
      read(receive_[next++], offset, part, result);
    }
    for (; receive && next < receives_; ++next) {
      read(receive_[next], offset, part, other);
      reduction_.combine(result, other, part / size);
    }
    if (post) reduction_.after(result, part / size);
    for (int i = 0; send && i < sends_; ++i) write(send_[i], offset, part, result);
    if (to) std::memcpy(to + offset, result, part);
  }
  for (int i = 0; receive && i < receives_; ++i) post_received(receive_[i]);
  for (int i = 0; send && i < sends_; ++i) post_sent(send_[i]);
  egpuProgress();
}

template <typename Condition>
bool Connections::wait(const Link& link, const char* direction, Condition condition) {
  if (aborted_ || condition()) return !aborted_;
  Waiting waiting(shared->kernel, shared->comm.abortFlag, [&] {
    return gpu::text("\"peer\": %d, \"direction\": \"%s\", \"channel\": %d", link.peer, direction,
                     shared->channelId);
  });
  while (!condition()) {
    if (!waiting.goes_on()) {
      aborted_ = true;
      return false;
    }
  }
  return true;
}

// The slot of a slice: in the connection's ring of slots, or where the proxy says (buffers that connections
// share).
static char* slot_of(const ncclConnInfo& info, int protocol, uint64_t step, size_t slot_bytes) {
  int number = static_cast<int>(step % NCCL_STEPS);
  if (protocol == NCCL_PROTO_SIMPLE && info.connFifo && info.connFifo[number].mode == NCCL_MODE_OFFSET) {
    return info.buffs[protocol] +
           *static_cast<volatile decltype(info.connFifo->offset)*>(&info.connFifo[number].offset);
  }
  return info.buffs[protocol] + number * slot_bytes;
}

bool Connections::await_data(Link& link) {
  const ncclConnInfo& info = *link.info;
  // The lines of LL128 are two of the host's cache lines: the bytes that a socket's copy wrote may become
  // visible in any order.
  bool by_tail = protocol_ == NCCL_PROTO_SIMPLE || (protocol_ == NCCL_PROTO_LL128 && info.connFifo);
  if (by_tail && !wait(link, "recv", [&] { return load(info.tail) >= link.step + steps_; })) return false;
  size_t slot =
      protocol_ == NCCL_PROTO_SIMPLE ? info.stepSize : shared->comm.buffSizes[protocol_] / NCCL_STEPS;
  link.slot = slot_of(info, protocol_, link.step, slot);
  return true;
}

bool Connections::await_room(Link& link, size_t bytes) {
  const ncclConnInfo& info = *link.info;
  if (!wait(link, "send", [&] { return load(info.head) + NCCL_STEPS >= link.step + steps_; })) return false;
  size_t slot =
      protocol_ == NCCL_PROTO_SIMPLE ? info.stepSize : shared->comm.buffSizes[protocol_] / NCCL_STEPS;
  if (info.connFifo) {
    auto* announced =
        static_cast<volatile decltype(info.connFifo->size)*>(&info.connFifo[link.step % NCCL_STEPS].size);
    *announced = wire_bytes(bytes);
  }
  link.slot = slot_of(info, protocol_, link.step, slot);
  return true;
}

size_t Connections::wire_bytes(size_t bytes) const {
  if (protocol_ == NCCL_PROTO_LL) return lines(bytes, kLLData) * kLLLine;
  if (protocol_ == NCCL_PROTO_LL128) return lines(bytes, kLL128Data) * kLL128Line;
  return bytes;
}

void Connections::await_flags(const Link& link, size_t offset, size_t bytes) {
  if (protocol_ == NCCL_PROTO_LL) {
    const uint32_t flag = NCCL_LL_FLAG(link.step + 1);
    auto* line = reinterpret_cast<volatile uint64_t*>(link.slot + offset / kLLData * kLLLine);
    for (size_t left = lines(bytes, kLLData); left; --left, line += 2) {
      wait(link, "recv", [&] { return line[0] >> 32 == flag && line[1] >> 32 == flag; });
    }
  } else if (protocol_ == NCCL_PROTO_LL128) {
    const uint64_t flag = link.step + 1;
    auto* line = reinterpret_cast<volatile uint64_t*>(link.slot + offset / kLL128Data * kLL128Line);
    for (size_t left = lines(bytes, kLL128Data); left; --left, line += NCCL_LL128_LINEELEMS) {
      wait(link, "recv", [&] { return line[NCCL_LL128_DATAELEMS] == flag; });
    }
  }
  std::atomic_thread_fence(std::memory_order_acquire);
}

void Connections::read(const Link& link, size_t offset, size_t bytes, char* into) {
  await_flags(link, offset, bytes);
  if (aborted_) return;
  if (protocol_ == NCCL_PROTO_SIMPLE) {
    std::memcpy(into, link.slot + offset, bytes);
  } else if (protocol_ == NCCL_PROTO_LL) {
    const char* line = link.slot + offset / kLLData * kLLLine;
    for (size_t at = 0; at < bytes; at += kLLData, line += kLLLine) {
      char data[kLLData];
      std::memcpy(data, line, 4);
      std::memcpy(data + 4, line + 8, 4);
      std::memcpy(into + at, data, std::min(kLLData, bytes - at));
    }
  } else {
    const char* line = link.slot + offset / kLL128Data * kLL128Line;
    for (size_t at = 0; at < bytes; at += kLL128Data, line += kLL128Line) {
      std::memcpy(into + at, line, std::min(kLL128Data, bytes - at));
    }
  }
}

void Connections::write(const Link& link, size_t offset, size_t bytes, const char* data) {
  if (protocol_ == NCCL_PROTO_SIMPLE) {
    std::memcpy(link.slot + offset, data, bytes);
  } else if (protocol_ == NCCL_PROTO_LL) {
    const uint64_t flag = static_cast<uint64_t>(NCCL_LL_FLAG(link.step + 1)) << 32;
    auto* line = reinterpret_cast<volatile uint64_t*>(link.slot + offset / kLLData * kLLLine);
    for (size_t at = 0; at < bytes; at += kLLData, line += 2) {
      uint32_t halves[2] = {};
      std::memcpy(halves, data + at, std::min(kLLData, bytes - at));
      line[0] = halves[0] | flag;  // 8 bytes at once: the data is there when its flag is
      line[1] = halves[1] | flag;
    }
  } else {
    char* line = link.slot + offset / kLL128Data * kLL128Line;
    for (size_t at = 0; at < bytes; at += kLL128Data, line += kLL128Line) {
      std::memcpy(line, data + at, std::min(kLL128Data, bytes - at));
      store(reinterpret_cast<uint64_t*>(line) + NCCL_LL128_DATAELEMS, link.step + 1);
    }
  }
}

void Connections::post_received(Link& link) {
  link.step += steps_;
  store(link.info->head, link.step);
}

void Connections::post_sent(Link& link) {
  link.step += steps_;
  bool by_tail = protocol_ == NCCL_PROTO_SIMPLE || (protocol_ == NCCL_PROTO_LL128 && link.info->connFifo);
  if (by_tail) store(link.info->tail, link.step);
}

}  // namespace device_side
