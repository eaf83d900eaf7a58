// Streams and events.

#include "api.h"
#include "text.h"

namespace gpu {

namespace {

// The default streams: one legacy stream for each device, one stream for each thread and device.
StreamPointer default_stream(int device, bool of_thread) {
  if (of_thread) {
    thread_local std::map<int, StreamPointer> streams;
    StreamPointer& stream = streams[device];
    if (!stream) stream = Scheduler::instance().make_stream(device, cudaStreamDefault, 0);
    return stream;
  }
  static std::mutex mutex;
  static auto* streams = new std::map<int, StreamPointer>;
  std::lock_guard<std::mutex> lock(mutex);
  StreamPointer& stream = (*streams)[device];
  if (!stream) stream = Scheduler::instance().make_stream(device, cudaStreamDefault, 0, /*legacy=*/true);
  return stream;
}

cudaError_t make(cudaStream_t* handle, unsigned flags, int priority) {
  *handle = new CUstream_st{Scheduler::instance().make_stream(current_device(), flags, priority)};
  return result(cudaSuccess);
}

}  // namespace

StreamPointer stream_of(cudaStream_t handle) {
  if (handle == nullptr || handle == cudaStreamLegacy) return default_stream(current_device(), false);
  if (handle == cudaStreamPerThread) return default_stream(current_device(), true);
  return handle->stream;
}

void synchronize_device(const char* call, int device) {
  Scheduler& scheduler = Scheduler::instance();
  scheduler.wait(call, scheduler.last_of_device(device));
}

}  // namespace gpu

using gpu::result;
using gpu::Scheduler;

extern "C" {

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return gpu::make(stream, cudaStreamDefault, 0); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return gpu::make(stream, flags, 0);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return gpu::make(stream, flags, priority);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread) {
    return result(cudaErrorInvalidResourceHandle);
  }
  Scheduler::instance().destroy_stream(stream->stream);
  delete stream;
  return result(cudaSuccess);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = gpu::stream_of(stream)->priority;
  return result(cudaSuccess);
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) {
  *flags = gpu::stream_of(stream)->flags;
  return result(cudaSuccess);
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = gpu::stream_of(stream)->id;
  return result(cudaSuccess);
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int* device) {
  *device = gpu::stream_of(stream)->device;
  return result(cudaSuccess);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return result(cudaSuccess);
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Scheduler& scheduler = Scheduler::instance();
  return result(scheduler.done(scheduler.last(gpu::stream_of(handle))) ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Scheduler& scheduler = Scheduler::instance();
  scheduler.wait("cudaStreamSynchronize", {scheduler.last(gpu::stream_of(handle))});
  return result(cudaSuccess);
}

cudaError_t cudaDeviceSynchronize(void) {
  gpu::synchronize_device("cudaDeviceSynchronize", gpu::current_device());
  return result(cudaSuccess);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  if (!event->record) return result(cudaSuccess);  // never recorded: nothing to wait for
  auto work = std::make_shared<gpu::Work>();
  work->kind = gpu::Kind::kWait;
  work->name = "cudaStreamWaitEvent";
  work->record = event->record;
  work->after.push_back(event->record->ticket);
  return gpu::launch(handle, std::move(work));
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  *event = new CUevent_st{flags, nullptr};
  return result(cudaSuccess);
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return result(cudaSuccess);
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned) {
  auto work = std::make_shared<gpu::Work>();
  work->kind = gpu::Kind::kRecord;
  work->name = "cudaEventRecord";
  gpu::RecordPointer record = work->record = std::make_shared<gpu::Record>();
  cudaError_t error = gpu::launch(handle, std::move(work));
  event->record = std::move(record);  // now its ticket is known
  return error;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  return cudaEventRecordWithFlags(event, handle, 0);
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  bool done = !event->record || Scheduler::instance().done(event->record->ticket);
  return result(done ? cudaSuccess : cudaErrorNotReady);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (event->record) Scheduler::instance().wait("cudaEventSynchronize", {event->record->ticket});
  return result(cudaSuccess);
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (!start->record || !end->record || ((start->flags | end->flags) & cudaEventDisableTiming)) {
    return result(cudaErrorInvalidResourceHandle);
  }
  Scheduler& scheduler = Scheduler::instance();
  if (!scheduler.done(start->record->ticket) || !scheduler.done(end->record->ticket))
    return result(cudaErrorNotReady);
  *milliseconds = static_cast<float>((end->record->when - start->record->when) * 1e3);
  return result(cudaSuccess);
}
}
