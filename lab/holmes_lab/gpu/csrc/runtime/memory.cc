#include "memory.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vector>

#include "api.h"
#include "emulated_gpu.h"
#include "text.h"

namespace gpu {

namespace {

constexpr size_t kAlignment = 512, kPage = 4096;
constexpr size_t kReserve = 256u << 20;  // bytes of this machine's memory that device memory does not use

size_t rounded(size_t size, size_t unit) { return (size + unit - 1) / unit * unit; }

size_t machine_memory_left() {
  FILE* file = fopen("/proc/meminfo", "r");
  char line[128];
  unsigned long long kilobytes = 0;
  while (file && fgets(line, sizeof line, file)) {
    if (sscanf(line, "MemAvailable: %llu kB", &kilobytes) == 1) break;
  }
  if (file) fclose(file);
  return kilobytes << 10;
}

// Pinned memory and other processes' device memory: beginning -> (end, where it counts).
struct Range {
  const char* end;
  Location location;
};
std::mutex ranges_mutex;
std::map<const char*, Range>& ranges() {
  static auto* made = new std::map<const char*, Range>;
  return *made;
}

void add_range(const void* begin, size_t size, Location location) {
  std::lock_guard<std::mutex> lock(ranges_mutex);
  const char* first = static_cast<const char*>(begin);
  ranges()[first] = {first + size, location};
}

// Removes the range that begins there, and returns its size; 0: there was none.
size_t remove_range(const void* begin) {
  std::lock_guard<std::mutex> lock(ranges_mutex);
  auto found = ranges().find(static_cast<const char*>(begin));
  if (found == ranges().end()) return 0;
  size_t size = found->second.end - found->first;
  ranges().erase(found);
  return size;
}

// Content of an IPC handle (64 bytes).
struct Shared {
  int process, file;
  size_t offset, size;
};
static_assert(sizeof(Shared) <= sizeof(cudaIpcMemHandle_t), "an IPC handle is too small");

}  // namespace

DeviceMemory::DeviceMemory(int device) {
  total_ = static_cast<size_t>(egpuSetting("MEMORY_MB", EGPU_MEMORY_MB)) << 20;
  file_ = memfd_create(text("emulated-gpu-%d", device).c_str(), MFD_CLOEXEC);
  if (file_ < 0 || ftruncate(file_, static_cast<off_t>(total_)) != 0) {
    fprintf(stderr, "holmes: emulated GPU: no %zu MB of device memory: %s\n", total_ >> 20, strerror(errno));
    _exit(2);
  }
  void* mapped = mmap(nullptr, total_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
  if (mapped == MAP_FAILED) {
    fprintf(stderr, "holmes: emulated GPU: %zu MB of device memory cannot be mapped: %s\n", total_ >> 20,
            strerror(errno));
    _exit(2);
  }
  base_ = static_cast<char*>(mapped);
  free_[0] = total_;
}

void* DeviceMemory::allocate(size_t size) {
  size = rounded(size ? size : 1, kAlignment);
  if (size + kReserve > machine_memory_left()) {
    fprintf(stderr,
            "holmes: emulated GPU: this machine has no %zu MB left for device memory; run fewer ranks or a"
            " smaller model\n",
            size >> 20);
    return nullptr;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  auto best = free_.end();
  for (auto place = free_.begin(); place != free_.end(); ++place) {
    if (place->second >= size && (best == free_.end() || place->second < best->second)) best = place;
  }
  if (best == free_.end()) return nullptr;
  size_t offset = best->first, left = best->second - size;
  free_.erase(best);
  if (left) free_[offset + size] = left;
  pieces_[offset] = size;
  used_ += size;
  if (egpuSetting("RANDOM", 0))
    memset(base_ + offset, 0xff, size);  // NaN, so that reads of memory without a value show
  return base_ + offset;
}

bool DeviceMemory::free(void* address) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto piece = pieces_.find(offset(address));
  if (!holds(address) || piece == pieces_.end()) return false;
  auto [begin, size] = *piece;
  pieces_.erase(piece);
  used_ -= size;
  size_t first = rounded(begin, kPage), last = (begin + size) / kPage * kPage;
  if (last > first)
    fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(first),
              static_cast<off_t>(last - first));
  auto after = free_.lower_bound(begin);
  if (after != free_.end() && begin + size == after->first) {
    size += after->second;
    after = free_.erase(after);
  }
  if (after != free_.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == begin) {
      before->second += size;
      return true;
    }
  }
  free_[begin] = size;
  return true;
}

bool DeviceMemory::holds(const void* address) const {
  auto* place = static_cast<const char*>(address);
  return place >= base_ && place < base_ + total_;
}

size_t DeviceMemory::used() {
  std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

bool DeviceMemory::piece_of(const void* address, size_t* begin, size_t* size) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto piece = pieces_.upper_bound(offset(address));
  if (piece == pieces_.begin()) return false;
  std::tie(*begin, *size) = *std::prev(piece);
  return offset(address) < *begin + *size;
}

DeviceMemory& memory_of(int device) {
  static auto* memories = [] {
    auto* made = new std::vector<DeviceMemory*>;
    for (int number = 0; number < device_count(); ++number) made->push_back(new DeviceMemory(number));
    return made;
  }();
  return *(*memories)[device];
}

Location locate(const void* address) {
  for (int device = 0; device < device_count(); ++device) {
    if (memory_of(device).holds(address)) return {Place::kDevice, device};
  }
  std::lock_guard<std::mutex> lock(ranges_mutex);
  auto found = ranges().upper_bound(static_cast<const char*>(address));
  if (found == ranges().begin() || std::prev(found)->second.end <= address) return {};
  return std::prev(found)->second.location;
}

}  // namespace gpu

