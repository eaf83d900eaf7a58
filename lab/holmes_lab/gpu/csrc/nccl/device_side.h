// Included before NCCL's own algorithms (src/device/all_reduce.h, ...), so that they can be compiled
// unchanged for the host. It defines the words of CUDA C++ that they use, the state of a block, and
// Primitives, the class that moves data for them.
//
//     all_reduce.h:  prims.directRecvReduceDirectSend(offset, offset, nelem)   NCCL's, of the checkout
//     Primitives     which peers, which buffers, how many bytes                here, a template for each use
//     Connections    slices, steps, flags and credits of Simple, LL, LL128     connections.cc
//
// One host thread does the work of a group of a block's threads. It is the group's first thread (tid 0).
#pragma once

// NCCL's own versions of these headers are for nvcc.
#define NCCL_DEVICE_COMMON_H_
#define NCCL_PRIMITIVES_H_
#define NCCL_REDUCE_KERNEL_H_
#define NCCL_COMMON_KERNEL_H_
#define OP128_H_

#include <algorithm>
#include <type_traits>

#include "cuda_runtime.h"
#include "collectives.h"
#include "device.h"

#include "connections.h"
#include "emulated_gpu.h"

#define COLL_UNROLL 1
#define __syncthreads() ((void)0)
#define __syncwarp(...) ((void)0)
#define __ballot_sync(mask, vote) ((vote) ? 1u : 0u)
#define __popc(bits) __builtin_popcount(bits)
#define __any_sync(mask, vote) (vote)

namespace device_side {

using KernelComm = std::remove_pointer_t<decltype(ncclDevKernelArgs::comm)>;  // its name changed in 2.28

struct Index {
  int x = 0, y = 0, z = 0;
};

// Content of the shared memory of NCCL's kernels, as far as the algorithms use it.
struct Shared {
  int channelId = 0, nWorks = 0, workSize = 0;
  KernelComm comm;
  ncclDevChannel channel;
  struct Group {
    void *userInput, *userOutput;
  } groups[NCCL_MAX_GROUPS];
  alignas(16) char workStorage[16 << 10];
  Reduction reduction;  // of the work that runs
  egpuRunning kernel = nullptr;
};

extern thread_local Shared* shared;  // of the block that this thread works for

}  // namespace device_side

#define ncclShmem (*device_side::shared)
static const device_side::Index threadIdx{}, blockDim{1, 1, 1};
static inline void barrier_sync(int, int = 0) {}
static inline void __trap() {}
static inline void* ncclScratchForWarp(int) { return nullptr; }
template <typename A, typename B>
static inline auto min(A a, B b) -> std::common_type_t<A, B> {
  return a < b ? static_cast<std::common_type_t<A, B>>(a) : static_cast<std::common_type_t<A, B>>(b);
}
template <typename A, typename B>
static inline auto max(A a, B b) -> std::common_type_t<A, B> {
  return a < b ? static_cast<std::common_type_t<A, B>>(b) : static_cast<std::common_type_t<A, B>>(a);
}

// The algorithms are instantiated for the sizes of elements only: the operation is a value
// (Shared::reduction).
template <typename T>
struct FuncCopy {
  using EltType = T;
};
template <typename T>
struct FuncSum {
  using EltType = T;
};

// Copies of the algorithms that move data without Primitives. They occur only with registered buffers, and
// these are off.
template <int Unroll, typename RedOp, typename T, int... Counts, typename... Arguments>
void reduceCopy(Arguments...) {
  egpuFail(ncclShmem.kernel,
           "registered buffers are not emulated: NCCL_LOCAL_REGISTER=0 NCCL_GRAPH_REGISTER=0");
}

template <ncclFunc_t Fn, typename T, typename RedOp, int Algo, int Proto>
struct RunWorkColl;
template <ncclFunc_t Fn, typename T, typename RedOp, int Algo, int Proto>
struct RunWorkBatch;

template <int SlicePerChunk_, int StepPerSlice_, int Unroll_ = COLL_UNROLL, int Sources_ = 0,
          int Targets_ = 0>
struct ProtoSimple {
  static constexpr int Id = NCCL_PROTO_SIMPLE, SlicePerChunk = SlicePerChunk_, StepPerSlice = StepPerSlice_;
  static constexpr int Unroll = Unroll_, MultimemSrcs = Sources_, MultimemDsts = Targets_, MaxGroupWidth = 2;
  static int calcBytePerStep() { return ncclShmem.comm.buffSizes[Id] / NCCL_STEPS; }
  static int calcBytePerGrain() { return 8; }
};
struct ProtoLL {
  static constexpr int Id = NCCL_PROTO_LL, SlicePerChunk = 1, StepPerSlice = 1, MaxGroupWidth = 1;
  static int calcBytePerStep() { return ncclShmem.comm.buffSizes[Id] / NCCL_STEPS / 2; }
  static int calcBytePerGrain() { return 8; }
};
struct ProtoLL128 {
  static constexpr int Id = NCCL_PROTO_LL128, SlicePerChunk = 1, StepPerSlice = 1, MaxGroupWidth = 1;
  static int calcBytePerStep() {
    return ncclShmem.comm.buffSizes[Id] / NCCL_STEPS * NCCL_LL128_DATAELEMS / NCCL_LL128_LINEELEMS;
  }
  static int calcBytePerGrain() {
    return NCCL_LL128_SHMEM_ELEMS_PER_THREAD * NCCL_LL128_DATAELEMS * 8 / NCCL_LL128_LINEELEMS;
  }
};

