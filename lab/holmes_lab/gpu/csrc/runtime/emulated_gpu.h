// Functions of the emulated GPU, in addition to CUDA's API, for the operators (csrc/operators) and NCCL's
// device code (csrc/nccl).
//
//     host thread -- egpuLaunch --> stream's queue -- scheduler.cc --> a worker (workers.cc) runs
//     kernel.run(kernel.argument)
//
// Device memory is host memory, so a kernel is a function of the host that reads and writes it through plain
// pointers.
#pragma once

#include "cuda_runtime_api.h"

// Properties of every emulated GPU: compute capability 8.0 (so that no program expects a tensor memory
// accelerator or multicast, which are not emulated), the PCI bus of a node's first GPU, and its memory unless
// HOLMES_GPU_MEMORY_MB is set.
#define EGPU_MAJOR 8
#define EGPU_MINOR 0
#define EGPU_FIRST_BUS 0x40u
#define EGPU_MEMORY_MB 16384

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
  const char* name;                 // shown in errors and when a job hangs; copied
  void (*run)(void* argument);      // on a worker thread, once all before it in the stream is done
  void (*release)(void* argument);  // on that thread, after run
  void* argument;
  double flops;  // floating-point operations of this kernel
  double bytes;  // bytes that it reads and writes in device memory
  int sms;       // multiprocessors that it holds while it runs; 0: it computes on those that are free
} egpuKernel;

// Puts a kernel into a stream. Returns a device's earlier error, as every CUDA call after one does.
cudaError_t egpuLaunch(cudaStream_t stream, const egpuKernel* kernel);

// From now on a launch of the kernel with this symbol (the address of its host stub) calls run(arguments,
// blocks) on a worker thread. arguments: a copy of the parameter buffer; it holds one multiprocessor for each
// of its blocks.
typedef void (*egpuHostFunction)(const void* arguments, int blocks);
void egpuRegisterKernel(const void* symbol, const char* name, egpuHostFunction run);

// Describes the launches of this host thread from now on, as JSON members ("communicator": "0x12ab",
// "number": 7), for the report of a job that hangs; "" ends it.
void egpuDescribeLaunch(const char* json_members);

// Memory that this host thread's next kernel reads or writes; of use where egpuSearchesRaces().
typedef struct {
  const void* begin;
  size_t size;
  int writes;
} egpuAccess;
int egpuSearchesRaces(void);
void egpuDescribeAccesses(const egpuAccess* accesses, size_t count);

// In a running kernel: a handle of this kernel, for the functions below. Helper threads of the kernel may
// call them.
typedef struct egpuRunning_st* egpuRunning;
egpuRunning egpuThisKernel(void);

// Says that the kernel waits now, and for which target (JSON members); "": it goes on.
void egpuWaitsFor(egpuRunning kernel, const char* json_members);

// Says that the kernel makes progress (a step of a collective). A job without progress counts as hanging.
void egpuProgress(void);

// It failed: its device reports cudaErrorLaunchFailure with this message from now on.
void egpuFail(egpuRunning kernel, const char* message);

// This host thread waits outside CUDA for another rank, as `call`; target: JSON members. NULL: it goes on.
void egpuHostWaits(const char* call, const char* target);

// Called after a poll without result, by a host thread that will poll again: the thread naps in between.
// Returns the nanoseconds since its first poll. egpuGot: the poll has succeeded, and the naps end.
long egpuAskedInVain(void);
void egpuGot(void);

// The value of HOLMES_GPU_<NAME>, or the default.
long egpuSetting(const char* name, long otherwise);

#ifdef __cplusplus
}
#endif