using gpu::Location;
using gpu::Place;
using gpu::refuse;
using gpu::result;

extern "C" {

cudaError_t cudaMalloc(void** address, size_t size) {
  int device = gpu::current_device();
  if (size == 0) {
    *address = nullptr;
    return result(cudaSuccess);
  }
  // CUDA's cudaMalloc waits for the device when it has to map memory. With --gpu-order random, this function
  // always waits.
  if (egpuSetting("RANDOM", 0)) gpu::synchronize_device("cudaMalloc", device);
  *address = gpu::memory_of(device).allocate(size);
  return result(*address ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void* address) {
  if (!address) return result(cudaSuccess);
  Location where = gpu::locate(address);
  if (where.place != Place::kDevice) return result(cudaErrorInvalidValue);
  gpu::synchronize_device("cudaFree", where.device);
  return result(gpu::memory_of(where.device).free(address) ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMallocManaged(void**, size_t, unsigned) {
  return refuse(cudaErrorNotSupported, "managed memory (cudaMallocManaged) is not emulated");
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  gpu::DeviceMemory& memory = gpu::memory_of(gpu::current_device());
  *total = memory.total();
  *free = memory.total() - memory.used();
  return result(cudaSuccess);
}

cudaError_t cudaHostAlloc(void** address, size_t size, unsigned) {
  void* mapped = mmap(nullptr, gpu::rounded(size ? size : 1, gpu::kPage), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return result(cudaErrorMemoryAllocation);
  gpu::add_range(mapped, size, {Place::kPinned, -1});
  *address = mapped;
  return result(cudaSuccess);
}

cudaError_t cudaMallocHost(void** address, size_t size) {
  return cudaHostAlloc(address, size, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void* address) {
  if (!address) return result(cudaSuccess);
  for (int device = 0; device < gpu::device_count(); ++device)
    gpu::synchronize_device("cudaFreeHost", device);
  size_t size = gpu::remove_range(address);
  if (!size) return result(cudaErrorInvalidValue);
  munmap(address, gpu::rounded(size, gpu::kPage));
  return result(cudaSuccess);
}

cudaError_t cudaHostRegister(void* address, size_t size, unsigned) {
  if (gpu::locate(address).place == Place::kPinned) return result(cudaErrorHostMemoryAlreadyRegistered);
  gpu::add_range(address, size, {Place::kPinned, -1});
  return result(cudaSuccess);
}

cudaError_t cudaHostUnregister(void* address) {
  return result(gpu::remove_range(address) ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

cudaError_t cudaHostGetDevicePointer(void** device_address, void* address, unsigned) {
  *device_address = address;
  return result(cudaSuccess);
}

cudaError_t cudaHostGetFlags(unsigned* flags, void*) {
  *flags = cudaHostAllocMapped;
  return result(cudaSuccess);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* attributes, const void* address) {
  Location where = gpu::locate(address);
  memset(attributes, 0, sizeof *attributes);
  attributes->type = where.place == Place::kDevice   ? cudaMemoryTypeDevice
                     : where.place == Place::kPinned ? cudaMemoryTypeHost
                                                     : cudaMemoryTypeUnregistered;
  attributes->device = where.place == Place::kDevice   ? where.device
                       : where.place == Place::kPinned ? gpu::current_device()
                                                       : -2;
  attributes->devicePointer = where.place == Place::kPageable ? nullptr : const_cast<void*>(address);
  attributes->hostPointer = where.place == Place::kDevice ? nullptr : const_cast<void*>(address);
  return result(cudaSuccess);
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* address) {
  Location where = gpu::locate(address);
  gpu::Shared shared{getpid(), 0, 0, 0};
  if (where.place != Place::kDevice ||
      !gpu::memory_of(where.device).piece_of(address, &shared.offset, &shared.size)) {
    return result(cudaErrorInvalidValue);
  }
  shared.file = gpu::memory_of(where.device).file();
  memset(handle, 0, sizeof *handle);
  memcpy(handle, &shared, sizeof shared);
  return result(cudaSuccess);
}

// Maps the whole pages around the piece: the caller gets the beginning of the piece.
cudaError_t cudaIpcOpenMemHandle(void** address, cudaIpcMemHandle_t handle, unsigned) {
  gpu::Shared shared;
  memcpy(&shared, &handle, sizeof shared);
  int file = open(gpu::text("/proc/%d/fd/%d", shared.process, shared.file).c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0)
    return refuse(cudaErrorInvalidValue,
                  gpu::text("the memory of process %d cannot be opened", shared.process));
  size_t lead = shared.offset % gpu::kPage;
  void* mapped = mmap(nullptr, shared.size + lead, PROT_READ | PROT_WRITE, MAP_SHARED, file,
                      static_cast<off_t>(shared.offset - lead));
  close(file);
  if (mapped == MAP_FAILED) return result(cudaErrorMemoryAllocation);
  *address = static_cast<char*>(mapped) + lead;
  gpu::add_range(*address, shared.size, {Place::kDevice, gpu::current_device()});
  return result(cudaSuccess);
}

cudaError_t cudaIpcCloseMemHandle(void* address) {
  size_t size = gpu::remove_range(address), lead = reinterpret_cast<size_t>(address) % gpu::kPage;
  if (!size) return result(cudaErrorInvalidValue);
  for (int device = 0; device < gpu::device_count(); ++device)
    gpu::synchronize_device("cudaIpcCloseMemHandle", device);
  munmap(static_cast<char*>(address) - lead, size + lead);
  return result(cudaSuccess);
}
}
