// What the operators (csrc/operators) and NCCL's device side (csrc/nccl) ask of the emulated GPU besides
// CUDA's own API.
//
//     host thread -- egpuLaunch --> stream's queue -- scheduler.cc --> a worker (workers.cc) runs
//     kernel.run(kernel.argument)
//
// Device memory is host memory, so a kernel is a function of the host that reads and writes it through plain
// pointers.
#pragma once

#include "cuda_runtime_api.h"

// What an emulated GPU is to all who ask: compute capability 8.0 (no tensor memory accelerator, no multicast:
// what nobody here emulates), the PCI bus of a node's first one, its memory unless HOLMES_GPU_MEMORY_MB says
// otherwise.
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

// In a running kernel: itself, for the functions below (which its helper threads may call).
typedef struct egpuRunning_st* egpuRunning;
egpuRunning egpuThisKernel(void);

// What the kernel waits for now, as JSON members; "": it goes on.
void egpuWaitsFor(egpuRunning kernel, const char* json_members);

// It has moved on (a step of a collective). A job in which nothing moves on hangs.
void egpuProgress(void);

// It failed: its device reports cudaErrorLaunchFailure with this message from now on.
void egpuFail(egpuRunning kernel, const char* message);

// This host thread waits outside CUDA for another rank, as `call`; target: JSON members. NULL: it goes on.
void egpuHostWaits(const char* call, const char* target);

// This host thread asked for something in vain, and will ask again: it naps in between. Returns the
// nanoseconds since it first asked. egpuGot: it has what it asked for; it is awake again.
long egpuAskedInVain(void);
void egpuGot(void);

// The value of HOLMES_GPU_<NAME>, or the default.
long egpuSetting(const char* name, long otherwise);

#ifdef __cplusplus
}
#endif
