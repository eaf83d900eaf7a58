// libnccl-net-holmes.so: the stand-in for InfiniBand and RoCE by NCCL's public net plugin interface,
// version 10. It calls itself "IB", finds the HCAs of the emulated node and moves messages over their
// interfaces.

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <unistd.h>

#include "connection.h"
#include "hcas.h"
#include "nccl.h"
#include "nccl_net.h"

namespace {

using rdma::State;

std::vector<rdma::Hca> hcas;
ncclDebugLogger_t log_line;

#define TELL(level, ...) log_line(level, NCCL_NET, __FILE__, __LINE__, __VA_ARGS__)

// Handle that a listener gives its peer. The peer also keeps its state in it while it connects.
struct Handle {
  sockaddr_in address;
  int socket_plus_1;
};
static_assert(sizeof(Handle) <= NCCL_NET_HANDLE_MAXSIZE, "a handle is too large");

struct Listener {
  int socket;
};

ncclResult_t initialize(ncclDebugLogger_t logger, ncclProfilerCallback_t) {
  log_line = logger;
  hcas = rdma::find_hcas();
  for (const rdma::Hca& hca : hcas) {
    TELL(NCCL_LOG_INFO, "NET/IB : Using %s:1 (emulated, over %s, %d Mb/s)", hca.name.c_str(),
         hca.device.c_str(), hca.speed);
  }
  if (hcas.empty()) TELL(NCCL_LOG_INFO, "NET/IB : No device found.");
  return ncclSuccess;
}

ncclResult_t devices(int* count) {
  *count = static_cast<int>(hcas.size());
  return ncclSuccess;
}

ncclResult_t get_properties(int device, ncclNetProperties_v10_t* properties) {
  const rdma::Hca& hca = hcas[device];
  std::memset(properties, 0, sizeof *properties);
  properties->name = const_cast<char*>(hca.name.c_str());
  properties->guid = static_cast<uint64_t>(hca.address.sin_addr.s_addr) << 8 | static_cast<uint64_t>(device);
  properties->ptrSupport = NCCL_PTR_HOST;
  properties->speed = hca.speed;
  properties->port = 1;
  properties->maxComms = 65536;
  properties->maxRecvs = 1;
  properties->netDeviceType = NCCL_NET_DEVICE_HOST;
  properties->vProps.ndevs = 1;
  properties->vProps.devs[0] = device;
  properties->maxP2pBytes = properties->maxCollBytes = 1ull << 40;
  return ncclSuccess;
}

ncclResult_t failed(const char* what, const std::string& hca, int error) {
  TELL(NCCL_LOG_WARN, "NET/IB (emulated): %s on %s: %s", what, hca.c_str(), strerror(error));
  return ncclRemoteError;
}

ncclResult_t listen_at(int device, void* handle, void** listener) {
  auto* mine = static_cast<Handle*>(handle);
  std::memset(mine, 0, sizeof *mine);
  int socket = rdma::listen_on(hcas[device], &mine->address);
  if (socket < 0) return failed("no listener", hcas[device].name, errno);
  *listener = new Listener{socket};
  return ncclSuccess;
}

// Is called again until *send_comm is set.
ncclResult_t connect_to(int device, ncclNetCommConfig_v10_t*, void* handle, void** send_comm,
                        ncclNetDeviceHandle_v10_t** offload) {
  auto* peer = static_cast<Handle*>(handle);
  *send_comm = nullptr;
  if (offload) *offload = nullptr;
  if (!peer->socket_plus_1) {
    int socket = rdma::start_connecting(hcas[device], peer->address);
    if (socket < 0) return failed("no connection", hcas[device].name, errno);
    peer->socket_plus_1 = socket + 1;
  }
  int error = 0;
  switch (rdma::connected(peer->socket_plus_1 - 1, &error)) {
    case State::kPending:
      return ncclSuccess;
    case State::kFailed:
      return failed("no connection", hcas[device].name, error);
    case State::kReady:
      *send_comm = new rdma::Connection(peer->socket_plus_1 - 1, true);
  }
  return ncclSuccess;
}

ncclResult_t accept_from(void* listener, void** recv_comm, ncclNetDeviceHandle_v10_t** offload) {
  *recv_comm = nullptr;
  if (offload) *offload = nullptr;
  int socket = rdma::accept_one(static_cast<Listener*>(listener)->socket);
  if (socket >= 0) *recv_comm = new rdma::Connection(socket, false);
  return ncclSuccess;
}

ncclResult_t register_memory(void*, void*, size_t, int type, void** handle) {
  *handle = nullptr;
  return type == NCCL_PTR_HOST ? ncclSuccess : ncclInternalError;
}

ncclResult_t register_dma_buf(void*, void*, size_t, int, uint64_t, int, void**) { return ncclInternalError; }
ncclResult_t deregister_memory(void*, void*) { return ncclSuccess; }

ncclResult_t post_send(void* comm, void* data, size_t size, int, void*, void*, void** request) {
  *request = static_cast<rdma::Connection*>(comm)->post(data, size);
  return ncclSuccess;
}

ncclResult_t post_receive(void* comm, int, void** data, size_t* sizes, int*, void**, void**, void** request) {
  *request = static_cast<rdma::Connection*>(comm)->post(data[0], sizes[0]);
  return ncclSuccess;
}

ncclResult_t flush(void*, int, void**, int*, void**, void** request) {
  *request = nullptr;
  return ncclSuccess;
}

ncclResult_t test(void* handle, int* done, int* sizes) {
  auto* request = static_cast<rdma::Request*>(handle);
  *done = 0;
  if (!request->done && request->connection->progress() == State::kFailed) {
    return failed("a message failed (transport retry counter exceeded, or the peer is gone)",
                  "the connection", request->connection->error);
  }
  if (!request->done) return ncclSuccess;
  *done = 1;
  if (sizes) sizes[0] = static_cast<int>(request->size);
  rdma::release(request);
  return ncclSuccess;
}

ncclResult_t close_connection(void* comm) {
  delete static_cast<rdma::Connection*>(comm);
  return ncclSuccess;
}

ncclResult_t close_listener(void* comm) {
  auto* listener = static_cast<Listener*>(comm);
  close(listener->socket);
  delete listener;
  return ncclSuccess;
}

ncclResult_t make_virtual_device(int*, ncclNetVDeviceProps_v10_t*) {
  return ncclInvalidUsage;
}  // no fused NICs

}  // namespace

extern "C" __attribute__((visibility("default")))
const ncclNet_v10_t ncclNetPlugin_v10 = {"IB",
                                         initialize,
                                         devices,
                                         get_properties,
                                         listen_at,
                                         connect_to,
                                         accept_from,
                                         register_memory,
                                         register_dma_buf,
                                         deregister_memory,
                                         post_send,
                                         post_receive,
                                         flush,
                                         test,
                                         close_connection,
                                         close_connection,
                                         close_listener,
                                         nullptr,
                                         nullptr,
                                         make_virtual_device};
