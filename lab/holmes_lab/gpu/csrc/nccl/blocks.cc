// A kernel of NCCL on the host: each of its blocks (one for each channel) works off the batches of work that
// NCCL's host code put into the kernel's arguments (src/device/common.h, ncclKernelMain), by NCCL's own
// algorithms.

#include "blocks.h"

#include <cstring>
#include <vector>

#include "device_side.h"
#include "functions.h"
#include "threads.h"

// Each of these files has a function of this name.
#define runRing all_gather_ring
#include "all_gather.h"
#undef runRing
#define runRing all_reduce_ring
#include "all_reduce.h"
#undef runRing
#define runRing broadcast_ring
#include "broadcast.h"
#undef runRing
#define runRing reduce_ring
#include "reduce.h"
#undef runRing
#define runRing reduce_scatter_ring
#include "reduce_scatter.h"
#undef runRing
#include "sendrecv.h"
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 29, 0)
#include "all_gather_v.h"
#endif

namespace device_side {

thread_local Shared* shared = nullptr;

namespace {

using Batch = ncclDevWorkBatch;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
using CommAndChannels = ncclKernelCommAndChannels;
#else
using CommAndChannels = ncclDevCommAndChannels;
#endif

size_t work_size(int type) { return ncclDevWorkSize(static_cast<ncclDevWorkType>(type)); }

// Copies the work of a batch, and of those that extend it, into shared memory. Returns the index of the last
// of them.
int load_work(const ncclDevKernelArgs* arguments, int index) {
  auto* batches = reinterpret_cast<const Batch*>(arguments + 1);
  size_t size = work_size(batches[index].workType);
  shared->workSize = static_cast<int>(size);
  shared->nWorks = 0;
  for (;;) {
    const Batch& batch = batches[index];
    for (uint64_t set = batch.offsetBitset; set; set &= set - 1) {
      size_t at = batch.offsetBase + __builtin_ctzll(set) * size;
      bool inside = arguments->workStorageType == ncclDevWorkStorageTypeArgs;
      const char* source = inside ? reinterpret_cast<const char*>(arguments) + at
                                  : static_cast<const char*>(arguments->workBuf) + (at & arguments->workMask);
      std::memcpy(shared->workStorage + shared->nWorks++ * size, source, size);
    }
    if (!batch.nextExtends) return index;
    index += batch.nextJump;
  }
}

template <typename Work>
Work* work(int index) {
  return reinterpret_cast<Work*>(shared->workStorage + index * shared->workSize);
}

// Runs tasks of this block at the same time: each thread works for this block.
void together(std::vector<std::function<void()>> tasks) {
  Shared* block = shared;
  for (auto& task : tasks) {
    task = [block, inner = std::move(task)] {
      Shared* before = shared;
      shared = block;
      inner();
      shared = before;
    };
  }
  run_together(std::move(tasks));
}

// In a tree that is not at its root one half of the block's threads reduces upwards, the other sends down.
template <ncclFunc_t Fn, typename T, int Algo, int Proto>
void run_collective(ncclDevWorkColl* item) {
  int threads = item->nWarps * WARP_SIZE;
  auto as_thread = [=](int thread) {
    RunWorkColl<Fn, T, FuncSum<T>, Algo, Proto>().run(thread, threads, item);
  };
  if (Algo == NCCL_ALGO_TREE && shared->channel.tree.up != -1) {
    together({[=] { as_thread(0); }, [=] { as_thread(threads - 1); }});
  } else {
    as_thread(0);
  }
}

template <ncclFunc_t Fn, typename T, int Algo>
void with_protocol(int protocol, ncclDevWorkColl* item) {
  switch (protocol) {
    case NCCL_PROTO_LL:
      return run_collective<Fn, T, Algo, NCCL_PROTO_LL>(item);
    case NCCL_PROTO_LL128:
      return run_collective<Fn, T, Algo, NCCL_PROTO_LL128>(item);
    default:
      return run_collective<Fn, T, Algo, NCCL_PROTO_SIMPLE>(item);
  }
}

template <ncclFunc_t Fn, int Algo>
void with_size(int protocol, ncclDevWorkColl* item) {
  switch (shared->reduction.size()) {
    case 1:
      return with_protocol<Fn, int8_t, Algo>(protocol, item);
    case 2:
      return with_protocol<Fn, int16_t, Algo>(protocol, item);
    case 4:
      return with_protocol<Fn, int32_t, Algo>(protocol, item);
    default:
      return with_protocol<Fn, int64_t, Algo>(protocol, item);
  }
}

void run_collectives(const Function& function) {
  for (int index = 0; index < shared->nWorks; ++index) {
    auto* item = work<ncclDevWorkColl>(index);
    shared->reduction = {function.op, function.type, item->redOpArg};
    if (item->redOpArgIsPtr) {
      shared->reduction.argument = 0;
      std::memcpy(&shared->reduction.argument, reinterpret_cast<void*>(item->redOpArg),
                  shared->reduction.size());
    }
    bool tree = function.algorithm == NCCL_ALGO_TREE;
    switch (function.collective) {
      case ncclFuncAllReduce:
        tree ? with_size<ncclFuncAllReduce, NCCL_ALGO_TREE>(function.protocol, item)
             : with_size<ncclFuncAllReduce, NCCL_ALGO_RING>(function.protocol, item);
        break;
      case ncclFuncReduceScatter:
        with_size<ncclFuncReduceScatter, NCCL_ALGO_RING>(function.protocol, item);
        break;
      case ncclFuncReduce:
        with_size<ncclFuncReduce, NCCL_ALGO_RING>(function.protocol, item);
        break;
      case ncclFuncAllGather:
        with_protocol<ncclFuncAllGather, int8_t, NCCL_ALGO_RING>(function.protocol, item);
        break;
      default:
        with_protocol<ncclFuncBroadcast, int8_t, NCCL_ALGO_RING>(function.protocol, item);
    }
  }
}

// All sends and receives of a batch run at the same time: each may wait for a peer that waits for another.
void run_point_to_point() {
  using Run = RunWorkBatch<ncclFuncSendRecv, int8_t, FuncCopy<int8_t>, NCCL_ALGO_RING, NCCL_PROTO_SIMPLE>;
  std::vector<std::function<void()>> tasks;
  for (int index = 0; index < shared->nWorks; ++index) {
    auto* item = work<ncclDevWorkP2p>(index);
    int part = ncclP2pChannelToPart(item->nP2pChannels, item->channelBase, shared->channelId);
    bool sends = part < item->nSendChannels, receives = part < item->nRecvChannels;
    size_t begin, end;
    if (item->nSendChannels) {
      ncclP2pPartBounds(item->nSendChannels, part, item->sendBytes, &begin, &end);
      item->sendAddr = static_cast<char*>(item->sendAddr) + begin;
      item->sendBytes = end - begin;
    }
    if (item->nRecvChannels) {
      ncclP2pPartBounds(item->nRecvChannels, part, item->recvBytes, &begin, &end);
      item->recvAddr = static_cast<char*>(item->recvAddr) + begin;
      item->recvBytes = end - begin;
    }
    if (item->sendRank == shared->comm.rank) {
      if (sends) std::memmove(item->recvAddr, item->sendAddr, item->sendBytes);
      continue;
    }
    if (sends) {
      tasks.push_back([=] {
        item->sendProtoLL ? Run().runSend<ProtoLL>(0, WARP_SIZE, 0, item)
                          : Run().runSend<ProtoSimple<1, 1>>(0, WARP_SIZE, 0, item);
      });
    }
    if (receives) {
      tasks.push_back([=] {
        item->recvProtoLL ? Run().runRecv<ProtoLL>(0, WARP_SIZE, 0, item)
                          : Run().runRecv<ProtoSimple<1, 1>>(0, WARP_SIZE, 0, item);
      });
    }
  }
  if (!tasks.empty()) together(std::move(tasks));
}

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 29, 0)
void run_all_gather_v(int protocol) {
  switch (protocol) {
    case NCCL_PROTO_LL:
      return runAllGatherV<int8_t, FuncCopy<int8_t>, ProtoLL>();
    case NCCL_PROTO_LL128:
      return runAllGatherV<int8_t, FuncCopy<int8_t>, ProtoLL128>();
    default:
      return runAllGatherV<int8_t, FuncCopy<int8_t>, ProtoSimple<1, 1>>();
  }
}
#endif

bool known(const Function& function) {
  return function.collective == ncclFuncSendRecv || function.algorithm == NCCL_ALGO_RING ||
         function.algorithm == NCCL_ALGO_TREE;
}

void run_block(egpuRunning kernel, const ncclDevKernelArgs* arguments, int block) {
  auto* whole = reinterpret_cast<CommAndChannels*>(arguments->comm);
  Shared state;
  uint64_t channels = arguments->channelMask;
  for (int skipped = 0; skipped < block; ++skipped) channels &= channels - 1;
  state.channelId = __builtin_ctzll(channels);
  state.comm = *arguments->comm;
  state.channel = whole->channels[state.channelId];
  state.kernel = kernel;
  Shared* before = shared;
  shared = &state;
  auto* batches = reinterpret_cast<const Batch*>(arguments + 1);
  for (int index = block; !*state.comm.abortFlag;) {
    const Function& function = kFunctions[batches[index].funcId];
    const Batch& last = batches[load_work(arguments, index)];
    if (!known(function)) {
      egpuFail(kernel, "this algorithm of NCCL is not emulated; use NCCL_ALGO=Ring,Tree");
      break;
    }
    shared->reduction = {};
    if (function.collective == ncclFuncSendRecv) {
      run_point_to_point();
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 29, 0)
    } else if (function.collective == ncclFuncAllGatherV) {
      run_all_gather_v(function.protocol);
#endif
    } else {
      run_collectives(function);
    }
    if (last.nextJump == 0) break;
    index = static_cast<int>(&last - batches) + last.nextJump;
  }
  shared = before;
}

}  // namespace

void run_kernel(const void* arguments, int blocks) {
  auto* known_arguments = static_cast<const ncclDevKernelArgs*>(arguments);
  egpuRunning kernel = egpuThisKernel();
  std::vector<std::function<void()>> tasks;
  for (int block = 0; block < blocks; ++block)
    tasks.push_back([=] { run_block(kernel, known_arguments, block); });
  run_together(std::move(tasks));
}

}  // namespace device_side
