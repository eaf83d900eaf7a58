// Errors: their names, the last error of the calling thread, and the message about calls that are not
// emulated.

#include <stdio.h>

#include <set>

#include "api.h"
#include "emulated_gpu.h"
#include "text.h"

namespace gpu {

namespace {

thread_local cudaError_t last_error = cudaSuccess;
thread_local std::string refusal;                // of this thread's last refused call
thread_local cudaError_t refused = cudaSuccess;  // the error that it returned

const char* interned(const std::string& message) {
  static std::mutex mutex;
  static auto* messages = new std::set<std::string>;
  std::lock_guard<std::mutex> lock(mutex);
  return messages->insert(message).first->c_str();
}

struct Named {
  cudaError_t error;
  const char *name, *text;
};

// The errors that this runtime returns or that torch and NCCL tell apart.
const Named kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorSymbolNotFound, "cudaErrorSymbolNotFound", "named symbol not found"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorPeerAccessUnsupported, "cudaErrorPeerAccessUnsupported", "peer access is not supported"},
    {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled",
     "peer access is already enabled"},
    {cudaErrorPeerAccessNotEnabled, "cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "memory is already registered"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered", "memory has not been registered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "not permitted when stream is capturing"},
};

}  // namespace

cudaError_t result(cudaError_t error) {
  if (error == cudaSuccess && device_count() > 0 && Scheduler::instance().any_failure() &&
      !Scheduler::instance().failure(current_device()).empty()) {
    error = cudaErrorLaunchFailure;
  }
  // The error of a kernel that is not emulated, if the caller did not check the status of its launch.
  if (error == cudaSuccess && last_error == cudaErrorInvalidDeviceFunction) error = last_error;
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

cudaError_t refuse(cudaError_t error, const std::string& message) {
  refusal = "emulated GPU: " + message;
  refused = error;
  static std::mutex mutex;
  static auto* told = new std::set<std::string>;
  std::lock_guard<std::mutex> lock(mutex);
  if (told->insert(message).second) fprintf(stderr, "holmes: %s\n", refusal.c_str());
  return result(error);
}

const char* message_of(cudaError_t error) {
  if (error == cudaErrorLaunchFailure) {
    std::string failure = Scheduler::instance().failure(current_device());
    if (!failure.empty()) return interned("emulated GPU: " + failure);
  }
  if (!refusal.empty() && error == refused) return interned(refusal);
  for (const Named& named : kErrors) {
    if (named.error == error) return named.text;
  }
  return interned(text("error %d", static_cast<int>(error)));
}

}  // namespace gpu

extern "C" {

cudaError_t cudaGetLastError(void) {
  cudaError_t error = gpu::last_error;
  gpu::last_error = cudaSuccess;
  return error != cudaSuccess ? error : gpu::result(cudaSuccess);
}

cudaError_t cudaPeekAtLastError(void) {
  return gpu::last_error != cudaSuccess ? gpu::last_error : gpu::result(cudaSuccess);
}

const char* cudaGetErrorString(cudaError_t error) { return gpu::message_of(error); }

const char* cudaGetErrorName(cudaError_t error) {
  for (const gpu::Named& named : gpu::kErrors) {
    if (named.error == error) return named.name;
  }
  return gpu::interned(gpu::text("error %d", static_cast<int>(error)));
}
}
