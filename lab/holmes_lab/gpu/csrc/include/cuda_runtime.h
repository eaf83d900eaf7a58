// Declarations that NCCL's host code needs from cuda_runtime.h besides the API: vector types, and a launch by
// a function's address.
#pragma once

#include <assert.h>
#include <string.h>
#include <strings.h>

#include "cuda_runtime_api.h"
#include "driver_types.h"

#ifdef __cplusplus

struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) ulong2 {
  unsigned long x, y;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};

template <typename Function>
inline cudaError_t cudaLaunchKernel(Function* function, dim3 grid, dim3 block, void** arguments,
                                    size_t shared, cudaStream_t stream) {
  return ::cudaLaunchKernel(reinterpret_cast<const void*>(function), grid, block, arguments, shared, stream);
}

template <typename Function>
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Function* function) {
  return ::cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(function));
}

template <typename T>
inline cudaError_t cudaHostAlloc(T** address, size_t size, unsigned flags) {
  return ::cudaHostAlloc(reinterpret_cast<void**>(address), size, flags);
}

template <typename T>
inline cudaError_t cudaMallocAsync(T** address, size_t size, cudaMemPool_t pool, cudaStream_t stream) {
  return ::cudaMallocFromPoolAsync(reinterpret_cast<void**>(address), size, pool, stream);
}

template <typename T>
inline cudaError_t cudaMalloc(T** address, size_t size) {
  return ::cudaMalloc(reinterpret_cast<void**>(address), size);
}

#endif
