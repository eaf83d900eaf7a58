// Declarations that the files of the runtime share: the calling thread's device and errors, handles,
// addresses.
#pragma once

#include <string>
#include <vector>

#include "cuda_runtime_api.h"
#include "scheduler.h"

struct CUstream_st {
  gpu::StreamPointer stream;
};

struct CUevent_st {
  unsigned flags = 0;
  gpu::RecordPointer record;  // of the last cudaEventRecord
};

namespace gpu {

int device_count();
int current_device();

// The stream of a handle, or of a default stream of the current device. nullptr: not a stream.
StreamPointer stream_of(cudaStream_t handle);

// Sets the result of cudaGetLastError, and returns it. For a success, it returns an earlier failure of the
// device.
cudaError_t result(cudaError_t error);

// An error whose cudaGetErrorString is this message; it is printed once, too.
cudaError_t refuse(cudaError_t error, const std::string& message);

// The message for an error, with the text of refuse() or of the failed kernel.
const char* message_of(cudaError_t error);

enum class Place { kPageable, kPinned, kDevice };
struct Location {
  Place place = Place::kPageable;
  int device = -1;
};
Location locate(const void* address);

// Puts work into a stream, as egpuDescribeLaunch describes it; ticket: set to its own.
cudaError_t launch(cudaStream_t stream, WorkPointer work, Ticket* ticket = nullptr);

// Waits for all streams of a device, as `call`.
void synchronize_device(const char* call, int device);

}  // namespace gpu
