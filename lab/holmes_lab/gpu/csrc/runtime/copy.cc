// Copies and fills. Their waits depend on the kinds of memory (CUDA Runtime API, "API synchronization
// behavior").

#include <string.h>

#include <string_view>

#include "api.h"
#include "races.h"
#include "text.h"

namespace gpu {

namespace {

struct Copy {
  char* target;
  const char* source;
  size_t target_pitch, source_pitch, width, height;

  void run() const {
    if (height == 1) {
      memmove(target, source, width);
      return;
    }
    for (size_t row = 0; row < height; ++row)
      memmove(target + row * target_pitch, source + row * source_pitch, width);
  }
};

// If missing waits are searched for, records the memory of a copy that streams share. Changes that the host
// makes to a pinned source before the copy runs are reported when it runs.
void search_races(Work* work, const Copy& copy, Place from, Place to) {
  if (copy.height > 1 || !Scheduler::instance().searches_races()) return;
  if (from != Place::kPageable) work->accesses.push_back({copy.source, copy.width, false});
  if (to != Place::kPageable) work->accesses.push_back({copy.target, copy.width, true});
  if (from != Place::kPinned || !Scheduler::instance().known_to_host(copy.source, copy.width)) return;
  auto content = [=] { return std::hash<std::string_view>()({copy.source, copy.width}); };
  work->run = [=, before = content(), run = std::move(work->run)] {
    if (content() != before)
      tell_race(text("\"bytes\": %zu, \"first\": {%s}", copy.width, described(*work).c_str()));
    run();
  };
}

// Puts a copy into a stream. From pageable memory the source is taken now; to pageable memory the call waits.
cudaError_t enqueue(const char* call, Copy copy, cudaStream_t stream, bool wait) {
  if (copy.width == 0 || copy.height == 0) return result(cudaSuccess);
  Place from = locate(copy.source).place, to = locate(copy.target).place;
  auto work = std::make_shared<Work>();
  work->kind = Kind::kCopy;
  work->name = call;
  if (from == Place::kPageable && to != Place::kPageable && !wait) {
    auto staged = std::make_shared<std::vector<char>>(copy.width * copy.height);
    Copy{staged->data(), copy.source, copy.width, copy.source_pitch, copy.width, copy.height}.run();
    copy.source = staged->data();
    copy.source_pitch = copy.width;
    work->run = [copy, staged] { copy.run(); };
  } else {
    work->run = [copy] { copy.run(); };
  }
  search_races(work.get(), copy, from, to);
  cudaError_t error = launch(stream, std::move(work));
  if (error == cudaSuccess && (wait || to == Place::kPageable)) {
    Scheduler::instance().wait(call, {Scheduler::instance().last(stream_of(stream))});
    error = result(cudaSuccess);
  }
  return error;
}

Copy flat(void* target, const void* source, size_t size) {
  return {static_cast<char*>(target), static_cast<const char*>(source), size, size, size, 1};
}

bool between_devices(const void* target, const void* source) {
  return locate(target).place == Place::kDevice && locate(source).place == Place::kDevice;
}

cudaError_t fill(const char* call, void* target, int value, size_t size, cudaStream_t stream) {
  if (size == 0) return result(cudaSuccess);
  auto work = std::make_shared<Work>();
  work->kind = Kind::kCopy;
  work->name = call;
  work->run = [=] { memset(target, value, size); };
  search_races(work.get(), flat(target, target, size), Place::kPageable, locate(target).place);
  return launch(stream, std::move(work));
}

}  // namespace

}  // namespace gpu

extern "C" {

cudaError_t cudaMemcpy(void* target, const void* source, size_t size, enum cudaMemcpyKind) {
  return gpu::enqueue("cudaMemcpy", gpu::flat(target, source, size), nullptr,
                      !gpu::between_devices(target, source));
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t size, enum cudaMemcpyKind,
                            cudaStream_t stream) {
  return gpu::enqueue("cudaMemcpyAsync", gpu::flat(target, source, size), stream, false);
}

cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t size,
                                cudaStream_t stream) {
  return gpu::enqueue("cudaMemcpyPeerAsync", gpu::flat(target, source, size), stream, false);
}

cudaError_t cudaMemcpyPeer(void* target, int, const void* source, int, size_t size) {
  return gpu::enqueue("cudaMemcpyPeer", gpu::flat(target, source, size), nullptr, false);
}

cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind, cudaStream_t stream) {
  gpu::Copy copy{static_cast<char*>(target),
                 static_cast<const char*>(source),
                 target_pitch,
                 source_pitch,
                 width,
                 height};
  return gpu::enqueue("cudaMemcpy2DAsync", copy, stream, false);
}

cudaError_t cudaMemcpyBatchAsync(void* const* targets, const void* const* sources, const size_t* sizes,
                                 size_t count, struct cudaMemcpyAttributes*, size_t*, size_t,
                                 cudaStream_t stream) {
  for (size_t index = 0; index < count; ++index) {
    cudaError_t error = gpu::enqueue("cudaMemcpyBatchAsync",
                                     gpu::flat(targets[index], sources[index], sizes[index]), stream, false);
    if (error != cudaSuccess) return error;
  }
  return gpu::result(cudaSuccess);
}

cudaError_t cudaMemset(void* target, int value, size_t size) {
  return gpu::fill("cudaMemset", target, value, size, nullptr);
}

cudaError_t cudaMemsetAsync(void* target, int value, size_t size, cudaStream_t stream) {
  return gpu::fill("cudaMemsetAsync", target, value, size, stream);
}
}
