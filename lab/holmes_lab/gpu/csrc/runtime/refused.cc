// Calls that are not emulated. Each prints its name in a message and returns an error; queries return the
// true state.

#include <utility>

#include "api.h"
#include "text.h"

using gpu::refuse;
using gpu::result;

extern "C" {

// CUDA graphs: no stream ever captures.
cudaError_t cudaStreamIsCapturing(cudaStream_t, enum cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return result(cudaSuccess);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode* mode) {
  static thread_local enum cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
  std::swap(*mode, current);
  return result(cudaSuccess);
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                     const cudaGraphEdgeData**, size_t*) {
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus* status,
                                        unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                        size_t*) {
  if (id) *id = 0;
  return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream, enum cudaStreamCaptureStatus* status,
                                        unsigned long long* id, cudaGraph_t*, const cudaGraphNode_t**,
                                        const cudaGraphEdgeData**, size_t*) {
#endif
  if (id) *id = 0;
  return cudaStreamIsCapturing(stream, status);
}

// Graphs own no memory. torch 2.15 asks for it when it counts the memory of a device.
cudaError_t cudaDeviceGetGraphMemAttribute(int, enum cudaGraphMemAttributeType, void* value) {
  *static_cast<uint64_t*>(value) = 0;
  return result(cudaSuccess);
}

// All that can be set is the high-water mark, back to 0.
cudaError_t cudaDeviceSetGraphMemAttribute(int, enum cudaGraphMemAttributeType, void*) {
  return result(cudaSuccess);
}

#define NO_GRAPHS \
  "CUDA graphs are not emulated; run without them (--cuda-graph-impl none, torch.compile mode \"default\")"

cudaError_t cudaStreamBeginCapture(cudaStream_t, enum cudaStreamCaptureMode) {
  return refuse(cudaErrorStreamCaptureUnsupported, NO_GRAPHS);
}
}

// The arguments do not matter: none of these does anything.
#define REFUSED(call, what)                                    \
  extern "C" cudaError_t egpu_refused_##call() __asm__(#call); \
  extern "C" cudaError_t egpu_refused_##call() { return refuse(cudaErrorNotSupported, #call ": " what); }

REFUSED(cudaStreamBeginCaptureToGraph, NO_GRAPHS)
REFUSED(cudaStreamEndCapture, NO_GRAPHS)
REFUSED(cudaStreamUpdateCaptureDependencies, NO_GRAPHS)
REFUSED(cudaStreamUpdateCaptureDependencies_v2, NO_GRAPHS)
REFUSED(cudaGraphAddDependencies, NO_GRAPHS)
REFUSED(cudaGraphAddDependencies_v2, NO_GRAPHS)
REFUSED(cudaGraphAddEventRecordNode, NO_GRAPHS)
REFUSED(cudaGraphAddEventWaitNode, NO_GRAPHS)
REFUSED(cudaGraphAddNode, NO_GRAPHS)
REFUSED(cudaGraphAddNode_v2, NO_GRAPHS)
REFUSED(cudaGraphConditionalHandleCreate, NO_GRAPHS)
REFUSED(cudaGraphDebugDotPrint, NO_GRAPHS)
REFUSED(cudaGraphDestroy, NO_GRAPHS)
REFUSED(cudaGraphExecDestroy, NO_GRAPHS)
REFUSED(cudaGraphGetNodes, NO_GRAPHS)
REFUSED(cudaGraphInstantiate, NO_GRAPHS)
REFUSED(cudaGraphInstantiateWithFlags, NO_GRAPHS)
REFUSED(cudaGraphLaunch, NO_GRAPHS)
REFUSED(cudaGraphNodeGetDependencies, NO_GRAPHS)
REFUSED(cudaGraphNodeGetDependencies_v2, NO_GRAPHS)
REFUSED(cudaGraphRetainUserObject, NO_GRAPHS)
REFUSED(cudaUserObjectCreate, NO_GRAPHS)
REFUSED(cudaUserObjectRelease, NO_GRAPHS)
REFUSED(cudaIpcGetEventHandle, "events of other processes are not emulated")
REFUSED(cudaIpcOpenEventHandle, "events of other processes are not emulated")
REFUSED(cudaMemcpyToSymbol, "variables of device code are not emulated")
REFUSED(cudaGetSymbolAddress, "variables of device code are not emulated")
REFUSED(cudaLibraryLoadData, "device code is not emulated")
REFUSED(cudaLibraryLoadFromFile, "device code is not emulated")
REFUSED(cudaLibraryGetGlobal, "device code is not emulated")
REFUSED(cudaLibraryGetKernel, "device code is not emulated")
REFUSED(cudaLibraryGetKernelCount, "device code is not emulated")
REFUSED(cudaLibraryGetManaged, "device code is not emulated")
REFUSED(cudaLibraryGetUnifiedFunction, "device code is not emulated")
REFUSED(cudaLibraryUnload, "device code is not emulated")
REFUSED(cudaKernelSetAttributeForDevice, "device code is not emulated")
