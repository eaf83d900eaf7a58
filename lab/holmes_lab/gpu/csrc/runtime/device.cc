// The emulated GPUs of this process: their number and their properties.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "api.h"
#include "emulated_gpu.h"
#include "memory.h"
#include "text.h"

namespace gpu {

namespace {

thread_local int device_of_thread = 0;

constexpr int kThreads = 2048, kRegisters = 65536, kShared = 164 << 10, kWarp = 32;

}  // namespace

// The visible GPUs of the node: those of HOLMES_GPU_COUNT that CUDA_VISIBLE_DEVICES lists.
int device_count() {
  static const int count = [] {
    int all = static_cast<int>(egpuSetting("COUNT", 1)), shown = 0;
    const char* visible = getenv("CUDA_VISIBLE_DEVICES");
    if (!visible) return all;
    for (const char* place = visible; *place;) {
      char* end;
      long number = strtol(place, &end, 10);
      if (end == place || number < 0 || number >= all)
        break;  // CUDA shows those before the first invalid one
      ++shown;
      place = *end == ',' ? end + 1 : end;
    }
    return shown;
  }();
  return count;
}

// The number of a visible device on its node.
static int number_on_node(int device) {
  const char* place = getenv("CUDA_VISIBLE_DEVICES");
  for (int index = 0; place && index < device; ++index) place = strchr(place, ',') + 1;
  return place ? atoi(place) : device;
}

int current_device() { return device_of_thread; }

static bool exists(int device) { return device >= 0 && device < device_count(); }

static int attribute(int which, int device) {
  switch (which) {
    case 2:
    case 3:
    case cudaDevAttrMaxThreadsPerBlock:
      return 1024;
    case 4:
      return 64;
    case cudaDevAttrMaxGridDimX:
      return 2147483647;
    case 6:
    case 7:
      return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      return 48 << 10;
    case cudaDevAttrWarpSize:
      return kWarp;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor:
      return kRegisters;
    case cudaDevAttrClockRate:
      return 1410000;
    case cudaDevAttrMemoryClockRate:
      return 1215000;
    case cudaDevAttrGlobalMemoryBusWidth:
      return 5120;
    case cudaDevAttrL2CacheSize:
      return 40 << 20;
    case cudaDevAttrMultiProcessorCount:
      return static_cast<int>(egpuSetting("SMS", 108));
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      return kThreads;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      return 32;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return kShared;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return kShared - 1024;
    case cudaDevAttrPciBusId:
      return static_cast<int>(EGPU_FIRST_BUS) + number_on_node(device);
    case cudaDevAttrAsyncEngineCount:
      return 3;
    case cudaDevAttrComputeCapabilityMajor:
      return EGPU_MAJOR;
    case cudaDevAttrComputeCapabilityMinor:
      return EGPU_MINOR;
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrMemoryPoolsSupported:
      return 1;
    default:
      return 0;  // not supported: GPUDirect, virtual memory management, multicast, peers, graphs
  }
}

}  // namespace gpu

using gpu::result;

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = gpu::device_count();
  return *count ? cudaSuccess : result(cudaErrorNoDevice);
}

// These two functions do not return the error of a failed kernel: torch's guards call them in destructors.
cudaError_t cudaGetDevice(int* device) {
  *device = gpu::current_device();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (!gpu::exists(device)) return result(cudaErrorInvalidDevice);
  gpu::device_of_thread = device;
  return cudaSuccess;
}

cudaError_t cudaSetDeviceFlags(unsigned) { return result(cudaSuccess); }

cudaError_t cudaGetDeviceFlags(unsigned* flags) {
  *flags = 0;
  return result(cudaSuccess);
}

cudaError_t cudaDeviceReset(void) {
  gpu::synchronize_device("cudaDeviceReset", gpu::current_device());
  return result(cudaSuccess);
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return result(cudaSuccess);
}

cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

