// Checks the results of this NCCL on emulated GPUs: a layout that differs between its host code and the
// device side would otherwise go unnoticed. Run once for each build.
//
//     nccl_check [RANKS]      default 3: two on one host (shared memory), the others on their own (network)
//
// Every collective with ring and tree, each protocol, types and sizes, against plain arithmetic. Inputs are
// small integers, so that sums are exact in every type. Prints wrong results; status 1. A rank that hangs is
// killed: status 1.

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "nccl.h"

namespace {

constexpr unsigned kPatience_s = 300;
const size_t kSizes[] = {1, 1000, 70001};
constexpr size_t kLarge = 3 << 20;  // elements: the connections' buffers are used several times

struct Shared {  // by all ranks
  pthread_barrier_t barrier;
  ncclUniqueId id;
};

struct Rank {
  int rank, ranks;
  Shared* shared;
  ncclComm_t comm;
  cudaStream_t stream;
  std::string how;  // "Tree LL"
  int checks = 0, wrong = 0;
};

#define MUST(call)                                                                     \
  do {                                                                                 \
    int status = static_cast<int>(call);                                               \
    if (status) {                                                                      \
      fprintf(stderr, "%s: status %d %s\n", #call, status, ncclGetLastError(nullptr)); \
      _exit(1);                                                                        \
    }                                                                                  \
  } while (0)

double brought(int rank, size_t place) { return static_cast<double>((place * 7 + rank * 3) % 8); }

template <typename T>
T as(double value) {
  return static_cast<T>(static_cast<float>(value));
}
template <typename T>
double back(T value) {
  return static_cast<double>(static_cast<float>(value));
}

// Runs an operation on `in` elements of this rank and compares the `out` elements that it leaves.
template <typename T>
void check(Rank& me, const char* what, size_t in, size_t out,
           const std::function<void(void*, void*)>& operation,
           const std::function<double(size_t)>& expected) {
  std::vector<T> host(std::max(in, out));
  for (size_t place = 0; place < in; ++place) host[place] = as<T>(brought(me.rank, place));
  void *from, *to;
  MUST(cudaMalloc(&from, in * sizeof(T)));
  MUST(cudaMalloc(&to, out * sizeof(T)));
  MUST(cudaMemcpyAsync(from, host.data(), in * sizeof(T), cudaMemcpyHostToDevice, me.stream));
  MUST(cudaMemsetAsync(to, 0x55, out * sizeof(T), me.stream));
  operation(from, to);
  MUST(cudaStreamSynchronize(me.stream));
  MUST(cudaMemcpy(host.data(), to, out * sizeof(T), cudaMemcpyDeviceToHost));
  ++me.checks;
  for (size_t place = 0; place < out; ++place) {
    if (back(host[place]) == expected(place)) continue;
    ++me.wrong;
    printf("wrong: %s, %s, %zu elements of %zu bytes, rank %d of %d: at %zu %g is not %g\n", me.how.c_str(),
           what, in, sizeof(T), me.rank, me.ranks, place, back(host[place]), expected(place));
    break;
  }
  MUST(cudaFree(from));
  MUST(cudaFree(to));
}

template <typename T>
void reductions(Rank& me, ncclDataType_t type, size_t size) {
  auto over_ranks = [&me](size_t place, auto combine) {
    double value = brought(0, place);
    for (int rank = 1; rank < me.ranks; ++rank) value = combine(value, brought(rank, place));
    return value;
  };
  auto sum = [over_ranks](size_t place) {
    return over_ranks(place, [](double a, double b) { return a + b; });
  };
  auto all_reduce = [&](const char* what, ncclRedOp_t op, const std::function<double(size_t)>& expected) {
    check<T>(
        me, what, size, size,
        [&](void* from, void* to) { MUST(ncclAllReduce(from, to, size, type, op, me.comm, me.stream)); },
        expected);
  };
  all_reduce("all-reduce sum", ncclSum, sum);
  all_reduce("all-reduce max", ncclMax,
             [&](size_t at) { return over_ranks(at, [](double a, double b) { return std::max(a, b); }); });
  all_reduce("all-reduce min", ncclMin,
             [&](size_t at) { return over_ranks(at, [](double a, double b) { return std::min(a, b); }); });
  T factor = as<T>(2);
  ncclRedOp_t twice;
  MUST(ncclRedOpCreatePreMulSum(&twice, &factor, type, ncclScalarHostImmediate, me.comm));
  all_reduce("all-reduce of twice", twice, [&](size_t at) { return 2 * sum(at); });
  MUST(ncclRedOpDestroy(twice, me.comm));
  int root = static_cast<int>(size) % me.ranks;
  check<T>(
      me, "reduce", size, size,
      [&](void* from, void* to) {
        MUST(ncclReduce(from, to, size, type, ncclSum, root, me.comm, me.stream));
        if (me.rank != root)
          MUST(cudaMemcpyAsync(to, from, size * sizeof(T), cudaMemcpyDeviceToDevice, me.stream));
      },
      [&](size_t at) { return me.rank == root ? sum(at) : brought(me.rank, at); });
  check<T>(
      me, "reduce-scatter", size * me.ranks, size,
      [&](void* from, void* to) {
        MUST(ncclReduceScatter(from, to, size, type, ncclSum, me.comm, me.stream));
      },
      [&](size_t at) { return sum(at + size * me.rank); });
}

template <typename T>
void copies(Rank& me, ncclDataType_t type, size_t size) {
  int root = static_cast<int>(size) % me.ranks, ranks = me.ranks;
  auto part = [](void* base, size_t place) { return static_cast<void*>(static_cast<T*>(base) + place); };
  check<T>(
      me, "broadcast", size, size,
      [&](void* from, void* to) { MUST(ncclBroadcast(from, to, size, type, root, me.comm, me.stream)); },
      [&](size_t at) { return brought(root, at); });
  check<T>(
      me, "all-gather", size, size * ranks,
      [&](void* from, void* to) { MUST(ncclAllGather(from, to, size, type, me.comm, me.stream)); },
      [&](size_t at) { return brought(static_cast<int>(at / size), at % size); });
  check<T>(
      me, "all-to-all by send and receive", size * ranks, size * ranks,
      [&](void* from, void* to) {
        MUST(ncclGroupStart());
        for (int peer = 0; peer < ranks; ++peer) {
          MUST(ncclSend(part(from, peer * size), size, type, peer, me.comm, me.stream));
          MUST(ncclRecv(part(to, peer * size), size, type, peer, me.comm, me.stream));
        }
        MUST(ncclGroupEnd());
      },
      [&](size_t at) { return brought(static_cast<int>(at / size), at % size + me.rank * size); });
}

template <typename T>
void all_of(Rank& me, ncclDataType_t type) {
  for (size_t size : kSizes) {
    reductions<T>(me, type, size);
    copies<T>(me, type, size);
  }
}

void rank_main(Rank me) {
  const std::string host = "holmes-check-" + std::to_string(me.rank < 2 ? 0 : me.rank);
  setenv("NCCL_HOSTID", host.c_str(), 1);
  setenv("HOLMES_GPU_COUNT", "2", 1);
  MUST(cudaSetDevice(me.rank % 2));
  MUST(cudaStreamCreateWithFlags(&me.stream, cudaStreamNonBlocking));
  for (const char* algorithm : {"Ring", "Tree"}) {
    for (const char* protocol : {"Simple", "LL", "LL128"}) {
      me.how = std::string(algorithm) + " " + protocol;
      setenv("NCCL_ALGO", (std::string("allreduce:") + algorithm).c_str(), 1);
      setenv("NCCL_PROTO", protocol, 1);
      if (me.rank == 0) MUST(ncclGetUniqueId(&me.shared->id));
      pthread_barrier_wait(&me.shared->barrier);
      MUST(ncclCommInitRank(&me.comm, me.ranks, me.shared->id, me.rank));
      all_of<float>(me, ncclFloat32);
      all_of<__nv_bfloat16>(me, ncclBfloat16);
      if (algorithm[0] == 'R') {  // the types' arithmetic does not depend on how data travels
        all_of<half>(me, ncclFloat16);
        all_of<double>(me, ncclFloat64);
        all_of<int32_t>(me, ncclInt32);
        all_of<int64_t>(me, ncclInt64);
        all_of<uint8_t>(me, ncclUint8);
      }
      if (protocol[0] == 'S') reductions<float>(me, ncclFloat32, kLarge);
      pthread_barrier_wait(&me.shared->barrier);
      MUST(ncclCommDestroy(me.comm));
    }
  }
  if (me.rank == 0) printf("%d checks on each of %d ranks\n", me.checks, me.ranks);
  fflush(stdout);
  _exit(me.wrong != 0);
}

}  // namespace

int main(int count, char** arguments) {
  int ranks = count > 1 ? atoi(arguments[1]) : 3;
  auto* shared = static_cast<Shared*>(
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  pthread_barrierattr_t across;
  pthread_barrierattr_init(&across);
  pthread_barrierattr_setpshared(&across, PTHREAD_PROCESS_SHARED);
  pthread_barrier_init(&shared->barrier, &across, ranks);
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    pid_t child = fork();
    if (child == 0) {
      alarm(kPatience_s);
      rank_main({rank, ranks, shared, nullptr, nullptr, ""});
    }
    children.push_back(child);
  }
  int worst = 0, status = 0;
  while (wait(&status) > 0) {
    if (status && !worst) {
      worst = 1;
      if (WIFSIGNALED(status))
        printf("wrong: a rank %s\n", WTERMSIG(status) == SIGALRM ? "hung" : strsignal(WTERMSIG(status)));
      for (pid_t child : children) kill(child, SIGKILL);
    }
  }
  return worst;
}
