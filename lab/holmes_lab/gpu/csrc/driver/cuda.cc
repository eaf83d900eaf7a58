// libcuda.so.1: the driver functions that libcaffe2_nvrtc links and that NCCL asks for by name, through the
// runtime.

#include "cuda.h"

#include <string.h>

extern "C" cudaError_t egpuLaunchBuffer(const void* symbol, const void* buffer, size_t size, int blocks,
                                        cudaStream_t stream, cudaEvent_t started);

namespace {

CUresult from(cudaError_t error) { return static_cast<CUresult>(error); }  // the values are the same

// A context is its device.
CUcontext context_of(CUdevice device) {
  return reinterpret_cast<CUcontext>(static_cast<intptr_t>(device) + 1);
}
CUdevice device_of(CUcontext context) {
  return static_cast<CUdevice>(reinterpret_cast<intptr_t>(context) - 1);
}

}  // namespace

extern "C" {

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int* version) { return from(cudaDriverGetVersion(version)); }

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = cudaGetErrorName(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int* count) { return from(cudaGetDeviceCount(count)); }

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  int count = 0;
  cudaGetDeviceCount(&count);
  *device = ordinal;
  return ordinal >= 0 && ordinal < count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  return from(cudaDeviceGetAttribute(value, attribute, device));
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  cudaDeviceProp properties;
  cudaError_t error = cudaGetDeviceProperties(&properties, device);
  memcpy(uuid, &properties.uuid, sizeof *uuid);
  return from(error);
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = context_of(device);
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) { return from(cudaGetDevice(device)); }

CUresult cuCtxGetCurrent(CUcontext* context) {
  CUdevice device = 0;
  cudaGetDevice(&device);
  *context = context_of(device);
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
  return context ? from(cudaSetDevice(device_of(context))) : CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr address) {
  cudaPointerAttributes attributes;
  cudaPointerGetAttributes(&attributes, reinterpret_cast<void*>(address));
  if (attributes.type != cudaMemoryTypeDevice) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
      *static_cast<CUcontext*>(data) = context_of(attributes.device);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<CUmemorytype*>(data) = CU_MEMORYTYPE_DEVICE;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(data) = attributes.device;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      *static_cast<int*>(data) = 1;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

// NCCL 2.30 asks it of every communicator, before it asks whether there is memory of that kind (there is
// none).
CUresult cuMemGetAllocationGranularity(size_t* size, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  *size = 2u << 20;
  return CUDA_SUCCESS;
}

// NCCL hands over one buffer of parameters: extra = {BUFFER_POINTER, buffer, BUFFER_SIZE, &size, END}.
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters,
                          void** extra) {
  const void* buffer = nullptr;
  size_t size = 0;
  for (void** item = extra; item && *item != CU_LAUNCH_PARAM_END; item += 2) {
    if (*item == CU_LAUNCH_PARAM_BUFFER_POINTER) buffer = item[1];
    if (*item == CU_LAUNCH_PARAM_BUFFER_SIZE) size = *static_cast<size_t*>(item[1]);
  }
  if (parameters || !buffer)
    return from(cudaLaunchKernel(function, dim3(), dim3(), parameters, 0, config->hStream));
  cudaEvent_t started = nullptr;
  for (unsigned index = 0; index < config->numAttrs; ++index) {
    const CUlaunchAttribute& attribute = config->attrs[index];
    if (attribute.id == CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT)
      started = attribute.value.launchCompletionEvent.event;
  }
  return from(
      egpuLaunchBuffer(function, buffer, size, static_cast<int>(config->gridDimX), config->hStream, started));
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned, unsigned, unsigned, unsigned,
                        unsigned, unsigned, CUstream stream, void** parameters, void** extra) {
  CUlaunchConfig config{};
  config.gridDimX = grid_x;
  config.hStream = stream;
  return cuLaunchKernelEx(&config, function, parameters, extra);
}

// Functions that libcaffe2_nvrtc links, and calls only for code that was compiled for a device.
#define REFUSED(call) \
  CUresult call() { return CUDA_ERROR_NOT_SUPPORTED; }
REFUSED(cuFuncGetAttribute)
REFUSED(cuFuncSetAttribute)
REFUSED(cuFuncSetCacheConfig)
REFUSED(cuLaunchCooperativeKernel)
REFUSED(cuLinkAddData_v2)
REFUSED(cuLinkComplete)
REFUSED(cuLinkCreate_v2)
REFUSED(cuModuleGetFunction)
REFUSED(cuModuleLoad)
REFUSED(cuModuleLoadData)
REFUSED(cuModuleLoadDataEx)
REFUSED(cuModuleUnload)
REFUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSED(cuTensorMapEncodeTiled)
}

// Functions that torch looks up, all or none, before it reports that memory is exhausted. No emulated GPU has
// virtual memory.
#define NO_VIRTUAL_MEMORY(call)                     \
  extern "C" CUresult egpu_##call() __asm__(#call); \
  extern "C" CUresult egpu_##call() { return CUDA_ERROR_NOT_SUPPORTED; }
NO_VIRTUAL_MEMORY(cuMemGetAddressRange)
NO_VIRTUAL_MEMORY(cuMemAddressReserve)
NO_VIRTUAL_MEMORY(cuMemRelease)
NO_VIRTUAL_MEMORY(cuMemMap)
NO_VIRTUAL_MEMORY(cuMemAddressFree)
NO_VIRTUAL_MEMORY(cuMemSetAccess)
NO_VIRTUAL_MEMORY(cuMemUnmap)
NO_VIRTUAL_MEMORY(cuMemCreate)
NO_VIRTUAL_MEMORY(cuMemExportToShareableHandle)
NO_VIRTUAL_MEMORY(cuMemImportFromShareableHandle)
NO_VIRTUAL_MEMORY(cuMemRetainAllocationHandle)
NO_VIRTUAL_MEMORY(cuMemGetAllocationPropertiesFromHandle)
NO_VIRTUAL_MEMORY(cuMemsetD32Async)
NO_VIRTUAL_MEMORY(cuStreamWriteValue32)