template <int MaxRecv_, int MaxSend_>
struct FanAsymmetric {
  static constexpr int MaxRecv = MaxRecv_, MaxSend = MaxSend_;
};
template <int Arity>
struct FanSymmetric {
  static constexpr int MaxRecv = Arity, MaxSend = Arity;
};

enum { primsModeDefault = 0, primsModePatRs = 1, primsModePatAg = 2 };

template <typename T, typename RedOp, typename Fan, int Direct, typename Proto, int P2p, bool Offload = false>
class Primitives {
  device_side::Connections links;
  T *input, *output;

  // from, to: in elements from the beginning of the buffers; nullptr where there is none.
  void move(bool receive, bool send, const T* from, bool own_input, T* to, intptr_t count, bool last) {
    links.move(receive, send, from, own_input, to, count < 0 ? 0 : static_cast<size_t>(count), last);
  }

 public:
  int index = 0;

  // The arguments after sendIndex describe the work. Only step_size (in elements) matters here: registered
  // buffers are off (NCCL_LOCAL_REGISTER=0, NCCL_GRAPH_REGISTER=0).
  template <typename Collective = void*, typename PointToPoint = void*>
  Primitives(int, int, const int* recv_peers, const int* send_peers, const void* in, void* out, uint64_t,
             uint8_t = 0, uint8_t recv_index = 0, uint8_t send_index = 0, Collective = {}, PointToPoint = {},
             int step_size = 0, int = primsModeDefault)
      : links(Proto::Id, Proto::SlicePerChunk, Proto::StepPerSlice, step_size) {
    for (int i = 0; i < Fan::MaxRecv && recv_peers[i] >= 0; ++i)
      links.receive_from(recv_peers[i], recv_index);
    for (int i = 0; i < Fan::MaxSend && send_peers[i] >= 0; ++i) links.send_to(send_peers[i], send_index);
    setDataPtrs(in, out);
  }

  void setDataPtrs(const void* in, void* out, uint64_t = 0, void* = nullptr, uint8_t = 0, int = 0) {
    input = static_cast<T*>(const_cast<void*>(in));
    output = static_cast<T*>(out);
  }
  void moveDataPtrs(intptr_t delta) {
    input += delta;
    output += delta;
  }

  void send(intptr_t in, int n) { move(false, true, input + in, true, nullptr, n, false); }
  void sendFromOutput(intptr_t out, int n) { move(false, true, output + out, false, nullptr, n, false); }
  void recv(intptr_t out, int n, bool last = false) {
    move(true, false, nullptr, false, output + out, n, last);
  }
  void copySend(intptr_t in, intptr_t out, int n, bool last = false) {
    move(false, true, input + in, true, output + out, n, last);
  }
  void recvSend(int n) { move(true, true, nullptr, false, nullptr, n, false); }
  void recvCopySend(intptr_t out, int n, bool last = false) {
    move(true, true, nullptr, false, output + out, n, last);
  }
  void recvReduceSend(intptr_t in, int n) { move(true, true, input + in, true, nullptr, n, false); }
  void recvReduceCopy(intptr_t in, intptr_t out, int n, bool last = false) {
    move(true, false, input + in, true, output + out, n, last);
  }
  void recvReduceCopySend(intptr_t in, intptr_t out, int n, bool last = false) {
    move(true, true, input + in, true, output + out, n, last);
  }

  void directSend(intptr_t in, intptr_t, int n) { send(in, n); }
  void directSendFromOutput(intptr_t out, int n) { sendFromOutput(out, n); }
  void directRecv(intptr_t out, int n) { recv(out, n); }
  void directRecvCopy(intptr_t, intptr_t out, int n) { recv(out, n); }
  void directCopySend(intptr_t in, intptr_t out, int n, bool last = false) { copySend(in, out, n, last); }
  void directRecvDirectSend(intptr_t, intptr_t, int n, bool = false) { recvSend(n); }
  void directRecvCopyDirectSend(intptr_t, intptr_t out, int n, bool = false) { recvCopySend(out, n); }
  void recvDirectSend(intptr_t, int n, bool = false) { recvSend(n); }
  void recvReduceDirectSend(intptr_t in, intptr_t, int n, bool = false) { recvReduceSend(in, n); }
  void directRecvReduceDirectSend(intptr_t in, intptr_t, ssize_t n, bool = false) { recvReduceSend(in, n); }
  void directRecvReduceCopy(intptr_t in, intptr_t out, int n, bool last = false) {
    recvReduceCopy(in, out, n, last);
  }
  void recvReduceCopyDirectSend(intptr_t in, intptr_t out, int n, bool last = false) {
    recvReduceCopySend(in, out, n, last);
  }
  void directRecvReduceCopyDirectSend(intptr_t in, intptr_t out, ssize_t n, bool last = false) {
    recvReduceCopySend(in, out, n, last);
  }
};
