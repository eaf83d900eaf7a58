// The kernels that NCCL's host code launches by their symbols, and the other symbols that it links from its
// device objects.

#include <cstring>

#include "blocks.h"
#include "comm.h"
#include "device.h"
#include "emulated_gpu.h"
#include "reduction.h"
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
#include "sym_kernels.h"
#else
#include "symmetric.h"
#endif

// Each symbol is registered when the library is loaded. The symmetric kernels need memory that several GPUs
// map (cuMem). No emulated GPU has it, so NCCL does not launch them.
#define KERNEL(name, arguments) \
  void name(arguments const) {}
#include "kernels.inc"
#undef KERNEL

namespace {

struct Registered {
  Registered() {
#define KERNEL(name, arguments)                      \
  if (std::strncmp(#name, "ncclDevKernel", 13) == 0) \
    egpuRegisterKernel((const void*)name, #name, device_side::run_kernel);
#include "kernels.inc"
#undef KERNEL
  }
} registered;

struct OneRank {
  void* into;
  const void* from;
  size_t count;
  device_side::Reduction reduction;
};

void run_one_rank(void* argument) {
  auto& task = *static_cast<OneRank*>(argument);
  std::memmove(task.into, task.from, task.count * task.reduction.size());
  task.reduction.before(task.into, task.count);
}

void release_one_rank(void* argument) { delete static_cast<OneRank*>(argument); }

}  // namespace

// In a communicator of one rank only a factor is left of a reduction (src/device/onerank.cu).
ncclResult_t ncclLaunchOneRank(void* into, const void* from, size_t count, ncclDevRedOpFull op,
                               ncclDataType_t type, cudaStream_t stream) {
  static const device_side::Type types[] = {
      device_side::Type::kI8,   device_side::Type::kU8,     device_side::Type::kI32,
      device_side::Type::kU32,  device_side::Type::kI64,    device_side::Type::kU64,
      device_side::Type::kF16,  device_side::Type::kF32,    device_side::Type::kF64,
      device_side::Type::kBF16, device_side::Type::kF8E4M3, device_side::Type::kF8E5M2};
  device_side::Reduction reduction{device_side::Op::kNone, types[type], op.scalarArg};
  if (op.op == ncclDevPreMulSum) reduction.op = device_side::Op::kPreMulSum;
  if (op.scalarArgIsPtr)
    std::memcpy(&reduction.argument, reinterpret_cast<void*>(op.scalarArg), reduction.size());
  auto* task = new OneRank{into, from, count, reduction};
  double bytes = 2.0 * static_cast<double>(count) * static_cast<double>(reduction.size());
  egpuKernel kernel{"ncclOneRank", run_one_rank, release_one_rank, task, 0, bytes, 0};
  return egpuLaunch(stream, &kernel) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
ncclResult_t ncclGinResetSignalsAndCounters(ncclComm*, ncclDevComm_t const*) { return ncclInvalidUsage; }
#endif
