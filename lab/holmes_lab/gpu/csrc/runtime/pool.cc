// Memory that is allocated and freed in a stream's order. A pool keeps nothing: freed memory belongs to the
// device at once.

#include "api.h"
#include "memory.h"

struct CUmemPoolHandle_st {
  int device = 0;
  unsigned long long attributes[16] = {};  // by cudaMemPoolAttr
};

using gpu::result;

namespace {

CUmemPoolHandle_st* default_pool(int device) {
  static auto* pools = new std::map<int, CUmemPoolHandle_st>;
  static std::mutex mutex;
  std::lock_guard<std::mutex> lock(mutex);
  CUmemPoolHandle_st& pool = (*pools)[device];
  pool.device = device;
  return &pool;
}

bool is_flag(enum cudaMemPoolAttr attribute) {
  return attribute < cudaMemPoolAttrReleaseThreshold;
}  // an int

}  // namespace

extern "C" {

cudaError_t cudaMallocFromPoolAsync(void** address, size_t size, cudaMemPool_t pool, cudaStream_t) {
  *address = gpu::memory_of(pool->device).allocate(size);
  return result(*address ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaMallocAsync(void** address, size_t size, cudaStream_t stream) {
  return cudaMallocFromPoolAsync(address, size, default_pool(gpu::current_device()), stream);
}

cudaError_t cudaFreeAsync(void* address, cudaStream_t stream) {
  gpu::Location where = gpu::locate(address);
  if (where.place != gpu::Place::kDevice) return result(cudaErrorInvalidValue);
  auto work = std::make_shared<gpu::Work>();
  work->kind = gpu::Kind::kCopy;
  work->name = "cudaFreeAsync";
  work->run = [=] { gpu::memory_of(where.device).free(address); };
  return gpu::launch(stream, std::move(work));
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int device) {
  *pool = default_pool(device);
  return result(cudaSuccess);
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t* pool, const struct cudaMemPoolProps* properties) {
  *pool = new CUmemPoolHandle_st;
  (*pool)->device = properties->location.id;
  return result(cudaSuccess);
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  delete pool;
  return result(cudaSuccess);
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void* value) {
  pool->attributes[attribute] =
      is_flag(attribute) ? *static_cast<int*>(value) : *static_cast<uint64_t*>(value);
  return result(cudaSuccess);
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void* value) {
  if (is_flag(attribute)) {
    *static_cast<int*>(value) = static_cast<int>(pool->attributes[attribute]);
  } else {
    *static_cast<uint64_t*>(value) = pool->attributes[attribute];
  }
  return result(cudaSuccess);
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const struct cudaMemAccessDesc*, size_t) {
  return result(cudaSuccess);
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return result(cudaSuccess); }
}