cudaError_t cudaDeviceGetAttribute(int* value, enum cudaDeviceAttr attribute, int device) {
  if (!gpu::exists(device)) return result(cudaErrorInvalidDevice);
  *value = gpu::attribute(attribute, device);
  return result(cudaSuccess);
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* properties, int device) {
  if (!gpu::exists(device)) return result(cudaErrorInvalidDevice);
  auto of = [&](enum cudaDeviceAttr attribute) { return gpu::attribute(attribute, device); };
  memset(properties, 0, sizeof *properties);
  snprintf(properties->name, sizeof properties->name, "holmes emulated GPU");
  snprintf(properties->uuid.bytes, sizeof properties->uuid.bytes, "holmes-gpu-%d",
           gpu::number_on_node(device));
  properties->totalGlobalMem = gpu::memory_of(device).total();
  properties->sharedMemPerBlock = of(cudaDevAttrMaxSharedMemoryPerBlock);
  properties->regsPerBlock = of(cudaDevAttrMaxRegistersPerBlock);
  properties->warpSize = of(cudaDevAttrWarpSize);
  properties->memPitch = 2147483647;
  properties->maxThreadsPerBlock = of(cudaDevAttrMaxThreadsPerBlock);
  for (int axis = 0; axis < 3; ++axis) {
    properties->maxThreadsDim[axis] = axis < 2 ? 1024 : 64;
    properties->maxGridSize[axis] = axis ? 65535 : 2147483647;
  }
  properties->totalConstMem = 65536;
  properties->major = EGPU_MAJOR;
  properties->minor = EGPU_MINOR;
  properties->textureAlignment = 512;
  properties->multiProcessorCount = of(cudaDevAttrMultiProcessorCount);
  properties->canMapHostMemory = properties->concurrentKernels = properties->unifiedAddressing = 1;
  properties->streamPrioritiesSupported = 1;
  properties->pciBusID = of(cudaDevAttrPciBusId);
  properties->asyncEngineCount = of(cudaDevAttrAsyncEngineCount);
  properties->memoryBusWidth = of(cudaDevAttrGlobalMemoryBusWidth);
  properties->l2CacheSize = of(cudaDevAttrL2CacheSize);
  properties->maxThreadsPerMultiProcessor = gpu::kThreads;
  properties->sharedMemPerMultiprocessor = gpu::kShared;
  properties->regsPerMultiprocessor = gpu::kRegisters;
  properties->sharedMemPerBlockOptin = of(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  properties->maxBlocksPerMultiProcessor = of(cudaDevAttrMaxBlocksPerMultiprocessor);
#if CUDART_VERSION < 13000
  properties->clockRate = of(cudaDevAttrClockRate);
  properties->memoryClockRate = of(cudaDevAttrMemoryClockRate);
  properties->deviceOverlap = 1;
#endif
  return result(cudaSuccess);
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  if (!gpu::exists(device)) return result(cudaErrorInvalidDevice);
  snprintf(id, length, "0000:%02X:00.0", gpu::attribute(cudaDevAttrPciBusId, device));
  return result(cudaSuccess);
}

cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* id) {
  char own[16];
  for (*device = 0; *device < gpu::device_count(); ++*device) {
    cudaDeviceGetPCIBusId(own, sizeof own, *device);
    if (strcasecmp(own, id) == 0) return result(cudaSuccess);
  }
  return result(cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceSetLimit(enum cudaLimit, size_t) { return result(cudaSuccess); }

cudaError_t cudaDeviceGetLimit(size_t* value, enum cudaLimit) {
  *value = 1024;
  return result(cudaSuccess);
}

// Peers have no path: NCCL takes shared memory inside a node, as on nodes without NVLink whose PCIe switches
// isolate.
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return result(cudaSuccess);
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return result(cudaErrorPeerAccessUnsupported); }

cudaError_t cudaDeviceDisablePeerAccess(int) { return result(cudaErrorPeerAccessNotEnabled); }

cudaError_t cudaProfilerStart(void) { return result(cudaSuccess); }

cudaError_t cudaProfilerStop(void) { return result(cudaSuccess); }
}
