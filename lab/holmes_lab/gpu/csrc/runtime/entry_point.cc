// Driver functions by name, from libcuda.so.1 (driver/cuda.cc). Others are not found.

#include <dlfcn.h>

#include "api.h"

extern "C" {

cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long,
                                    enum cudaDriverEntryPointQueryResult* status) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *function = driver ? dlsym(driver, symbol) : nullptr;
  if (status) *status = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return gpu::result(cudaSuccess);
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult* status) {
  return cudaGetDriverEntryPoint(symbol, function, flags, status);
}
}
